"""What the compose test needs beyond Debian's docker.io, put into the cache: `python -m tests.compose.install`.

The compose v2 plugin is built from its Go module (three minutes of CPU); the wheels of the image are downloaded for
the Python that the base image gets. Both are skipped where they are there already or cannot be had.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.router.artifact_cache import cache_root

COMPOSE_VERSION = "v2.40.3"
_MODULE = "github.com/docker/compose/v2"


def plugin() -> Path:
    """The compose plugin's place."""
    return cache_root() / f"compose-{COMPOSE_VERSION}" / "docker-compose"


def wheels() -> Path:
    """The wheels' place, by what pyproject.toml wants: another dependency is another folder."""
    wanted = (Path(__file__).parents[2] / "pyproject.toml").read_bytes()
    return cache_root() / f"wheels-cp312-{hashlib.sha256(wanted).hexdigest()[:12]}"


def python312() -> Path | None:
    """A Python 3.12 whose whole prefix can go into an image."""
    given = os.environ.get("HARNESS_PYTHON312")
    candidates = [Path(given)] if given else sorted(Path.home().glob(".pyenv/versions/3.12*/bin/python3.12"))
    found = shutil.which("python3.12")
    if found and not candidates:
        candidates.append(Path(found))
    for path in candidates:
        done = subprocess.run([path, "-c", "import pip, sys; print(sys.prefix)"], capture_output=True, text=True)
        if done.returncode == 0:
            return path
    return None


def build_plugin() -> None:
    """With the Go toolchain on PATH."""
    target = plugin()
    if target.is_file():
        return
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "CGO_ENABLED": "0"}

        def run(*command: str) -> None:
            subprocess.run(command, cwd=folder, env=env, check=True)

        run("go", "mod", "init", "composebuild")
        run("go", "get", "-tool", f"{_MODULE}/cmd@{COMPOSE_VERSION}")
        flags = f"-s -w -X {_MODULE}/internal.Version={COMPOSE_VERSION}"
        run("go", "build", "-mod=mod", "-trimpath", "-ldflags", flags, "-o", "docker-compose", f"{_MODULE}/cmd")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(str(Path(folder) / "docker-compose"), target)


def download_wheels() -> None:
    """Of the image's Python."""
    python = python312()
    if python is None or (wheels().is_dir() and any(wheels().iterdir())):
        return
    root = Path(__file__).parents[2]
    wanted = subprocess.run(
        [python, root / "deploy" / "requirements.py"], capture_output=True, text=True, check=True
    ).stdout.split()
    subprocess.run([python, "-m", "pip", "download", "-q", "-d", wheels(), *wanted], check=True)


if __name__ == "__main__":
    for step in (build_plugin, download_wheels):
        try:
            step()
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"warning: {step.__name__}: {error}; the compose test will be skipped", file=sys.stderr)
