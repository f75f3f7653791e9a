"""Small random step profiles for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from fake_workers.pricing.calibration import RAW, Calibration
from fake_workers.pricing.profile import Layout, Limits, StepProfile, Tables
from fake_workers.pricing.steps import RankBatch

BIG = 1 << 40


def make_profile(tables: Tables, dp: int = 1, calibration: Calibration = RAW) -> StepProfile:
    """A profile around given tables, with limits that nothing exceeds."""
    return StepProfile(
        name="synthetic",
        gpu="none",
        model="none",
        layout=Layout(1, dp, dp),
        kv_bytes_per_token=1,
        kv_bytes_per_token_rank=1,
        kv_capacity_tokens=1,
        block_tokens=16,
        max_model_len=1 << 20,
        limits=Limits(BIG, BIG, BIG, BIG, BIG, BIG),
        tables=tables,
        provenance={},
        calibration=calibration,
    )


def _axis(start: int, high: int, least: int, most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(start, high), min_size=least, max_size=most, unique=True).map(sorted)


def _rising(n: int, step: int) -> st.SearchStrategy[list[int]]:
    def cumulate(parts: list[int]) -> list[int]:
        total, out = 1, []
        for part in parts:
            total += part
            out.append(total)
        return out

    return st.lists(st.integers(0, step), min_size=n, max_size=n).map(cumulate)


@st.composite
def tables(draw: st.DrawFn) -> Tables:
    """Random tables: narrow and wide cells, flat and steep ones, prices from 1 ns to about a second."""
    step = draw(st.sampled_from((3, 1000, 10**7)))

    def curve() -> tuple[list[int], list[int]]:
        xs = draw(_axis(1, 3000, 1, 5))
        return xs, draw(st.lists(st.integers(1, step + 1), min_size=len(xs), max_size=len(xs)))

    new, cached = draw(_axis(1, 5000, 2, 4)), draw(_axis(0, 10_000, 2, 4))
    context = draw(
        st.lists(
            st.lists(st.integers(1, step + 1), min_size=len(cached), max_size=len(cached)),
            min_size=len(new),
            max_size=len(new),
        )
    )
    batches, contexts = draw(_axis(1, 40, 2, 4)), draw(_axis(1, 4000, 2, 8))
    rows = [draw(_rising(len(contexts), step)) for _ in batches]
    moe = (curve(), curve()) if draw(st.booleans()) else (([], []), ([], []))
    exchange = (curve(), curve()) if draw(st.booleans()) else (([], []), ([], []))
    return Tables(
        new, cached, context, [], *curve(), *curve(), *moe[0], *moe[1], batches, contexts, rows, [],
        *exchange[0], *exchange[1],
    )  # fmt: skip


@st.composite
def calibrations(draw: st.DrawFn) -> Calibration:
    """Mostly none, sometimes awkward rationals and overheads."""
    if draw(st.booleans()):
        return RAW
    scale = st.sampled_from(("1", "1.1", "0.333", "1.0001"))
    return Calibration.of(draw(scale), draw(scale), draw(st.integers(0, 10**6)), draw(st.integers(0, 10**4)))


@st.composite
def decoding_ranks(draw: st.DrawFn, most: int = 16) -> list[RankBatch]:
    """1 to `most` ranks, some idle, at least one with decodes."""
    n = draw(st.integers(1, most))
    ranks = []
    for _ in range(n):
        decodes = draw(st.sampled_from((0, 1, 2, 3, 7, 30, 64)))
        mean = draw(st.integers(1, 6000))
        extra = draw(st.integers(0, 50))
        ranks.append(RankBatch((), decodes, decodes * mean + extra if decodes else 0))
    if not any(rank.decodes for rank in ranks):
        ranks[0] = RankBatch((), 1, 10)
    return ranks
