"""Empty stand-ins for the CUDA libraries that PyPI's torch is linked against, so that it loads without a GPU.

PyPI has no CPU-only torch for x86-64 Linux. torch's own files stay as they are; where it would look for NVIDIA's
packages (4 GB) it finds libraries of the same names that hold the symbols it asks for and answer "no device" to every
call. Needs gcc and readelf. Never used together with NVIDIA's packages.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

CUDA = re.compile(
    r"^lib(cuda|cudart|cupti|cublas|cublasLt|cudnn|cufft|cufile|curand|cusolver|cusparse|cusparseLt|nccl|nvJitLink"
    r"|nvrtc|nvshmem_host|nvToolsExt)\.so"
)
NO_DEVICE = 100
"""cudaErrorNoDevice: what every stand-in answers, so that torch finds no GPU."""

UNVERSIONED = {
    "libcudnn": r"cudnn",
    "libnccl": r"nccl|pnccl",
    "libcusparseLt": r"cusparseLt",
    "libcufile": r"cuFile",
    "libnvshmem_host": r"nvshmem",
    "libcupti": r"cupti",
    "libcuda": r"cu[A-Z]",
    "libnvrtc": r"nvrtc",
    "libcudart": r"cuda[A-Z]|__cuda",
    "libcusparse": r"cusparse(?!Lt)",
    "libcufft": r"cufft",
    "libcublasLt": r"cublasLt",
    "libcublas": r"cublas(?!Lt)",
    "libcusolver": r"cusolver",
}
"""Which library a symbol without a version belongs to, by its name."""


def _readelf(*arguments: str) -> str:
    return subprocess.run(["readelf", "-W", *arguments], check=True, capture_output=True, text=True).stdout


def needed(libraries: Iterable[Path]) -> dict[str, dict[str, set[str]]]:
    """Library name -> version ("" for none) -> symbols that the given libraries want from it."""
    wanted: dict[str, dict[str, set[str]]] = {}
    loose: set[str] = set()
    for path in libraries:
        for name in re.findall(r"\(NEEDED\).*\[(.+?)\]", _readelf("-d", str(path))):
            if CUDA.match(name):
                wanted.setdefault(name, {})
        versions: dict[str, str] = {}
        for block in re.split(r"\n(?=  0*[0-9a-fx]+: Version: 1  File: )", _readelf("-V", str(path))):
            file = re.search(r"Version: 1  File: (\S+)", block)
            if file and CUDA.match(file.group(1)):
                versions.update(dict.fromkeys(re.findall(r"Name: (\S+)", block), file.group(1)))
                for version in re.findall(r"Name: (\S+)", block):
                    wanted.setdefault(file.group(1), {}).setdefault(version, set())
        for symbol, version in re.findall(r" UND ([A-Za-z_]\w*)(?:@(\S+))?", _readelf("--dyn-syms", str(path))):
            if version in versions:
                wanted[versions[version]][version].add(symbol)
            elif not version:
                loose.add(symbol)
    for name, by_version in wanted.items():
        pattern = UNVERSIONED.get(name.split(".so", 1)[0])
        if pattern:
            known = set().union(*by_version.values()) if by_version else set()
            by_version.setdefault("", set()).update(s for s in loose if re.match(pattern, s) and s not in known)
    return wanted


def _function(symbol: str) -> str:
    if "Error" in symbol and symbol.endswith(("String", "Name")):
        return f'const char *{symbol}(void) {{ return "this is a stand-in for a CUDA library"; }}\n'
    return f"long {symbol}(void) {{ return {NO_DEVICE}; }}\n"


def build(torch_lib: Path, into: Path) -> list[Path]:
    """Write one library per name that torch wants; returns them."""
    into.mkdir(parents=True, exist_ok=True)
    made = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, by_version in sorted(needed(sorted(torch_lib.glob("*.so*"))).items()):
            symbols = sorted(set().union(*by_version.values())) if by_version else []
            source = Path(scratch) / "stub.c"
            source.write_text("".join(_function(symbol) for symbol in symbols))
            script = Path(scratch) / "stub.map"
            script.write_text(
                "".join(
                    f"{version} {{ global: {' '.join(f'{s};' for s in sorted(names))} }};\n"
                    for version, names in sorted(by_version.items())
                    if version
                )
            )
            out = into / name
            command = [
                "gcc",
                "-shared",
                "-fPIC",
                "-w",
                "-fno-builtin",
                f"-Wl,-soname,{name}",
                "-o",
                str(out),
                str(source),
            ]
            if script.stat().st_size:
                command.append(f"-Wl,--version-script={script}")
            subprocess.run(command, check=True, capture_output=True)
            made.append(out)
    return made
