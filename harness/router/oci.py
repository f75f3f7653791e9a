"""A small read-only client for image registries: takes one program out of an image that is named by its
digest.

No Docker needed. Rules: the OCI distribution and image specifications (index -> manifest -> config and
layers, layers merged with whiteouts) and the registry token protocol (Bearer challenge). Every byte is
checked against the digest that named it, so what comes out is decided by the one digest that went in, not by
the registry, a proxy or a tag.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from harness.errors import ComponentError, InputError
from harness.router.artifact_cache import Progress, silent
from harness.router.image_layers import extract_program

INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFEST_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
MAX_DOCUMENT_BYTES = 4 << 20
"""Manifests and configs are a few KB; the specification suggests 4 MiB as the limit."""
MAX_LAYER_BYTES = 2 << 30
RETRY_DELAYS_S: tuple[float, ...] = (0.5, 2.0)
"""Waits before the second and third attempt of a request that broke on the way."""

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_REFERENCE = re.compile(
    r"(?P<host>[A-Za-z0-9.-]+(?::\d+)?|\[[0-9a-fA-F:]+\](?::\d+)?)/"
    r"(?P<repository>[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)(?::(?P<tag>[\w][\w.-]{0,127}))?(?:@(?P<digest>\S+))?"
)


@dataclass(frozen=True, slots=True)
class Reference:
    """An image by digest, e.g. registry.example/llm-d/router@sha256:...; `tag` is kept for the eye only."""

    host: str
    repository: str
    digest: str
    tag: str | None = None

    @property
    def name(self) -> str:
        return f"{self.host}/{self.repository}"

    def __str__(self) -> str:
        return f"{self.name}{':' + self.tag if self.tag else ''}@{self.digest}"


@dataclass(frozen=True, slots=True)
class PulledProgram:
    """What `pull_program` took out of the image."""

    path: Path
    entrypoint: str
    manifest_digest: str


def parse_reference(text: str, where: str = "router.image") -> Reference:
    """`HOST/REPOSITORY[:TAG]@sha256:HEX`; anything without a digest is refused, since a tag can be moved."""
    match = _REFERENCE.fullmatch(text.strip())
    example = "give it as HOST/REPOSITORY@sha256:<64 hex digits>"
    # Without a dot, a port or "localhost" the first part is no host but part of a Docker Hub repository name.
    if match is None or not (re.search(r"[.:]", match["host"]) or match["host"] == "localhost"):
        raise InputError(where, f"{text!r} is not an image reference with a registry host", example)
    if match["digest"] is None:
        raise InputError(where, f"{text!r} has no digest, and nothing is downloaded by tag", example)
    if not _DIGEST.fullmatch(match["digest"]):
        raise InputError(where, f"{match['digest']!r} is not a SHA-256 digest", example)
    return Reference(match["host"], match["repository"], match["digest"], match["tag"])


def pull_program(ref: Reference, arch: str, into: Path, progress: Progress = silent) -> PulledProgram:
    """Write the entrypoint program of the linux/`arch` image `ref` to `into`/epp.

    `into` is an existing folder that is thrown away if this raises; the layers lie in it only while they are
    needed. Raises ComponentError when the registry cannot be reached, refuses, or sends anything else than
    what was named.
    """
    with _Registry(ref) as registry:
        progress(f"asking {ref.host} for {ref.repository} {ref.digest[:19]}")
        manifest, manifest_digest = _manifest(registry, ref, arch)
        config_of = _descriptor(registry, manifest.get("config"), "config", MAX_DOCUMENT_BYTES)
        config = _json(registry, registry.document("blobs", config_of.digest), "image config")
        got = (config.get("os"), config.get("architecture"))
        if got != ("linux", arch):
            raise registry.error(f"the image is for {got[0]}/{got[1]}, this machine needs linux/{arch}")
        layers: list[tuple[Path, str]] = []
        descriptors = manifest.get("layers")
        if not isinstance(descriptors, list) or not descriptors:
            raise registry.error("the image's manifest names no layers")
        for number, raw in enumerate(descriptors, 1):
            layer = _descriptor(registry, raw, f"layer {number}", MAX_LAYER_BYTES)
            target = into / f"layer-{number}"
            label = f"layer {number} of {len(descriptors)}"
            registry.blob_to_file(layer, target, label, progress)
            layers.append((target, layer.media_type))
    settings = config.get("config")
    path, entrypoint = extract_program(
        layers, settings if isinstance(settings, dict) else {}, arch, into / "epp", str(ref)
    )
    for target, _ in layers:
        target.unlink()
    return PulledProgram(path, entrypoint, manifest_digest)


@dataclass(frozen=True, slots=True)
class _Descriptor:
    digest: str
    size_bytes: int
    media_type: str


def _descriptor(registry: _Registry, raw: object, what: str, limit_bytes: int) -> _Descriptor:
    if isinstance(raw, dict):
        digest, size, media_type = raw.get("digest"), raw.get("size"), raw.get("mediaType", "")
        if isinstance(digest, str) and _DIGEST.fullmatch(digest) and isinstance(size, int) and size >= 0:
            if size > limit_bytes:
                raise registry.error(f"the {what} claims {size:,} bytes, more than the {limit_bytes:,} allowed")
            return _Descriptor(digest, size, str(media_type))
    raise registry.error(f"the image's manifest describes its {what} in a way that cannot be used: {raw!r:.200}")


def _manifest(registry: _Registry, ref: Reference, arch: str) -> tuple[dict[str, Any], str]:
    """The image manifest for linux/`arch` behind `ref` (itself, or the fitting one of an index) and its
    digest.
    """
    document = _json(registry, registry.document("manifests", ref.digest), "manifest")
    if "manifests" not in document and document.get("mediaType") not in INDEX_TYPES:
        return document, ref.digest
    offers: list[str] = []
    for entry in document.get("manifests") or []:
        platform = entry.get("platform") or {} if isinstance(entry, dict) else {}
        offers.append(f"{platform.get('os')}/{platform.get('architecture')}")
        if offers[-1] == f"linux/{arch}":
            chosen = _descriptor(registry, entry, "platform manifest", MAX_DOCUMENT_BYTES)
            inner = _json(registry, registry.document("manifests", chosen.digest), "platform manifest")
            if "manifests" in inner:
                raise registry.error("an index inside an index is not supported")
            return inner, chosen.digest
    raise registry.error(f"the image has no linux/{arch}; it has {', '.join(offers) or 'nothing'}")


def _json(registry: _Registry, body: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError as error:
        raise registry.error(f"the {what} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise registry.error(f"the {what} is not a JSON object")
    return value


class _Registry:
    """One conversation with a registry about one repository: token, retries, verified bytes."""

    def __init__(self, ref: Reference) -> None:
        self.ref = ref
        host = ref.host
        name = urlsplit(f"//{host}").hostname or ""
        # As Docker does: plain HTTP for a registry on this very machine only.
        self._scheme = "http" if name == "localhost" or name.startswith("127.") or name == "::1" else "https"
        self._base = f"{self._scheme}://{'registry-1.docker.io' if host == 'docker.io' else host}/v2/{ref.repository}"
        self._token: str | None = None
        # Redirects are followed (registries keep blobs elsewhere); httpx drops Authorization when the host
        # changes.
        self._http = httpx.Client(follow_redirects=True, timeout=httpx.Timeout(60.0, connect=10.0))

    def __enter__(self) -> _Registry:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def error(self, what: str) -> ComponentError:
        return ComponentError(f"image {self.ref}", what)

    def document(self, kind: str, digest: str) -> bytes:
        """A manifest or config whole, checked against `digest`."""
        chunks: list[bytes] = []
        self._fetch(kind, digest, MAX_DOCUMENT_BYTES, None, chunks.clear, chunks.append, lambda _n: None)
        return b"".join(chunks)

    def blob_to_file(self, blob: _Descriptor, target: Path, label: str, progress: Progress) -> None:
        """A layer into a file, hashed while it streams; on any failure the file is not to be used (and is
        removed).
        """
        said_s = [time.monotonic()]

        def tell(done_bytes: int) -> None:
            now_s = time.monotonic()
            if now_s - said_s[0] >= 2.0:
                said_s[0] = now_s
                progress(f"{label}: {done_bytes / 1e6:.0f} of {blob.size_bytes / 1e6:.0f} MB")

        try:
            with target.open("wb") as file:

                def restart() -> None:
                    file.seek(0)
                    file.truncate()

                self._fetch("blobs", blob.digest, blob.size_bytes, blob.size_bytes, restart, file.write, tell)
        except BaseException:
            target.unlink(missing_ok=True)
            raise
        progress(f"{label}: {blob.size_bytes / 1e6:.1f} MB, checksum verified")

    def _fetch(
        self,
        kind: str,
        digest: str,
        limit: int,
        size: int | None,
        restart: Callable[[], object],
        write: Callable[[bytes], object],
        tell: Callable[[int], None],
    ) -> None:
        """Stream one object through `write`; `restart` forgets a broken attempt. Sizes in bytes."""
        failure = ""
        for delay_s in (*RETRY_DELAYS_S, None):
            restart()
            try:
                failure = self._attempt(kind, digest, limit, size, write, tell)
            except (httpx.RequestError, httpx.InvalidURL) as error:
                failure = f"{type(error).__name__}: {error}"
            if not failure:
                return
            if delay_s is not None:
                time.sleep(delay_s)
        raise ComponentError(
            f"image {self.ref}",
            f"{self.ref.host} could not be read ({failure}; {len(RETRY_DELAYS_S) + 1} attempts)",
            "Check the network (and HTTPS_PROXY), or give the router's program itself by path.",
        )

    def _attempt(
        self,
        kind: str,
        digest: str,
        limit: int,
        size: int | None,
        write: Callable[[bytes], object],
        tell: Callable[[int], None],
    ) -> str:
        """One request. Returns what went wrong if a further attempt may help, "" when all is verified, else
        raises.
        """
        headers = {"Accept": ", ".join(INDEX_TYPES + MANIFEST_TYPES) if kind == "manifests" else "*/*"}
        headers["Accept-Encoding"] = "identity"
        for fresh_token in (False, True):
            if self._token:
                headers["Authorization"] = f"Bearer {self._token}"
            with self._http.stream("GET", f"{self._base}/{kind}/{digest}", headers=headers) as response:
                if response.status_code == 401 and not fresh_token:
                    challenge = response.headers.get("WWW-Authenticate", "")
                    self._token = self._new_token(challenge)
                    continue
                if response.status_code >= 500 or response.status_code == 429:
                    return f"HTTP {response.status_code}"
                self._refuse(response.status_code, kind, digest)
                hashed, done = hashlib.sha256(), 0
                for chunk in response.iter_raw():
                    done += len(chunk)
                    if done > limit:
                        raise self.error(f"{digest} is longer than the {limit:,} bytes it may have; nothing was kept")
                    hashed.update(chunk)
                    write(chunk)
                    tell(done)
            if size is not None and done < size:
                return f"{digest[:19]} ended after {done:,} of {size:,} bytes"
            if f"sha256:{hashed.hexdigest()}" != digest:
                raise self.error(f"content has SHA-256 {hashed.hexdigest()}, asked for was {digest}; nothing was kept")
            return ""
        raise AssertionError("unreachable: the second round never continues")

    def _refuse(self, status: int, kind: str, digest: str) -> None:
        if status == 200:
            return
        if status == 404:
            raise self.error(f"{self.ref.host} has no {kind[:-1]} {digest}")
        if status in (401, 403):
            raise self.error(
                f"{self.ref.host} refuses access (HTTP {status}); only public images are read, "
                "so fetch a private one with your own tools and give the program by path"
            )
        raise self.error(f"{self.ref.host} answered HTTP {status} to the request for {kind[:-1]} {digest}")

    def _new_token(self, challenge: str) -> str:
        """An anonymous pull token as the Bearer challenge asks for."""
        scheme, _, rest = challenge.partition(" ")
        fields = {key.lower(): value for key, value in re.findall(r'(\w+)="([^"]*)"', rest)}
        realm = fields.pop("realm", "")
        if scheme.lower() != "bearer" or urlsplit(realm).scheme not in {"https", self._scheme}:
            raise self.error(f"{self.ref.host} asks for a login that is not supported ({challenge[:120]!r})")
        wanted = {"service": fields.get("service", ""), "scope": f"repository:{self.ref.repository}:pull"}
        response = self._http.get(realm, params={key: value for key, value in wanted.items() if value})
        if response.status_code >= 500:
            # Counts as a broken attempt, like any other passing trouble of the registry.
            raise httpx.TransportError(f"token service: HTTP {response.status_code}")
        try:
            body = response.json() if response.status_code == 200 else {}
        except ValueError:
            body = {}
        token = (body.get("token") or body.get("access_token")) if isinstance(body, dict) else None
        if not isinstance(token, str) or not token:
            raise self.error(f"{self.ref.host} gives no anonymous pull token (HTTP {response.status_code})")
        return token
