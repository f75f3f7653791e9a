"""What a run can end with, and the exit code of each: 2 bad input, 3 a real component failed, 4 no progress."""

from __future__ import annotations

from fake_workers.errors import HarnessError, InputError


class ComponentError(HarnessError):
    """A real component (router, LMCache, a worker's port) failed: which one, how, and what was kept of the run."""

    exit_code = 3

    def __init__(self, component: str, what: str, kept: str = "") -> None:
        self.component, self.what, self.kept = component, what, kept
        super().__init__(f"{component}: {what}" + (f"\n{kept}" if kept else ""))


class NoProgressError(HarnessError):
    """Calls are open but nothing can happen any more; the message says where the state was dumped."""

    exit_code = 4


__all__ = ["ComponentError", "HarnessError", "InputError", "NoProgressError"]
