"""Makes small container images and Go-like programs in memory."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from dataclasses import dataclass, field
from typing import Any

OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def elf(machine: int = 62, body: bytes = b"router") -> bytes:
    """Enough of an ELF header: 64 bit, little endian, `machine` at offset 18."""
    return b"\x7fELF\x02\x01" + bytes(12) + machine.to_bytes(2, "little") + body


def varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def go_program(
    main: tuple[str, str, str],
    deps: list[tuple[str, str, str]] | None = None,
    settings: dict[str, str] | None = None,
    replaced: str = "",
    go: str = "go1.26.8",
    before: bytes = elf(),
) -> bytes:
    """A file with Go build information as the linker lays it out; a module is (path, version, checksum)."""
    lines = [f"path\t{main[0]}/cmd/epp", "mod\t" + "\t".join(main)]
    for dep in deps or []:
        lines.append("dep\t" + "\t".join(dep))
        if dep[0] == replaced:
            lines.append(f"=>\t{dep[0]}-fork\tv9.9.9\th1:fork=")
    lines += [f"build\t{key}={value}" for key, value in (settings or {}).items()]
    text = b"0" * 16 + ("\n".join(lines) + "\n").encode() + b"1" * 16
    blob = b"\xff Go buildinf:" + bytes([8, 2]) + bytes(16)
    blob += varint(len(go)) + go.encode() + varint(len(text)) + text
    return before + bytes(-len(before) % 16) + blob + b"rest of the program"


def tar_of(members: list[tarfile.TarInfo | tuple[str, bytes]], packed: bool = True) -> bytes:
    """A layer; a (name, content) pair is a regular file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size, info.mode = len(member[1]), 0o755
                archive.addfile(info, io.BytesIO(member[1]))
    raw = buffer.getvalue()
    return gzip.compress(raw, mtime=0) if packed else raw


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def folder(name: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode = tarfile.DIRTYPE, 0o755
    return info


@dataclass
class Image:
    """All blobs and manifests of an image by digest, and the digest that names the whole."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    layers: list[str] = field(default_factory=list)
    config: str = ""
    manifest: str = ""
    digest: str = ""


def make_image(
    layers: list[bytes],
    arch: str = "amd64",
    entrypoint: list[str] | None = None,
    index: bool = True,
    layer_type: str = OCI_LAYER,
    settings: dict[str, Any] | None = None,
    sizes: dict[int, int] | None = None,
) -> Image:
    """An image for linux/`arch`. sizes: layer number (0-based) -> the size that the manifest shall claim for
    it.
    """
    image = Image()

    def blob(content: bytes) -> str:
        image.blobs[digest_of(content)] = content
        return digest_of(content)

    inner = {"Entrypoint": entrypoint or ["/app/epp"]} | (settings or {})
    config = json.dumps({"os": "linux", "architecture": arch, "config": inner}).encode()
    image.config = blob(config)
    image.layers = [blob(layer) for layer in layers]
    descriptors = [
        {
            "mediaType": layer_type,
            "digest": digest,
            "size": (sizes or {}).get(number, len(image.blobs[digest])),
        }
        for number, digest in enumerate(image.layers)
    ]
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": {"mediaType": OCI_CONFIG, "digest": image.config, "size": len(config)},
            "layers": descriptors,
        }
    ).encode()
    image.manifest = image.digest = digest_of(manifest)
    image.manifests[image.manifest] = (OCI_MANIFEST, manifest)
    if index:
        entry = {"mediaType": OCI_MANIFEST, "digest": image.manifest, "size": len(manifest)}
        # As buildx writes them: an attestation beside the image, which must not be taken for it.
        other = entry | {"platform": {"os": "unknown", "architecture": "unknown"}}
        fitting = entry | {"platform": {"os": "linux", "architecture": arch}}
        body = json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [other, fitting]}).encode()
        image.digest = digest_of(body)
        image.manifests[image.digest] = (OCI_INDEX, body)
    return image
