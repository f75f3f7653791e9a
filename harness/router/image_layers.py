"""Finds and copies one program out of an image's layers, without ever unpacking them.

Rules of the OCI image specification: layers are tar archives applied in order; `.wh.NAME` removes NAME of the
layers below, `.wh..wh..opq` all that the layers below hold in that folder. Only one regular file is ever
written, to a path of our choosing: names inside an archive are looked up, never used as paths on this
machine.
"""

from __future__ import annotations

import shutil
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from harness.errors import ComponentError

MAX_PROGRAM_BYTES = 1 << 30
ELF_MACHINE = {"amd64": 62, "arm64": 183}
"""e_machine of the ELF header (elf.h: EM_X86_64, EM_AARCH64)."""
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_OPAQUE = ".wh..wh..opq"
_WHITEOUT = ".wh."
_MAX_LINKS = 40
_BROKEN_TAR = (tarfile.TarError, EOFError, OSError, zlib.error)


@dataclass(frozen=True, slots=True)
class _Node:
    layer: int
    info: tarfile.TarInfo


Tree = dict[PurePosixPath, _Node]
"""What the merged layers hold, by path without the leading slash."""


def extract_program(
    layers: list[tuple[Path, str]], settings: dict[str, Any], arch: str, target: Path, image: str
) -> tuple[Path, str]:
    """Copy the program that the image would start to `target`; returns (target, its path in the image).

    layers: (archive, media type), lowest first. settings: the "config" object of the image's config
    (Entrypoint, Cmd, Env).
    """

    def fail(what: str) -> ComponentError:
        return ComponentError(f"image {image}", what)

    for _, media_type in layers:
        if media_type.endswith("zstd"):
            raise fail("its layers are zstd-compressed, which is not supported; give the program by path")
    command = settings.get("Entrypoint") or settings.get("Cmd") or []
    if not isinstance(command, list) or not command or not isinstance(command[0], str) or not command[0]:
        raise fail("its config names no entrypoint, so the program in it cannot be told")
    try:
        tree = merge([path for path, _ in layers])
        node, name = _find(tree, command[0], settings)
        if node is None:
            raise fail(f"its entrypoint {command[0]} is not in its layers")
        if node.info.size > MAX_PROGRAM_BYTES:
            raise fail(f"its entrypoint {name} has {node.info.size:,} bytes, allowed are {MAX_PROGRAM_BYTES:,}")
        with tarfile.open(layers[node.layer][0], "r:*") as archive:
            source = archive.extractfile(node.info)
            if source is None:
                raise fail(f"its entrypoint {name} is not a regular file")
            with target.open("wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
    except _BROKEN_TAR as error:
        raise fail(f"a layer is not a readable tar archive ({type(error).__name__}: {error})") from error
    if target.stat().st_size != node.info.size:
        raise fail(f"its entrypoint {name} ends early inside its layer")
    _check_elf(target, arch, fail(f"its entrypoint {name} is not a linux/{arch} program"))
    target.chmod(0o755)
    return target, f"/{name}"


def merge(archives: list[Path]) -> Tree:
    """The tree that the layers make together, lowest first."""
    tree: Tree = {}
    for number, path in enumerate(archives):
        own: Tree = {}
        removed: list[PurePosixPath] = []
        emptied: list[PurePosixPath] = []
        with tarfile.open(path, "r:*") as archive:
            for info in archive:
                name = _clean(info.name)
                if name is None:
                    continue
                if name.name == _OPAQUE:
                    emptied.append(name.parent)
                elif name.name.startswith(_WHITEOUT):
                    removed.append(name.with_name(name.name[len(_WHITEOUT) :]))
                else:
                    own[name] = _Node(number, info)
        # Whiteouts speak of the layers below only, wherever they stand in their own archive. Whatever is not
        # a folder also takes the place of a folder that was there, with all that it held.
        gone = {*removed, *(name for name, node in own.items() if not node.info.isdir())}
        hidden = set(emptied)
        tree = {
            name: node
            for name, node in tree.items()
            if name not in gone and gone.isdisjoint(name.parents) and hidden.isdisjoint(name.parents)
        }
        tree.update(own)
    return tree


def _clean(raw: str) -> PurePosixPath | None:
    """A member's name relative to the image's root; None for the root itself and for names that would leave
    it.
    """
    parts = [part for part in raw.split("/") if part not in ("", ".")]
    return PurePosixPath(*parts) if parts and ".." not in parts else None


def _find(tree: Tree, command: str, settings: dict[str, Any]) -> tuple[_Node | None, str]:
    """The regular file behind `command` and its path, searched on the image's PATH if it names no folder."""
    if "/" in command:
        working = str(settings.get("WorkingDir") or "/")
        candidates = [command if command.startswith("/") else f"{working}/{command}"]
    else:
        variables = [str(entry) for entry in settings.get("Env") or []]
        paths = [entry[len("PATH=") :] for entry in variables if entry.startswith("PATH=")]
        candidates = [f"{folder}/{command}" for folder in (paths[-1] if paths else DEFAULT_PATH).split(":")]
    for candidate in candidates:
        name = _resolve(tree, candidate)
        if name is not None:
            node = tree[name]
            if node.info.islnk():
                # A hard link holds no data: its target stands in the same archive or in one below.
                target = _clean(node.info.linkname)
                node = tree.get(target, node) if target is not None else node
            if node.info.isreg():
                return node, str(name)
    return None, command


def _resolve(tree: Tree, path: str) -> PurePosixPath | None:
    """Follow symbolic links as a kernel rooted in the image would; None if the path leads nowhere."""
    todo = [part for part in reversed(path.split("/")) if part not in ("", ".")]
    at: tuple[str, ...] = ()
    links = 0
    while todo:
        part = todo.pop()
        if part == "..":
            at = at[:-1]
            continue
        name = PurePosixPath(*at, part)
        node = tree.get(name)
        if node is not None and node.info.issym():
            links += 1
            if links > _MAX_LINKS:
                return None
            link = node.info.linkname
            at = () if link.startswith("/") else at
            todo += [step for step in reversed(link.split("/")) if step not in ("", ".")]
        else:
            at = (*at, part)
    found = PurePosixPath(*at)
    return found if found in tree else None


def _check_elf(path: Path, arch: str, error: ComponentError) -> None:
    with path.open("rb") as file:
        head = file.read(20)
    # ELF header: magic, 64-bit class, little endian, then e_machine at offset 18.
    if head[:6] != b"\x7fELF\x02\x01" or int.from_bytes(head[18:20], "little") != ELF_MACHINE.get(arch):
        raise error
