"""CPU time and memory of this process and its children."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil


class Usage:
    """Peak memory of this process and its children, summed over processes (an upper bound of the joint peak)."""

    def __init__(self) -> None:
        self.peak_rss_bytes = 0

    def read(self) -> None:
        """Read the children's peaks; call while they still run."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        for child in _children():
            peak += _peak_bytes(child.pid)
        self.peak_rss_bytes = peak


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _peak_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def cpu_s() -> float:
    """CPU seconds of this process and of the children that have ended."""
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
