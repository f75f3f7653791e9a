"""A timeline for ui.perfetto.dev (Chrome's JSON trace format): a process per endpoint, nested spans per call.

Spans: the call from arrival to its end, in it queue, restore, prefill and decode. Timestamps are virtual microseconds.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.folders import whole
from harness.results.records import CallRecord, to_records
from harness.results.store import Run

_CLIENTS = 0
"""Process of calls that no endpoint took."""


def write(run: Run, path: Path) -> None:
    """Write the file, gzipped; equal runs give equal files."""
    with whole(path) as part, part.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = b""
        for event in events(run):
            file.write(separator + json.dumps(event, separators=(",", ":")).encode())
            separator = b",\n"
        file.write(b"\n]}\n")


def events(run: Run) -> Iterator[dict[str, Any]]:
    """All events of a run."""
    yield _named(_CLIENTS, "not placed")
    for endpoint, node in enumerate(run.info.endpoint_nodes):
        yield _named(endpoint + 1, f"node {node}, endpoint {endpoint}")
    for record in sorted(to_records(run.calls), key=lambda r: (r.arrival_ns, r.call_id)):
        yield from _call(record)


def _named(process: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}


def _call(record: CallRecord) -> Iterator[dict[str, Any]]:
    process = _CLIENTS if record.endpoint is None else record.endpoint + 1
    spans = [(f"{record.session} #{record.index}", record.arrival_ns, record.finish_ns, _facts(record))]
    admitted, first = record.admitted_ns, record.first_token_ns
    if admitted is not None:
        # a restore ends when the engine admits the call to its batch
        begun = admitted - record.restore_ns
        spans.append(("queue", record.arrival_ns, begun, {}))
        if record.restore_ns:
            spans.append(("restore", begun, admitted, {}))
        if first is not None:
            spans.append(("prefill", admitted, first, {"computed_tokens": record.computed_tokens}))
            spans.append(("decode", first, record.finish_ns, {"output_tokens": record.output_tokens}))
    for name, start, end, facts in spans:
        if end is None:
            continue
        common = {"cat": "call", "id": record.call_id, "name": name, "pid": process, "tid": 0}
        yield {"ph": "b", "ts": start / 1e3, **common, "args": facts}
        yield {"ph": "e", "ts": end / 1e3, **common}


def _facts(record: CallRecord) -> dict[str, Any]:
    names = (
        "outcome",
        "input_tokens",
        "output_tokens",
        "gpu_tokens",
        "dram_tokens",
        "shared_tokens",
        "computed_tokens",
    )
    return {name: getattr(record, name) for name in names}
