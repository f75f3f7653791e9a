"""Errors that carry their own remedy. Shared by the workers and the harness that drives them."""

from __future__ import annotations


class HarnessError(Exception):
    """Base of all errors that end a command with one clear message instead of a traceback."""

    exit_code = 1


class InputError(HarnessError):
    """Bad input: where it stands, what is wrong, what to do about it. Printed as one line."""

    exit_code = 2

    def __init__(self, where: str, what: str, remedy: str) -> None:
        self.where, self.what, self.remedy = where, what, remedy
        super().__init__(f"{where}: {what}; {remedy}")
