"""What happens to chunks in lots gives what chunk by chunk would give."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from harness.cache.config import CacheConfig
from harness.cache.l1 import OBJECT_BYTES, L1Account
from harness.cache.stretches import chunks_by_tier, stretches, tokens_by_tier
from harness.cache.tier import SharedTier
from harness.clock import VirtualClock

CHUNK = 64


@st.composite
def hits(draw: st.DrawFn) -> tuple[list[str], bool]:
    """The tier of each hit chunk, in runs, and whether there is but one shared tier."""
    single = draw(st.booleans())
    names = ["dram", "store"] if single else ["dram", "store", "peers"]
    runs = draw(st.lists(st.tuples(st.sampled_from(names), st.integers(1, 5)), max_size=8))
    return [name for name, count in runs for _ in range(count)], single


@given(hits(), st.integers(0, 50 * CHUNK))
def test_stretches_are_the_chunks_tiers(case: tuple[list[str], bool], first_token: int) -> None:
    names, single = case
    below = [index for index, name in enumerate(names) if name != "dram"]
    served = stretches(len(names), below, "dram", "store" if single else lambda index: names[index])
    assert [name for name, first, end in served for _ in range(first, end)] == names
    assert [first for _, first, _ in served[1:]] == [end for _, _, end in served[:-1]]
    by_tier: dict[str, int] = {}
    for chunk, name in enumerate(names):
        tokens = (chunk + 1) * CHUNK - max(first_token, chunk * CHUNK)
        if tokens > 0:
            by_tier[name] = by_tier.get(name, 0) + tokens
    assert list(tokens_by_tier(served, CHUNK, first_token).items()) == list(by_tier.items())
    assert chunks_by_tier(served) == {name: names.count(name) for name in dict.fromkeys(names)}


class _Watch:
    """Nobody listens but the account."""

    def __init__(self) -> None:
        self.on_stored: list[Any] = []
        self.on_deleted: list[Any] = []
        self.on_used: list[Any] = []


class _L1:
    """Deletes what it is told to."""

    def __init__(self, watch: _Watch) -> None:
        self.watch = watch

    def delete(self, keys: list[int]) -> None:
        for told in self.watch.on_deleted:
            told(keys)

    def get_memory_usage(self) -> tuple[int, int]:
        return 0, 100 * OBJECT_BYTES


class _Evictor:
    """One pass drops the keys that it was given."""

    def __init__(self, l1: _L1, keys: list[int]) -> None:
        self.l1, self.keys = l1, keys

    def tick(self) -> int:
        self.l1.delete(self.keys)
        return len(self.keys)


some_keys = st.lists(st.integers(0, 30), unique=True, max_size=12)
steps = st.lists(
    st.tuples(st.sampled_from(["saved", "promoted", "loaded", "dropped", "evicted", "expired"]), some_keys), max_size=30
)


@given(steps, st.booleans())
def test_account_of_node_dram(todo: list[tuple[str, list[int]]], count_all: bool) -> None:
    clock, watch = VirtualClock(), _Watch()
    l1 = _L1(watch)
    config = CacheConfig(l1_size_gb=1, retention_s=1)
    account = L1Account(l1, watch, clock, config, 1, 100)
    account.count_all_drops_as_evictions = count_all
    read: dict[int, bool] = {}
    used: dict[int, int] = {}
    evicted = expired = unread = peak = 0

    def gone(keys: list[int], cause: bool) -> int:
        nonlocal unread
        dropped = 0
        for key in keys:
            was_read = read.pop(key, None)
            used.pop(key, None)
            dropped += was_read is not None
            unread += was_read is False and (cause or count_all)
        return dropped

    for what, keys in todo:
        if what in ("saved", "promoted"):
            keys = [key for key in keys if key not in read]  # LMCache admits a key once
            for told in watch.on_stored:
                told(keys, what == "promoted")
            read.update(dict.fromkeys(keys, what == "promoted"))
            used.update(dict.fromkeys(keys, clock.now_ns))
            peak = max(peak, len(read))
        elif what == "loaded":
            account.loaded(keys, len(keys))
            read.update({key: True for key in keys if key in read})
        elif what == "dropped":
            l1.delete(keys)
            dropped = gone(keys, False)
            evicted += dropped if count_all else 0
        elif what == "evicted":
            account.tick(_Evictor(l1, keys), clock.now_ns)
            dropped = gone(keys, True)
            evicted += dropped * (2 if count_all else 1)
        else:
            clock.now_ns += 600_000_000
            due = [key for key, t_ns in used.items() if t_ns <= clock.now_ns - 1_000_000_000]
            account.expire(clock.now_ns)
            dropped = gone(due, True)
            expired += dropped
            evicted += dropped if count_all else 0
        stats = account.stats()
        assert account.resident == len(read)
        assert (stats.evicted_bytes, stats.expired_bytes) == (evicted, expired)
        assert (stats.evicted_unread_bytes, stats.peak_bytes) == (unread, peak)


@given(st.lists(st.tuples(st.sampled_from(["lock", "unlock", "store", "evict"]), some_keys), max_size=30))
def test_locks_of_a_shared_tier(todo: list[tuple[str, list[int]]]) -> None:
    tier = SharedTier("store", chunk_bytes=1)
    held: set[int] = set()
    locks: dict[int, int] = {}
    for what, keys in todo:
        if what == "lock":
            found = tier.lock_found(keys, 0)
            assert found == [index for index, key in enumerate(keys) if key in held]
            for index in found:
                locks[keys[index]] = locks.get(keys[index], 0) + 1
        elif what == "unlock":
            tier.unlock(keys)
            locks = {key: count - (key in keys) for key, count in locks.items() if count > (key in keys)}
        elif what == "store":
            tier.arrive(tier.accept(keys, 0), 0, 0)
            held.update(keys)
        else:
            assert tier.evict(keys) == [key for key in keys if key in held and key not in locks]
            held.difference_update(key for key in keys if key not in locks)
        assert dict(tier._locks) == locks and tier.locked == len(locks)
        assert set(tier.objects) == held
