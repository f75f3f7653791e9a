"""What stands between a benchmark's client and the engine's queue, as far as it changes TTFT."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """Time around the engine; the default is none.

    serial_ns(prompt_tokens)  one after the other for all requests (the API server's event loop: parsing, tokenising)
    fixed_ns                  once per request, in parallel, on the way in
    return_ns                 from the end of a step until the client has the token
    """

    serial_ns: Callable[[int], int] | None = None
    fixed_ns: int = 0
    return_ns: int = 0

    def gate(self) -> Gate:
        """A fresh queue in front of one engine."""
        return Gate(self)

    def back_ns(self) -> int:
        """Way of one token to the client."""
        return self.return_ns


class Gate:
    """Takes requests in one after the other."""

    def __init__(self, front: FrontEnd) -> None:
        self._front = front
        self._free_ns = 0

    def enters_ns(self, sent_ns: int, prompt_tokens: int) -> int:
        """When the engine takes in a request sent at `sent_ns`."""
        serial = self._front.serial_ns(prompt_tokens) if self._front.serial_ns is not None else 0
        self._free_ns = max(self._free_ns, sent_ns) + serial
        return self._free_ns + self._front.fixed_ns
