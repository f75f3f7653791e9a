"""Weka documents: import, export, import gives the same calls."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from import_helpers import plain
from trace_builders import recorded_sessions

from harness.trace.exporters import export_agentic_mooncake, export_weka
from harness.trace.model import Session
from harness.trace.read import read_trace

ROUNDS = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=60, deadline=None
)


@ROUNDS
@given(session=recorded_sessions())
def test_import_export_import_gives_the_same_calls(tmp_path: Path, session: Session) -> None:
    """Whatever a document says: chains, dependencies and sharing of the second import are those of the first."""
    export_weka(tmp_path / "a.jsonl", [session])
    first = list(read_trace(tmp_path / "a.jsonl"))
    sizes = sorted((c["t_s"], c["api_s"] or -1.0, c["input_tokens"], c["output_tokens"]) for c in plain(session))
    assert sizes == sorted(
        (c["t_s"], c["api_s"] or -1.0, c["input_tokens"], c["output_tokens"]) for c in plain(first[0])
    )
    export_weka(tmp_path / "b.jsonl", first)
    assert [plain(s) for s in read_trace(tmp_path / "b.jsonl")] == [plain(s) for s in first]


def test_real_weka_files_go_round_through_agentic_mooncake(shared: Path, tmp_path: Path) -> None:
    first = list(read_trace(shared / "traces/weka"))
    assert (len(first), sum(len(s.calls) for s in first)) == (30, 3_124)
    assert sum(c.input_tokens for s in first for c in s.calls) == 319_947_011
    export_agentic_mooncake(tmp_path / "a.jsonl.gz", first)
    for one, two in zip(first, read_trace(tmp_path / "a.jsonl.gz"), strict=True):
        assert (two.id, two.block_tokens) == (one.id, one.block_tokens)
        for a, b in zip(one.calls, two.calls, strict=True):
            b.ref = a.ref  # of several calls with equally long common prefixes either may be named
            assert a == b
