"""What the router believed: from its total score, and from the events that it has acknowledged."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fake_workers.engine.events import Cleared, Removed, Stored
from fake_workers.engine.gauges import Gauges
from harness.router import adapt_v0100
from harness.router.belief import PublishedBlocks, ScoreModel, session_token
from harness.router.config import Scorer

WEIGHTS = st.sampled_from([0.5, 1.0, 2.0, 3.0, 7.0])
GAUGES = st.lists(st.builds(Gauges, st.integers(0, 9), st.integers(0, 9), st.floats(0, 1)), min_size=2, max_size=8)


def total(weights: dict[str, float], share: float, chosen: int, gauges: list[Gauges], rank: int, sticky: bool) -> float:
    """The router's sum, written out once more."""
    waiting = [g.waiting for g in gauges]
    spread = max(waiting) - min(waiting)
    queue = 1.0 if spread == 0 else (max(waiting) - waiting[chosen]) / spread
    value = weights["prefix-cache-scorer"] * share + weights["queue-scorer"] * queue
    value += weights["kv-cache-utilization-scorer"] * (1 - gauges[chosen].kv_usage)
    value += weights["session-affinity-scorer"] * sticky
    return value + adapt_v0100.TIE_BREAK_WEIGHT * (1 - rank / adapt_v0100.TIE_BREAK_RANGE)


@given(GAUGES, st.lists(WEIGHTS, min_size=4, max_size=4), st.integers(1, 20000), st.data())
def test_share_comes_out_of_the_total(
    gauges: list[Gauges], drawn: list[float], blocks: int, data: st.DataObject
) -> None:
    types = ["prefix-cache-scorer", "queue-scorer", "kv-cache-utilization-scorer", "session-affinity-scorer"]
    weights = dict(zip(types, drawn, strict=True))
    matched, chosen = data.draw(st.integers(0, blocks)), data.draw(st.integers(0, len(gauges) - 1))
    rank, sticky = data.draw(st.integers(0, 63)), data.draw(st.booleans())
    names = [f"w{i}" for i in range(len(gauges))]
    model = ScoreModel([Scorer(t, t, w, {}) for t, w in weights.items()], names, "prefix-cache-scorer")
    assert model.usable
    score = total(weights, matched / blocks, chosen, gauges, rank, sticky)
    token = session_token(names[chosen]) if sticky else None
    assert model.prefix_share(score, chosen, range(len(gauges)), gauges, rank, token, blocks) == matched / blocks
    wrong = score + weights["prefix-cache-scorer"] * 0.4 / blocks
    assert model.prefix_share(wrong, chosen, range(len(gauges)), gauges, rank, token, blocks) is None


def test_scorers_that_are_not_modelled_make_it_unknown() -> None:
    prefix = Scorer("p", "prefix-cache-scorer", 1.0, {})
    assert not ScoreModel([prefix, Scorer("t", "token-load-scorer", 1.0, {})], ["w0"], "p").usable
    by_id = Scorer("s", "session-affinity-scorer", 1.0, {"strategy": "session_id"})
    assert not ScoreModel([prefix, by_id], ["w0"], "p").usable
    assert not ScoreModel([Scorer("p", "prefix-cache-scorer", 1.0, {"matchLengthWeight": 0.5})], ["w0"], "p").usable
    assert not ScoreModel([Scorer("q", "queue-scorer", 1.0, {})], ["w0"], None).usable


EVENT = st.one_of(
    st.builds(Stored, st.just(0), st.integers(0, 3), st.integers(0, 30), st.integers(1, 20), st.none()),
    st.builds(Removed, st.just(0), st.integers(0, 3), st.integers(0, 30), st.integers(1, 20)),
    st.builds(Cleared, st.just(0)),
)


@given(st.lists(EVENT, max_size=30), st.lists(st.integers(1, 20), max_size=4))
def test_published_blocks_are_a_set_of_blocks(events: list[Stored | Removed | Cleared], lengths: list[int]) -> None:
    published, held = PublishedBlocks(2), set[tuple[int, int]]()
    published.apply(1, events)
    for event in events:
        if isinstance(event, Cleared):
            held.clear()
        else:
            run = {(event.origin, p) for p in range(event.start, event.start + event.count)}
            held = held | run if isinstance(event, Stored) else held - run
    runs, at = [], 0
    for origin, length in enumerate(lengths):
        runs.append((origin, at, at + length))
        at += length
    expected = 0
    for origin, start, end in runs:
        for p in range(start, end):
            if (origin, p) not in held:
                break
            expected += 1
        else:
            continue
        break
    assert published.matched(1, runs) == expected
    assert published.matched(0, runs) == 0
