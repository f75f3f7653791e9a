"""Which harness this is: its version, and a digest of its code."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import fake_workers

_PACKAGE: Final = "llm-cluster-harness"
_DIGITS: Final = 12
_ROOTS: Final = (Path(__file__).parent, Path(fake_workers.__file__).parent)
_DECIDE_NOTHING: Final = _ROOTS[0] / "studies"
"""Studies say which experiments to run; what a run of one does is decided elsewhere."""


def harness_version() -> str:
    """Of the installed package; between two releases many trees have the same (see `harness_code`)."""
    return package_version(_PACKAGE)


@cache
def harness_code() -> str:
    """The first digits of the SHA-256 over all files that decide what a run does: code, profiles, networks.

    Of the files as they are at the first call in a process, some hundredths of a second.
    """
    digest = hashlib.sha256()
    for root in _ROOTS:
        for path in sorted(root.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and _DECIDE_NOTHING not in path.parents:
                content = path.read_bytes()
                digest.update(f"{root.name}/{path.relative_to(root).as_posix()} {len(content)}\n".encode())
                digest.update(content)
    return digest.hexdigest()[:_DIGITS]


def package_version(name: str) -> str:
    """Of an installed package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
