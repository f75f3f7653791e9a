"""The installed LMCache package: found, checked to be unmodified, and set up before its first import.

Nothing else in the harness imports lmcache at module level, so the core runs without it.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from harness.errors import ComponentError, InputError

VERSION = "0.5.6"
"""The release whose controllers' steps `harness.cache.stack` takes one by one."""

INSTALL = "pip install 'llm-cluster-harness[lmcache]' (docs/cache.md names a smaller way for machines without GPU)"

ENVIRONMENT = {
    "LMCACHE_TRACK_USAGE": "false",
    "DO_NOT_TRACK": "1",
    "LMCACHE_LOG_LEVEL": "ERROR",
    "LMCACHE_DISABLE_BANNER": "1",
    "OMP_NUM_THREADS": "1",
}
"""No usage reports to the outside, no log line per operation, no thread pool for arithmetic that never happens."""


@dataclass(frozen=True, slots=True)
class PackageCheck:
    """Result of comparing installed files with the wheel's own hashes."""

    version: str
    files: int
    changed: tuple[str, ...]
    """Files whose hash differs or that are missing."""
    added: tuple[str, ...]
    """Python files in the package's folder that its record does not list."""

    @property
    def unmodified(self) -> bool:
        """Whether every file is as released."""
        return not self.changed and not self.added


def available() -> bool:
    """Whether lmcache is installed (any version)."""
    return importlib.util.find_spec("lmcache") is not None


def prepare() -> None:
    """Must run before the first `import lmcache`. Raises InputError if the package is missing or another release."""
    if not available():
        raise InputError("cache", "LMCache is not installed", INSTALL)
    version = importlib.metadata.version("lmcache")
    if version != VERSION:
        raise InputError("cache", f"LMCache {version} is installed, {VERSION} is needed", INSTALL)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # reports to its maker are never wanted, whatever the environment says
    os.environ["LMCACHE_TRACK_USAGE"] = "false"
    import torch

    torch.set_num_threads(1)
    from lmcache.v1.mp_observability.event_bus import EventBusConfig, init_event_bus

    init_event_bus(EventBusConfig(enabled=False))


@cache
def check_package(name: str = "lmcache") -> PackageCheck:
    """Compare every installed file of a package with the SHA-256 in its RECORD; once per process."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise InputError("cache", f"{name} is not installed", INSTALL) from None
    record = distribution.read_text("RECORD")
    if record is None:
        raise ComponentError(name, "was installed without a RECORD, so its files cannot be checked")
    changed: list[str] = []
    listed: set[Path] = set()
    folders: set[Path] = set()
    files = 0
    for path, digest, _size in csv.reader(record.splitlines()):
        file = Path(str(distribution.locate_file(path))).resolve()
        listed.add(file)
        if path.split("/", 1)[0] == name:
            folders.add(Path(str(distribution.locate_file(name))).resolve())
        if not digest:
            continue  # RECORD itself and compiled caches
        algorithm, _, expected = digest.partition("=")
        files += 1
        try:
            actual = hashlib.new(algorithm, file.read_bytes()).digest()
        except OSError:
            changed.append(path)
            continue
        if base64.urlsafe_b64encode(actual).rstrip(b"=").decode() != expected:
            changed.append(path)
    added = [
        str(file.relative_to(folder.parent))
        for folder in folders
        for file in sorted(folder.rglob("*.py"))
        if file.resolve() not in listed
    ]
    return PackageCheck(distribution.version, files, tuple(changed), tuple(added))
