"""Every real file, whatever its format, through the project's own format and through agentic Mooncake and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.trace.check import check_trace
from harness.trace.dependencies import replayed_starts_s
from harness.trace.exporters import export_agentic_mooncake
from harness.trace.importers import ImportOptions
from harness.trace.read import read_trace
from harness.trace.write import write_trace

FILES: list[tuple[str, dict[str, Any], int, int, int]] = [
    # (path below traces/, options, sessions, calls, input tokens)
    ("mooncake/conversation_trace.jsonl.gz", {}, 1, 12_031, 144_793_823),
    ("azure/AzureLLMInferenceTrace_code.csv.gz", {"calls_per_session": 1}, 1, 8_819, 18_059_974),
    ("lmcache_agent/miniswe", {}, 20, 402, 2_418_532),
    ("lmcache_agent/miniswe", {"bytes_per_token": 1, "block_tokens": 256}, 20, 402, 9_674_724),
    ("llmservingsim/example_trace.jsonl", {}, 1, 10, 120),
    ("llmservingsim/workload_me2_01_mixed.jsonl", {}, 1, 608, 5_604_402),
    ("otel/advanced_code_review_workflow.json", {}, 1, 15, 5_673),
    ("otel/advanced_prefix_sharing_example.json", {}, 4, 7, 460),
    ("otel/simple_simple_chain.json", {"block_tokens": 16}, 1, 3, 201),
    ("weka/trace_0020.json.gz", {}, 1, 0, 0),
]


@pytest.mark.parametrize(("name", "options", "sessions", "calls", "tokens"), FILES)
def test_real_files_go_round(
    shared: Path, tmp_path: Path, name: str, options: dict[str, Any], sessions: int, calls: int, tokens: int
) -> None:
    first = list(read_trace(shared / "traces" / name, options=ImportOptions(**options)))
    everything = [call for session in first for call in session.calls]
    if calls:
        assert (len(first), len(everything), sum(c.input_tokens for c in everything)) == (sessions, calls, tokens)
    for session in first:
        assert replayed_starts_s(session) == pytest.approx([call.t_s for call in session.calls], abs=1e-6)
    write_trace(tmp_path / "own.jsonl.gz", first)
    assert check_trace(tmp_path / "own.jsonl.gz") == []
    assert list(read_trace(tmp_path / "own.jsonl.gz")) == first
    export_agentic_mooncake(tmp_path / "a.jsonl.gz", first)
    for one, two in zip(first, read_trace(tmp_path / "a.jsonl.gz"), strict=True):
        for a, b in zip(one.calls, two.calls, strict=True):
            b.ref = a.ref  # of several calls with equally long common prefixes either may be named
            assert a == b
