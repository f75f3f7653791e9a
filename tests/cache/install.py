"""Installs LMCache 0.5.6 into this Python's environment without what only GPUs need.

    python -m tests.cache.install

`pip install lmcache` brings torch with NVIDIA's libraries, triton and cupy: 6.2 GB. This takes torch and lmcache
without their dependencies, adds what the storage stack really imports (requirements.txt), and puts empty stand-ins
where torch looks for CUDA's libraries (cuda_stubs.py; needs gcc and readelf): 1.8 GB. Both packages' own files are as
released. On a machine with a GPU, or for anything but this project's tests, install the extra `[lmcache]` instead.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from harness.cache.upstream import VERSION
from tests.cache.cuda_stubs import build

TORCH = "2.15.0"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def pip(*arguments: str) -> None:
    """Run this Python's pip quietly."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True)


def loads() -> bool:
    """Whether the stack can be imported, in a fresh process."""
    code = "import harness.cache.upstream as u; u.prepare(); import harness.cache.stack"
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def install() -> None:
    """Bring the environment to where `loads()` is true."""
    if loads():
        return
    for program in ("gcc", "readelf"):
        if shutil.which(program) is None:
            raise SystemExit(f"{program} is needed (Debian: apt-get install gcc binutils), or install '.[lmcache]'")
    print(f"LMCache {VERSION} with torch {TORCH}: 1.8 GB, some minutes, once", flush=True)
    pip("--no-deps", f"torch=={TORCH}", f"lmcache=={VERSION}")
    pip("-r", str(REQUIREMENTS))
    packages = Path(sysconfig.get_path("platlib"))
    if importlib.util.find_spec("nvidia") is None or not list(packages.glob("nvidia_*.dist-info")):
        build(packages / "torch" / "lib", packages / "nvidia" / "cu13" / "lib")
    if not loads():
        raise SystemExit("LMCache does not load; run: python -c 'import harness.cache.stack'")


if __name__ == "__main__":
    install()
