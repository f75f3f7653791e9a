"""What the tests of importers and exporters share: files out of rows, calls in a form that can be compared."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from trace_builders import explicit_blocks

from harness.trace.model import Session


def rows_file(path: Path, *rows: Any) -> Path:
    """A file with one JSON value a line, gzip where the name says so."""
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return path


def blocks_of(session: Session) -> list[tuple[int, ...]]:
    """Every prompt as block numbers in order of first use: equal lists mean equal sharing, whatever `ref` names."""
    numbers: dict[tuple[int, int], int] = {}
    return [
        tuple(numbers.setdefault(block, len(numbers)) for block in prompt) for prompt in explicit_blocks(session.calls)
    ]


def plain(session: Session, *without: str) -> list[dict[str, Any]]:
    """Calls as comparable values, without the named fields."""
    fields = ("t_s", "api_s", "chain", "input_tokens", "output_tokens", "deps", "on_start", "gap_s", "model", "stop")
    return [
        {"blocks": blocks} | {name: getattr(call, name) for name in fields if name not in without}
        for call, blocks in zip(session.calls, blocks_of(session), strict=True)
    ]
