"""Parts that need no LMCache: chunk names, retention, ticks, shared tier, package check."""

from __future__ import annotations

import importlib.metadata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cache import upstream
from harness.cache.chunks import ChunkKeys, chunk_runs
from harness.cache.config import CacheConfig
from harness.cache.retention import Retention
from harness.cache.ticks import Ticks
from harness.cache.tier import SharedTier
from harness.cache.transfers import Wires, split_evenly
from harness.errors import InputError
from harness.fabric.goodput import TransferCost


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=8),
    st.integers(1, 9),
)
def test_chunk_runs_name_each_chunk_by_its_last_block(parts, per_chunk):
    runs, at = [], 0
    for origin, length in parts:
        runs.append((origin, at, at + length))
        at += length
    owner = [origin for origin, start, end in runs for _ in range(start, end)]
    expected = [(owner[(c + 1) * per_chunk - 1], c) for c in range(at // per_chunk)]
    got = [(origin, c) for origin, first, end in chunk_runs(runs, per_chunk) for c in range(first, end)]
    assert got == expected
    keys = ChunkKeys(per_chunk, lambda origin, index: (origin, index))
    assert keys.of(runs) == expected


def test_keys_are_made_once_in_whatever_order_they_are_asked_for():
    made = []

    def make(origin, index):
        made.append((origin, index))
        return object()

    keys = ChunkKeys(4, make)
    middle = keys.of([(1, 0, 20), (2, 20, 40)])
    longer = keys.of([(1, 0, 20), (2, 20, 60)])
    other = keys.of([(2, 0, 60)])
    assert longer[:10] == middle
    assert other[5:] == longer[5:]
    assert len(made) == len(set(made))
    keys.forget(2)
    assert keys.of([(2, 0, 60)])[0] is not other[0]


uses = st.lists(st.tuples(st.integers(0, 30), st.sets(st.integers(0, 5), max_size=4), st.booleans()), max_size=40)


@given(uses, st.integers(1, 60))
def test_retention_keeps_exactly_what_was_used_within_the_window(steps, window):
    """Against a dictionary that is searched whole."""
    retention: Retention[int] = Retention(window)
    last: dict[int, int] = {}
    now = 0
    for delay, keys, add in steps:
        now += delay
        gone = retention.expired(now)
        assert sorted(gone) == sorted(key for key, used in last.items() if now - used >= window)
        assert (retention.next_ns() is None) == (not last)
        retention.forget(gone)
        for key in gone:
            del last[key]
        if add:
            retention.add(sorted(keys), now)
            last.update(dict.fromkeys(keys, now))
        else:
            retention.touch(sorted(keys), now)
            last.update({key: now for key in keys if key in last})
        assert len(retention) == len(last)
        if last:
            assert retention.next_ns() == min(last.values()) + window


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(1, 10), st.integers(0, 9))
def test_ticks_caught_up_are_like_ticks_that_ran_in_time(delays, interval, phase):
    """Each use raises a level, each check above 10 takes 4 off: late or in time, the uses see the same level."""

    def check(level):
        return level - 4 if level > 10 else level

    state = {"level": 0}
    seen: list[int] = []

    def tick(t_ns):
        assert t_ns % interval == phase % interval
        before = state["level"]
        state["level"] = check(before)
        return state["level"] != before

    ticks = Ticks(interval, phase, tick)
    now, expected, level, next_tick = 0, [], 0, phase
    for delay in delays:
        now += delay
        while next_tick <= now:
            level = check(level)
            next_tick += interval
        expected.append(level)
        level += 7
        ticks.catch_up(now)
        seen.append(state["level"])
        state["level"] += 7
    assert seen == expected


def test_a_tier_counts_arriving_chunks_against_its_capacity():
    tier = SharedTier("t", 10, capacity=5)
    first = tier.accept([1, 2, 3], 0)
    second = tier.accept([2, 4, 5, 6], 0)
    assert (first, second, tier.counts.skipped) == ([1, 2, 3], [2, 4], 2)
    assert tier.lock_found([1, 2], 1) == []
    assert tier.arrive(first, 0, 5) == [1, 2, 3]
    assert tier.arrive(second, 1, 6) == [4]
    assert tier.arriving == 0
    assert tier.lock_found([1, 9, 2], 7) == [0, 2]
    assert tier.evict([1, 2, 3]) == [3]
    tier.unlock([1, 2])
    assert tier.read([2], 8) == [0]
    assert tier.evict([1, 2, 4]) == [1, 2, 4]
    stats = tier.stats(chunk_tokens=4)
    assert (stats.written_bytes, stats.evicted_bytes, stats.read_bytes, stats.skipped_bytes) == (40, 40, 10, 20)
    assert stats.evicted_unread_bytes == 30
    assert stats.resident_bytes == 0
    assert stats.peak_bytes == 40
    waiting = tier.accept([7], 9)
    tier.give_up(waiting)
    assert tier.arriving == 0


def test_wires_without_a_fabric_take_no_time():
    done = []
    wires = Wires(None, lambda: 7)
    group = wires.send([((0,), 100, 1)], TransferCost(), lambda: done.append(1))
    assert done == [1]
    assert (group.bytes, group.started_ns, group.open) == (100, 7, 0)


@given(st.integers(0, 10**12), st.integers(1, 64))
def test_even_parts_sum_up(total, parts):
    got = split_evenly(total, parts)
    assert sum(got) == total
    assert max(got) - min(got) <= 1
    assert len(got) == parts


def test_a_package_is_compared_with_its_record(tmp_path, monkeypatch):
    """A released package passes; a changed file, a missing one and one that came later are named."""
    package = tmp_path / "tiny"
    info = tmp_path / "tiny-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
    lines = []
    for name in ("__init__.py", "a.py", "b.py"):
        (package / name).write_text(f"# {name}\n")
        import base64
        import hashlib

        digest = base64.urlsafe_b64encode(hashlib.sha256(f"# {name}\n".encode()).digest()).rstrip(b"=").decode()
        lines.append(f"tiny/{name},sha256={digest},9")
    (info / "RECORD").write_text("\n".join([*lines, "tiny-1.0.dist-info/RECORD,,"]) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    upstream.check_package.cache_clear()
    check = upstream.check_package("tiny")
    assert (check.version, check.files, check.unmodified) == ("1.0", 3, True)
    (package / "a.py").write_text("# patched\n")
    (package / "b.py").unlink()
    (package / "c.py").write_text("")
    upstream.check_package.cache_clear()
    check = upstream.check_package("tiny")
    assert check.changed == ("tiny/a.py", "tiny/b.py")
    assert check.added == ("tiny/c.py",)
    assert not check.unmodified
    with pytest.raises(InputError, match="not installed"):
        upstream.check_package("no-such-package-here")


def test_without_lmcache_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(upstream, "available", lambda: False)
    with pytest.raises(InputError, match=r"\[lmcache\]"):
        upstream.prepare()


def test_another_release_is_refused(monkeypatch):
    monkeypatch.setattr(upstream, "available", lambda: True)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.0")
    with pytest.raises(InputError, match="0.6.0"):
        upstream.prepare()


def test_the_installed_lmcache_is_as_released(lmcache):
    check = upstream.check_package()
    assert check.version == upstream.VERSION
    assert check.files > 800
    assert check.unmodified, (check.changed, check.added)


def test_the_options_are_described():
    for field in CacheConfig.model_fields.values():
        assert field.description


def test_importing_the_package_does_not_import_lmcache():
    import subprocess
    import sys

    code = (
        "import sys, harness.cache.build, harness.cache.base, harness.cache.config, harness.fabric.flows;"
        "sys.exit(any(name.split('.')[0] in ('lmcache', 'torch') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
