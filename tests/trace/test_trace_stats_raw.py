"""Statistics of raw files against counts over their explicit block id lists, by nothing but loops."""

from __future__ import annotations

import gzip
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.trace.read import read_trace
from harness.trace.retention import WINDOWS_S
from harness.trace.stats import trace_stats

Request = dict[str, Any]

STEPS_S = (0, 1, 7, 59, 60, 61, 240, 299, 300, 301, 1799, 1800, 3600, 4000, 90_000)


@st.composite
def documents(draw: st.DrawFn, number: int) -> dict[str, Any]:
    """A raw session of one to ten calls; block ids are chained: one for each distinct prefix."""
    ids: dict[tuple[int, ...], int] = {}
    requests: list[Request] = []
    contents: list[list[int]] = [[]]
    t = 0
    for _ in range(draw(st.integers(1, 10))):
        base = draw(st.sampled_from(contents))
        content = base[: draw(st.integers(0, len(base)))] + draw(st.lists(st.integers(0, 1), min_size=1, max_size=4))
        contents.append(content)
        hashes = [ids.setdefault(tuple(content[: n + 1]), len(ids)) for n in range(len(content))]
        requests.append(
            {
                "t": float(t),
                "type": "n",
                "model": "m",
                "in": 64 * len(hashes) + draw(st.integers(0, 63)),
                "out": draw(st.integers(1, 500)),
                "hash_ids": hashes,
                "api_time": float(draw(st.sampled_from((0, 1, 5, 60, 400)))),
            }
        )
        t += draw(st.sampled_from(STEPS_S))
    return {"id": f"s{number}", "block_size": 64, "hash_id_scope": "local", "requests": requests}


def counted(sessions: list[list[Request]]) -> dict[str, Any]:
    """The published statistics of sessions of raw calls."""
    kept, blocks, zero, idle, flights, new_tokens, ratios, unique = 0, 0, 0, [], [], [], [], []
    hits = dict.fromkeys(WINDOWS_S, 0)
    for requests in sessions:
        last_use: dict[int, float] = {}
        session_blocks = 0
        for n, r in enumerate(requests):
            ids = r["hash_ids"]
            held = [i for i in ids if i in last_use]
            kept, blocks, session_blocks = kept + len(held), blocks + len(ids), session_blocks + len(ids)
            new_tokens.append(64 * (len(ids) - len(held)))
            for window in WINDOWS_S:
                hits[window] += sum(r["t"] - last_use[i] <= window for i in held)
            last_use |= dict.fromkeys(ids, r["t"])
            if n:
                gap = r["t"] - max(q["t"] + q["api_time"] for q in requests[:n])
                zero += gap < 0
                idle += [gap] if gap >= 0 else []
        flights.append(max(sum(q["t"] <= r["t"] < q["t"] + q["api_time"] for q in requests) for r in requests))
        unique.append(64 * len(last_use))
        ratios.append(session_blocks / len(last_use))
    calls = [r for requests in sessions for r in requests]
    tokens = sum(r["in"] for r in calls)
    big = [r["in"] for r in calls if r["in"] > 100_000]
    return {
        "sessions": len(sessions),
        "calls": len(calls),
        "input_tokens": tokens,
        "output_tokens": sum(r["out"] for r in calls),
        "input_to_output": tokens / sum(r["out"] for r in calls),
        "calls_per_session.mean": statistics.mean(len(requests) for requests in sessions),
        "calls_per_session.median": statistics.median(len(requests) for requests in sessions),
        "input_per_session.mean": statistics.mean(sum(r["in"] for r in requests) for requests in sessions),
        "input_per_call.mean": statistics.mean(r["in"] for r in calls),
        "input_per_call.median": statistics.median(r["in"] for r in calls),
        "output_per_call.mean": statistics.mean(r["out"] for r in calls),
        "output_per_call.median": statistics.median(r["out"] for r in calls),
        "over_100k.call_share": len(big) / len(calls),
        "over_100k.input_share": sum(big) / tokens,
        "blocks.kept": kept,
        "blocks.new": blocks - kept,
        "block_hit_infinite": kept / blocks,
        "new_tokens_per_call.mean": statistics.mean(new_tokens),
        "new_tokens_per_call.median": statistics.median(new_tokens),
        "unique_tokens.mean": statistics.mean(unique),
        "cumulative_to_unique.mean": statistics.mean(ratios),
        "cumulative_to_unique.ratio_of_sums": blocks / (blocks - kept),
        "gaps.arrivals": zero + len(idle),
        "gaps.zero_share": zero / (zero + len(idle)) if zero + len(idle) else None,
        "gaps.idle_median_s": statistics.median(idle) if idle else None,
        "gaps.idle_total_s": sum(idle),
        "in_flight.max": max(flights),
        "in_flight.sessions_with_2_or_more": sum(n >= 2 for n in flights) / len(flights),
        **{f"block_hit_by_window.{w}": hits[w] / blocks for w in WINDOWS_S},
        **{f"token_hit_by_window.{w}": 64 * hits[w] / tokens for w in WINDOWS_S},
    }


def at(found: dict[str, Any], path: str) -> Any:
    value: Any = found
    for step in path.split(".", 1 if "by_window" in path else -1):
        if isinstance(value, list):
            window = None if math.isinf(float(step)) else float(step)
            value = next(row["hit"] for row in value if row["window_s"] == window)
        else:
            value = value[step]
    return value


def compare(path: Path, sessions: list[list[Request]]) -> None:
    found = trace_stats(read_trace(path))
    for name, value in counted(sessions).items():
        assert at(found, name) == (None if value is None else pytest.approx(value)), name


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 3))
def test_small_raw_files(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, count: int) -> None:
    made = [data.draw(documents(number)) for number in range(count)]
    path = tmp_path_factory.mktemp("raw") / "t.jsonl"
    path.write_text("\n".join(json.dumps(document) for document in made))
    compare(path, [document["requests"] for document in made])


def test_real_raw_files(shared: Path) -> None:
    """The smallest real sessions without sub-agents; their times are on the session's own clock already."""
    checked = 0
    for path in sorted((shared / "traces/weka").glob("*.json.gz"), key=lambda path: path.stat().st_size):
        document = json.loads(gzip.decompress(path.read_bytes()))
        requests = document["requests"]
        if any(r["type"] == "subagent" for r in requests) or len({r["type"] for r in requests}) > 1:
            continue
        # As imported: whole blocks alone, an unrecorded duration counts as none.
        requests = [
            {**r, "hash_ids": r["hash_ids"][: r["in"] // 64], "api_time": r.get("api_time") or 0.0} for r in requests
        ]
        compare(path, [requests])
        checked += 1
        if checked == 4:
            return
    raise AssertionError(f"only {checked} plain sessions among the real ones")
