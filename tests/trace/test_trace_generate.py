"""The generator: repeatable, valid, consistent in time, and as near to the published statistics as is claimed."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import InputError
from harness.trace.check import check_trace
from harness.trace.dependencies import replayed_starts_s
from harness.trace.generate import evenly_spread, generate_sessions
from harness.trace.model import Session
from harness.trace.profile import FOLDER, LogNormal, Profile, load_profile, profile_names, without_shared_prefix
from harness.trace.read import read_trace
from harness.trace.stats import trace_stats
from harness.trace.targets import compare, load_targets, stat_at
from harness.trace.write import session_rows, write_trace

TRACES = Path(__file__).resolve().parents[2] / "traces"
SHIPPED = TRACES / "demo.jsonl.gz"
SHIPPED_SEED, SHIPPED_SESSIONS = 4, 40
LARGE = TRACES / "claude-code.jsonl.gz"
LARGE_SEED, LARGE_SESSIONS = 1, 393


@pytest.fixture(scope="module")
def profile() -> Profile:
    return load_profile("claude-code")


@pytest.fixture(scope="module")
def small(profile: Profile) -> list[Session]:
    return list(generate_sessions(profile, 11, 25))


@pytest.mark.parametrize(
    ("path", "seed", "sessions"),
    [
        pytest.param(SHIPPED, SHIPPED_SEED, SHIPPED_SESSIONS, id="demo"),
        pytest.param(LARGE, LARGE_SEED, LARGE_SESSIONS, id="claude-code", marks=pytest.mark.slow),
    ],
)
def test_a_shipped_trace_is_what_its_command_makes(profile: Profile, path: Path, seed: int, sessions: int) -> None:
    made, shipped = hashlib.sha256(), hashlib.sha256(gzip.decompress(path.read_bytes()))
    for session in generate_sessions(profile, seed, sessions):
        for row in session_rows(session):
            made.update(row)
    assert made.hexdigest() == shipped.hexdigest()
    readme = (TRACES / "README.md").read_text(encoding="utf-8")
    assert f"--seed {seed} --sessions {sessions} traces/{path.name}" in readme
    assert shipped.hexdigest() in readme


def test_the_large_shipped_trace_has_the_size_that_is_promised() -> None:
    assert LARGE.stat().st_size < 3.5e6


def test_the_shipped_trace_has_the_size_that_is_promised() -> None:
    assert SHIPPED.stat().st_size < 1.5e6
    assert check_trace(SHIPPED) == []
    found = trace_stats(read_trace(SHIPPED))
    assert found["sessions"] == 40 and 9_500 <= found["calls"] <= 10_500
    assert found["sub_agents"]["groups"] > 0 and found["chains"]["flat"] > 0
    assert {p.key for s in read_trace(SHIPPED) for p in s.prefix} == {"claude-code/main", "claude-code/sub-agent"}


def test_seeds_decide(profile: Profile) -> None:
    first, again, other = (list(generate_sessions(profile, seed, 5)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert [s.id for s in first] == [f"claude-code-1-{n:04d}" for n in range(5)]
    assert list(generate_sessions(profile, 1, 0)) == []


def test_generated_sessions_keep_every_rule_of_the_format(small: list[Session], tmp_path: Path) -> None:
    write_trace(tmp_path / "t.jsonl.gz", small)
    assert check_trace(tmp_path / "t.jsonl.gz") == []
    assert list(read_trace(tmp_path / "t.jsonl.gz")) == small


def test_times_are_what_the_dependencies_say(small: list[Session]) -> None:
    for session in small:
        for call, start in zip(session.calls, replayed_starts_s(session), strict=True):
            assert start == pytest.approx(call.t_s, abs=1e-6)
        assert sum(not call.deps and call.on_start is None for call in session.calls) == 1


def test_limits_of_the_profile_hold(profile: Profile, small: list[Session]) -> None:
    window = max(w.tokens for w in profile.session.window_tokens) + 2 * profile.block_tokens
    for session in small:
        assert len(session.calls) >= profile.session.min_calls
        assert max(call.input_tokens for call in session.calls) <= window
        groups = trace_stats([session])["sub_agents"]["groups_at_once"]["max"]
        assert profile.sub_agents and (groups is None or groups <= profile.sub_agents.at_once_max)


def test_a_compaction_keeps_the_system_prompt_alone(profile: Profile, small: list[Session]) -> None:
    prefix = round(profile.shared_prefix.main.tokens / profile.block_tokens)
    cuts = [
        call
        for session in small
        for call in session.calls
        if call.chain == "main" and call.ref >= 0 and call.keep_blocks < session.calls[call.ref].blocks
    ]
    assert cuts and all(call.keep_blocks == prefix for call in cuts)


def profile_with(tmp_path: Path, change: dict[str, Any]) -> Path:
    data = yaml.safe_load((FOLDER / "claude-code.yaml").read_text())
    for path, value in change.items():
        *steps, last = path.split(".")
        target = data
        for step in steps:
            target = target[step]
        if value is None:
            del target[last]
        else:
            target[last] = value
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(data))
    return tmp_path / "p.yaml"


def test_sessions_can_be_made_to_share_nothing(tmp_path: Path, small: list[Session]) -> None:
    alone = list(generate_sessions(load_profile(profile_with(tmp_path, {"shared_prefix.enabled": False})), 11, 25))
    assert all(session.prefix == () and all(call.prefix == -1 for call in session.calls) for session in alone)
    # Nothing else changes.
    for session in small:
        session_alone = alone[small.index(session)]
        assert [(c.t_s, c.input_tokens, c.ref) for c in session.calls] == [
            (c.t_s, c.input_tokens, c.ref) for c in session_alone.calls
        ]


def test_the_flag_for_it_does_the_same(profile: Profile, tmp_path: Path) -> None:
    by_field = load_profile(profile_with(tmp_path, {"shared_prefix.enabled": False}))
    assert without_shared_prefix(profile) == by_field
    assert profile.shared_prefix.enabled


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        # Mooncake's conversation trace; turns between those of LMSYS-Chat-1M (2.0) and WildChat (2.54).
        (
            "chat",
            {
                "calls_per_session.mean": (2.0, 2.54),
                "input_per_call.mean": (12_035 * 0.85, 12_035 * 1.15),
                "input_per_call.median": (6_909 * 0.85, 6_909 * 1.15),
                "input_per_call.p90": (27_367 * 0.85, 27_367 * 1.15),
                "input_per_call.p99": (85_400 * 0.85, 85_400 * 1.15),
                "output_per_call.mean": (343 * 0.85, 343 * 1.15),
                "output_per_call.median": (350 * 0.85, 350 * 1.15),
                "output_per_call.p90": (597 * 0.85, 597 * 1.15),
                "in_flight.max": (1, 1),
            },
        ),
        # mini-SWE-agent's calls per session; steps of recorded coding sessions.
        (
            "batch-agents",
            {
                "calls_per_session.median": (20.1 * 0.85, 22 * 1.15),
                "output_per_call.median": (263 * 0.85, 263 * 1.15),
                "new_tokens_per_call.median": (780 * 0.85, 780 * 1.15),
                "gaps.idle_median_s": (12.2 * 0.85, 12.2 * 1.15),
                "gaps.ge_1800s_arrival_share": (0, 0.001),
                "in_flight.max": (1, 1),
            },
        ),
    ],
)
def test_other_profiles_have_the_statistics_of_their_sources(
    name: str, targets: dict[str, tuple[float, float]], tmp_path: Path
) -> None:
    sessions = list(generate_sessions(load_profile(name), 1, 800))
    found = trace_stats(sessions)
    got = {path: stat_at(found, path) for path in targets}
    assert {path: value for path, value in got.items() if not targets[path][0] <= value <= targets[path][1]} == {}
    assert {call.chain for session in sessions for call in session.calls} == {"main"}
    assert {prefix.key for session in sessions for prefix in session.prefix} == {f"{name}/main"}
    write_trace(tmp_path / "t.jsonl.gz", sessions[:100])
    assert check_trace(tmp_path / "t.jsonl.gz") == []
    assert list(read_trace(tmp_path / "t.jsonl.gz")) == sessions[:100]


def test_every_profile_explains_its_parameters() -> None:
    for name in profile_names():
        text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
        assert load_profile(name).name == name and text.startswith("#")


def test_small_contexts_and_tiny_profiles_stay_valid(tmp_path: Path) -> None:
    change = {
        "shared_prefix.main.tokens": 60_000,
        "shared_prefix.sub_agent.tokens": 40_000,
        "session.window_tokens": [{"share": 1.0, "tokens": 70_000}],
        "session.turns": {"median": 60, "sigma": 0.1},
        "sub_agents.session_share": {"base": 1.0, "per_150_turns": 0.0, "max": 1.0},
    }
    sessions = list(generate_sessions(load_profile(profile_with(tmp_path, change)), 1, 4))
    write_trace(tmp_path / "t.jsonl", sessions)
    assert check_trace(tmp_path / "t.jsonl") == []
    assert any("." in call.chain for session in sessions for call in session.calls)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"session.turns.median": -1}, "session.turns.median"),
        ({"session.turns.medien": 3}, "session.turns"),
        ({"main.rewind.share": 1.5}, "main.rewind.share"),
        ({"side_chains.calls": None}, "side_chains"),
        ({"sub_agents.batch": []}, "sub_agents.batch"),
        ({"block_tokens": "64"}, "block_tokens"),
        ({"shared_prefix.sub_agent": None}, "shared_prefix.sub_agent"),
    ],
)
def test_a_broken_profile_names_the_field(tmp_path: Path, change: dict[str, Any], where: str) -> None:
    with pytest.raises(InputError) as caught:
        load_profile(profile_with(tmp_path, change))
    assert caught.value.where.endswith(f"field {where}")


def test_profiles_that_are_not_there(tmp_path: Path) -> None:
    assert profile_names() == ["batch-agents", "chat", "claude-code"]
    with pytest.raises(InputError, match="the profiles are batch-agents, chat, claude-code"):
        load_profile("nobody")
    with pytest.raises(InputError, match="no such file"):
        load_profile(tmp_path / "absent.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1")
    with pytest.raises(InputError, match="YAML error"):
        load_profile(tmp_path / "bad.yaml")


@given(st.floats(0, 1), st.floats(0, 1))
def test_lognormal_is_monotone_and_clipped(a: float, b: float) -> None:
    distribution = LogNormal(median=10.0, sigma=1.2, min=2.0, max=300.0, shift=1.0)
    low, high = distribution.at(min(a, b)), distribution.at(max(a, b))
    assert 2.0 <= low <= high <= 300.0
    assert distribution.at(0.5) == pytest.approx(11.0)


def test_the_spread_covers_every_column_and_pair_evenly() -> None:
    points = evenly_spread(Random(5), 400, 6)
    assert len(set(points)) == 400 and all(0 <= x < 1 for point in points for x in point)
    for a in range(6):
        for half in (0.1, 0.5, 0.9):
            assert sum(point[a] < half for point in points) == pytest.approx(400 * half, abs=8)
        for b in range(a):
            quarter = sum(point[a] < 0.5 and point[b] < 0.5 for point in points)
            assert quarter == pytest.approx(100, abs=16)


@pytest.mark.slow
def test_published_statistics_are_met(profile: Profile) -> None:
    """Seed 1, all targets; docs/trace-synthesis.md has several seeds."""
    targets = load_targets("claude-code")
    found = trace_stats(generate_sessions(profile, 1, targets.sessions))
    missed = [(c.target.name, c.target.value, c.got[0]) for c in compare(targets, [found]) if not c.met[0]]
    assert missed == []
