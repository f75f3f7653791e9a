"""The router's log, read line by line while it runs: what is kept, what is counted, why it ended."""

from __future__ import annotations

import json
import re
from collections import Counter

ORPHAN = "KV event skipped, its parent is unknown"
FALLBACKS = {
    b"failed to prepare per request data": "routed without prefix data (producer time-out)",
    b"PrefixCacheMatchInfo not found": "scored without prefix data",
    b"Failed to get endpoint scores": "scored without prefix data",
    b"failed to read prefix plugin state": "approximate prefix index not updated",
    b"Failed to get request key for parent block": ORPHAN,
    b"Failed to parse message": "KV events dropped, their message could not be read",
}
"""What the router says when it silently decides with less than it was configured to.

It says some of it once per endpoint: lines of one request count once. Counts are lower bounds: its logger writes the
first hundred equal lines of a second and then every hundredth.
"""
_REQUEST = re.compile(rb'"x-request-id":("(?:[^"\\]|\\.)*")')

_NOISE = (b'"level":"debug"', b'"level":"trace"', b'"level":"Level(-')
_EXPECTED = (b"totalBlocks is set to 0",)
"""Said once per endpoint for each prompt that is shorter than a block: true, and of no interest."""
_LEVEL = re.compile(rb'^\{"level":"(error|fatal|panic|dpanic)"')


class LogReader:
    """Called with every line, by the thread that drains the log."""

    def __init__(self) -> None:
        self.fallbacks: Counter[str] = Counter()
        self.errors: list[str] = []
        self.lines = 0
        self._counted: set[tuple[str, bytes]] = set()

    def line(self, line: bytes) -> bool:
        """Takes one line; says whether it belongs into the kept log."""
        self.lines += 1
        if line.startswith(_NOISE, 1) or any(mark in line for mark in _EXPECTED):
            return False
        for marker, meaning in FALLBACKS.items():
            if marker in line:
                self._count(meaning, line)
        if _LEVEL.match(line) and len(self.errors) < 100:
            self.errors.append(_message(line))
        return True

    def _count(self, meaning: str, line: bytes) -> None:
        request = _REQUEST.search(line)
        if request:
            if (meaning, request[1]) in self._counted:
                return
            self._counted.add((meaning, request[1]))
        self.fallbacks[meaning] += 1

    def refusal(self) -> str | None:
        """The router's own words on why it did not start: the last error that it logged."""
        return self.errors[-1] if self.errors else None


def _message(line: bytes) -> str:
    try:
        entry = json.loads(line)
    except ValueError:
        return line.decode(errors="replace")
    words = [str(entry.get("msg", "")), str(entry.get("error", ""))]
    return ": ".join(w for w in words if w)
