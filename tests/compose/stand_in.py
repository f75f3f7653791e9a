"""Images under the official names, made from this machine's files: no registry is asked.

Their versions are those of the programs at hand; `versions` says which, since the names then do not.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

LIBRARIES = ("libnss_dns.so.2", "libnss_files.so.2", "libresolv.so.2", "libgcc_s.so.1", "libstdc++.so.6", "librt.so.1",
             "libpthread.so.0", "libdl.so.2", "libm.so.6", "libutil.so.1")  # fmt: skip
TOOLS = ("/bin/sh", "/usr/bin/env", "/bin/mkdir", "/bin/rm", "/bin/chown", "/bin/cat", "/bin/ls")


def _import(root: Path, name: str, changes: Sequence[str]) -> None:
    """`docker import` of a folder."""
    arguments = [word for change in changes for word in ("-c", change)]
    tar = subprocess.Popen(["tar", "-C", root, "-c", "--owner=0", "--group=0", "."], stdout=subprocess.PIPE)
    subprocess.run(["docker", "import", *arguments, "-", name], stdin=tar.stdout, check=True, stdout=subprocess.DEVNULL)
    assert tar.wait() == 0


def _skeleton(root: Path) -> None:
    folders = "usr/bin usr/lib/x86_64-linux-gnu usr/lib64 usr/local etc/ssl/certs tmp proc sys dev var/tmp root"
    for folder in folders.split():
        (root / folder).mkdir(parents=True, exist_ok=True)
    for link in ("bin", "lib", "lib64"):
        (root / link).symlink_to(f"usr/{link}")
    (root / "tmp").chmod(0o1777)
    for name in ("etc/passwd", "etc/group", "etc/nsswitch.conf", "etc/os-release"):
        if Path("/", name).is_file():
            shutil.copy(Path("/", name), root / name)


def _libraries(root: Path, programs: Sequence[Path]) -> None:
    """The shared libraries that programs name, and the loader."""
    wanted = {f"/lib/x86_64-linux-gnu/{name}" for name in LIBRARIES}
    text = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False).stdout
    for line in text.splitlines():
        if line.startswith("\t"):  # the others name the programs
            wanted.update(word for word in line.split() if word.startswith("/"))
    for name in wanted:
        source = Path(name)
        if source.is_file() and not str(source).startswith("/root"):
            place = "usr" + str(source) if str(source).startswith("/lib") else str(source)[1:]
            target = root / place
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                shutil.copy(source, target)


def python_base(python: Path, name: str = "python:3.12-slim") -> None:
    """The Python base image, from a Python's prefix."""
    prefix = Path(
        subprocess.run(
            [python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        _skeleton(root)
        ignore = shutil.ignore_patterns("__pycache__", "test", "*.a", "site-packages")
        shutil.copytree(prefix, root / "usr/local", dirs_exist_ok=True, ignore=ignore, symlinks=True)
        packages = next((prefix / "lib").glob("python3.12")) / "site-packages"
        target = root / "usr/local/lib/python3.12/site-packages"
        target.mkdir(parents=True, exist_ok=True)
        for path in packages.glob("pip*"):
            shutil.copytree(path, target / path.name)
        for tool in TOOLS:
            shutil.copy(os.path.realpath(tool), root / "usr/bin" / Path(tool).name)
        modules = list((root / "usr/local/lib/python3.12/lib-dynload").glob("*.so"))
        _libraries(
            root, [*modules, *map(Path, TOOLS), prefix / "bin/python3.12", *(prefix / "lib").glob("libpython3*.so*")]
        )
        for link in ("python", "python3"):
            (root / "usr/local/bin" / link).unlink(missing_ok=True)
            (root / "usr/local/bin" / link).symlink_to("python3.12")
        for script in (root / "usr/local/bin").glob("pip*"):
            script.write_text("#!/usr/local/bin/python3.12\n" + script.read_text().split("\n", 1)[1])
        changes = ["ENV PATH=/usr/local/bin:/usr/bin:/bin LD_LIBRARY_PATH=/usr/local/lib", 'CMD ["python3"]']
        _import(root, name, changes)


def program(path: Path, name: str, entry: str) -> None:
    """An image with one program, as distroless as the official one: user 65532, no shell."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        _skeleton(root)
        target = root / entry.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
        target.chmod(0o755)
        _libraries(root, [path])
        _import(root, name, [f'ENTRYPOINT ["{entry}"]', "USER 65532", "WORKDIR /"])


def lmcache(python: Path, name: str) -> dict[str, str]:
    """LMCache's image for a Python that has it, at the place of the official image's, without its packages: those are
    gigabytes, so that they are mounted instead of copied. Returns the mount, folder here to folder there."""
    question = "import json, sys, sysconfig; print(json.dumps([sys.base_prefix, sysconfig.get_paths()['purelib']]))"
    answer = subprocess.run([python, "-c", question], capture_output=True, text=True, check=True).stdout
    prefix, packages = (Path(path) for path in json.loads(answer))
    version = packages.parent.name
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        _skeleton(root)
        home = root / "opt/venv"
        # with its compiled files: the image's user could not keep any
        ignore = shutil.ignore_patterns("test", "*.a", "site-packages")
        shutil.copytree(prefix, home, dirs_exist_ok=True, ignore=ignore, symlinks=True)
        (home / "lib" / version / "site-packages").mkdir(exist_ok=True)
        for tool in TOOLS:
            shutil.copy(os.path.realpath(tool), root / "usr/bin" / Path(tool).name)
        modules = list((prefix / "lib" / version / "lib-dynload").glob("*.so"))
        _libraries(root, [*modules, *map(Path, TOOLS), prefix / "bin" / version, *prefix.glob("lib/libpython3*.so*")])
        program = home / "bin/lmcache"
        program.write_text(f"#!/opt/venv/bin/{version}\n" + (python.parent / "lmcache").read_text().split("\n", 1)[1])
        program.chmod(0o755)
        for link in ("python", "python3"):
            (home / "bin" / link).unlink(missing_ok=True)
            (home / "bin" / link).symlink_to(version)
        _import(root, name, ["ENV PATH=/opt/venv/bin:/usr/bin:/bin LD_LIBRARY_PATH=/opt/venv/lib", "USER 65532"])
    return {str(packages): f"/opt/venv/lib/{version}/site-packages"}
