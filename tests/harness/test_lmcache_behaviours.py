"""What LMCache does and a home-made LRU would not, inside whole runs: engine, router baseline, records.

tests/cache/test_behaviours.py and test_inproc.py show the same on the cache node alone. Here every prompt is a call of
a trace, and what the package did is read from the calls' records: which tokens came from which tier, which were
computed again. The engines keep nothing in the GPU (`enable_prefix_caching: false`), so all reuse is LMCache's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.cache.config import Eviction
from harness.experiment import Experiment
from harness.results.store import Run
from harness.runner import run_experiment
from harness.trace.model import Call, Session
from harness.workload import Loaded

pytestmark = [pytest.mark.usefixtures("lmcache"), pytest.mark.slow]

CHUNK = 64
CHUNK_BYTES = CHUNK * 131_072
"""Llama-3.1-8B's KV in BF16."""
SLOW_COPY = """\
about: copies to and from the GPU that take seconds
counts: {n: 1, g: 1}
links:
  - {from: "gpu[n,g]", to: "host[n]", gbytes_per_s: 0.05, latency_us: 1}
"""


@dataclass(frozen=True)
class Ask:
    """One call: the first `chunks` chunks of prompt `what`, sent `gap_s` after the call before it has ended.

    `beside`: sent so long after the start of the call before it instead, while that one is still under way.
    """

    what: str
    chunks: int
    gap_s: float = 0.1
    beside: bool = False


def session(asks: list[Ask]) -> Session:
    """The calls as a trace would have them; equal names share their leading chunks."""
    calls: list[Call] = []
    longest: dict[str, int] = {}
    for index, ask in enumerate(asks):
        ref = longest.get(ask.what, -1)
        keep = min(ask.chunks, calls[ref].blocks) if ref >= 0 else 0
        calls.append(
            Call(
                index=index,
                t_s=float(index),
                api_s=None,
                chain="main",
                input_tokens=ask.chunks * CHUNK + 1,
                output_tokens=1,
                ref=ref if keep else -1,
                keep_blocks=keep,
                new_blocks=ask.chunks - keep,
                deps=() if ask.beside or not index else tuple(range(index)),
                on_start=index - 1 if ask.beside else None,
                gap_s=ask.gap_s,
            )
        )
        if ref < 0 or ask.chunks > calls[ref].blocks:
            longest[ask.what] = index
    return Session(id="s", block_tokens=CHUNK, calls=calls)


def experiment(chunks: float, nodes: int = 1, topology: str = "one-switch", **lmcache: Any) -> Experiment:
    """Node DRAM for so many chunks; half a chunk more keeps rounding away. Calls go to the nodes in turn."""
    return Experiment.model_validate(
        {
            "name": "t",
            "trace": {"path": "made"},
            "load": {"arrivals": "at_once"},
            "cluster": {
                "nodes": nodes,
                "gpus_per_node": 1,
                "engine": {"enable_prefix_caching": False, "block_size": CHUNK},
            },
            "model": {"profile": "llama-3.1-8b-bf16-tp1-h100"},
            "router": {"kind": "round_robin"},
            "cache": {
                "kind": "lmcache",
                "lmcache": {"chunk_size": CHUNK, "l1_size_gb": (chunks + 0.5) * CHUNK_BYTES / 2**30, **lmcache},
            },
            "fabric": {"topology": topology},
            "output": {"report": False},
        }
    )


def run(tmp_path: Path, asks: list[Ask], chunks: float, nodes: int = 1, **options: Any) -> Run:
    made = experiment(chunks, nodes, **options)
    done = run_experiment(made, tmp_path / "out", loaded=Loaded([session(asks)], "made"), show_progress=False)
    assert done.summary["validity"]["valid"], done.summary["validity"]
    assert done.summary["outcome"]["completed"] == len(asks)
    for row in done.calls.iter_rows(named=True):
        assert row["gpu_tokens"] == 0
        assert row["dram_tokens"] + row["shared_tokens"] + row["computed_tokens"] == row["input_tokens"]
    return done


def served(done: Run, tier: str) -> list[float]:
    """Chunks that a tier served, call by call in the order of the trace."""
    return (done.calls.sort("index")[f"{tier}_tokens"] / CHUNK).to_list()


def dram(done: Run) -> dict[str, Any]:
    """The account of node DRAM, all nodes together."""
    tier = done.info.tier
    assert tier is not None
    return dict(tier["tiers"][0])


@pytest.fixture
def slow_copy(tmp_path: Path) -> str:
    path = tmp_path / "slow.yaml"
    path.write_text(SLOW_COPY)
    return str(path)


# ---------------------------------------------------------------- 1. in which order prompts fall


def test_mp_takes_a_prompt_from_its_end_so_that_the_rest_still_hits(tmp_path: Path) -> None:
    """60 of 64 chunks are above the watermark: the next check evicts a fifth of them, the last twelve."""
    done = run(tmp_path, [Ask("a", 60), Ask("a", 60, gap_s=3)], chunks=64)
    assert served(done, "dram") == [0, 48]
    assert done.calls.sort("index")["computed_tokens"].to_list() == [60 * CHUNK + 1, 12 * CHUNK + 1]
    assert dram(done)["evicted_bytes"] >= 12 * CHUNK_BYTES


def test_inproc_takes_it_from_its_front_and_so_loses_all_of_it(tmp_path: Path) -> None:
    """54 of 60 chunks are still there when ten more were stored into 64, and not one of them can be used."""
    done = run(tmp_path, [Ask("a", 60), Ask("b", 10), Ask("a", 60)], chunks=64, mode="inproc")
    assert served(done, "dram") == [0, 0, 0]


def test_inproc_after_a_hit_in_between_takes_it_from_its_end(tmp_path: Path) -> None:
    done = run(tmp_path, [Ask("a", 60), Ask("a", 60), Ask("b", 10), Ask("a", 60)], chunks=64, mode="inproc")
    assert served(done, "dram") == pytest.approx([0, 60, 0, 54], abs=1 / CHUNK)


# ---------------------------------------------------------------- 2. watermark, checks, stores that do not fit


def test_mp_skips_a_store_that_does_not_fit_whole_until_the_next_check_makes_room(tmp_path: Path) -> None:
    asks = [Ask("a", 60), Ask("b", 10), Ask("b", 10), Ask("c", 10, gap_s=30), Ask("c", 10)]
    done = run(tmp_path, asks, chunks=64, tick_s=20)
    assert served(done, "dram") == pytest.approx([0, 0, 0, 0, 10], abs=1 / CHUNK)
    assert dram(done)["skipped_bytes"] == 2 * 10 * CHUNK_BYTES  # b, twice: 4 chunks are free, none is taken


def test_mp_below_the_watermark_evicts_nothing_and_above_it_a_fifth(tmp_path: Path) -> None:
    below = run(tmp_path / "below", [Ask("a", 50), Ask("b", 1, gap_s=9), Ask("a", 50)], chunks=64)
    assert dram(below)["evicted_bytes"] == 0
    assert served(below, "dram")[2] == pytest.approx(50, abs=1 / CHUNK)
    above = run(tmp_path / "above", [Ask("a", 50), Ask("b", 2, gap_s=9), Ask("a", 50, gap_s=9)], chunks=64)
    assert dram(above)["evicted_bytes"] >= 10 * CHUNK_BYTES
    assert served(above, "dram")[2] < 50


# ---------------------------------------------------------------- 3. a hit larger than the room for it


def test_mp_does_not_load_a_prefix_at_all_that_is_larger_than_the_free_dram(tmp_path: Path) -> None:
    """Node 1 has 40 chunks free: of 60 in the store none are loaded, all are computed again; 30 are loaded."""
    asks = [Ask("a", 60), Ask("b", 24), Ask("x", 1), Ask("a", 60), Ask("x", 1), Ask("a", 30)]
    done = run(tmp_path, asks, chunks=64, nodes=2, l2_adapters=[{"name": "store"}], tick_s=1000)
    assert done.calls.sort("index")["node"].to_list() == [0, 1, 0, 1, 0, 1]
    shared = served(done, "shared")
    assert shared[3] == 0
    assert done.calls.sort("index")["computed_tokens"][3] == 60 * CHUNK + 1
    assert shared[5] == pytest.approx(30, abs=1 / CHUNK)


# ---------------------------------------------------------------- 4. what was loaded stays, or not


@pytest.mark.parametrize(
    ("options", "from_store", "from_dram"),
    [
        ({"l2_prefetch_policy": "default"}, [20, 20], [0, 0]),
        ({"l2_prefetch_policy": "retain"}, [20, 0], [0, 20]),
        ({"mode": "inproc"}, [20, 0], [0, 20]),
    ],
    ids=["mp-default", "mp-retain", "inproc"],
)
def test_what_was_loaded_from_below_stays_only_if_told_so(
    tmp_path: Path, options: dict[str, Any], from_store: list[int], from_dram: list[int]
) -> None:
    asks = [Ask("a", 20), Ask("a", 20), Ask("x", 1), Ask("a", 20)]
    done = run(tmp_path, asks, chunks=64, nodes=2, l2_adapters=[{"name": "store"}], **options)
    assert served(done, "shared")[1::2] == pytest.approx(from_store, abs=1 / CHUNK)
    assert served(done, "dram")[1::2] == pytest.approx(from_dram, abs=1 / CHUNK)


# ---------------------------------------------------------------- 5. pins and locks


def test_inproc_keeps_of_a_store_what_fits_beside_pinned_chunks(tmp_path: Path, slow_copy: str) -> None:
    """While 60 of 64 chunks are pinned by a load under way, a prompt of 20 is saved: its first four stay."""
    asks = [Ask("a", 60), Ask("a", 60, gap_s=15), Ask("b", 20, gap_s=0.5, beside=True), Ask("b", 20, gap_s=1)]
    done = run(tmp_path, asks, chunks=64, mode="inproc", topology=slow_copy)
    rows = done.calls.sort("index").to_dicts()
    assert rows[1]["first_token_ns"] > rows[2]["finish_ns"], "the load is still under way"
    assert served(done, "dram") == pytest.approx([0, 60, 0, 4], abs=1 / CHUNK)
    assert dram(done)["skipped_bytes"] >= 16 * CHUNK_BYTES


def test_mp_cannot_evict_what_a_load_reads(tmp_path: Path, slow_copy: str) -> None:
    """The check in the middle of a slow load finds 60 of 64 chunks read-locked; the one after it takes its fifth."""
    asks = [Ask("a", 60), Ask("a", 60, gap_s=12), Ask("b", 10, gap_s=1, beside=True), Ask("a", 60, gap_s=20)]
    done = run(tmp_path, asks, chunks=64, topology=slow_copy, tick_s=17)
    rows = done.calls.sort("index").to_dicts()
    assert rows[1]["dram_tokens"] == 60 * CHUNK  # and the last token is computed
    assert rows[1]["arrival_ns"] < 17e9 < rows[1]["first_token_ns"], "a check falls into the load"
    assert dram(done)["skipped_bytes"] == 10 * CHUNK_BYTES, "b found no room in the meantime"
    assert 0 < served(done, "dram")[3] < 60


# ---------------------------------------------------------------- 6. alignment


@pytest.mark.parametrize("mode", ["mp", "inproc"])
def test_dram_holds_as_many_chunks_as_its_size_says(tmp_path: Path, mode: str) -> None:
    done = run(tmp_path, [Ask("a", 50), Ask("a", 50)], chunks=64, mode=mode)
    assert served(done, "dram")[1] == pytest.approx(50, abs=1 / CHUNK)


def test_mp_with_its_default_alignment_would_hold_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package rounds each of the small stand-ins up to 4 KiB; the run shows nothing but misses."""
    from lmcache.v1.distributed.config import L1MemoryManagerConfig

    from harness.cache import stack

    def unaligned(**options: Any) -> Any:
        return L1MemoryManagerConfig(**{name: value for name, value in options.items() if name != "align_bytes"})

    monkeypatch.setattr(stack, "L1MemoryManagerConfig", unaligned)
    done = run(tmp_path, [Ask("a", 50), Ask("a", 50), Ask("b", 1), Ask("b", 1)], chunks=64)
    assert served(done, "dram")[1] == 0
    assert dram(done)["skipped_bytes"] >= 2 * 50 * CHUNK_BYTES


# ---------------------------------------------------------------- 7. IsolatedLRU


def test_isolated_lru_on_node_dram_ends_the_run_at_its_first_eviction(tmp_path: Path) -> None:
    """The schema does not offer it, because in 0.5.6 its eviction raises; past the schema a run shows that it does."""
    made = experiment(chunks=64)
    assert made.cache.lmcache is not None
    lmcache = made.cache.lmcache.model_copy(
        update={"eviction": Eviction.model_construct(eviction_policy="IsolatedLRU", **_SHARES)}
    )
    broken = made.model_copy(update={"cache": made.cache.model_copy(update={"lmcache": lmcache})})
    asks = [Ask("a", 60), Ask("a", 60, gap_s=3)]
    with pytest.raises(ValueError, match="salt") as caught:
        run_experiment(broken, tmp_path / "out", loaded=Loaded([session(asks)], "made"), show_progress=False)
    assert "kept: " in str(caught.value)


_SHARES: dict[str, Any] = {"trigger_watermark": 0.8, "eviction_ratio": 0.2}


# ---------------------------------------------------------------- both modes, as a whole


@pytest.fixture(params=["mp", "inproc"])
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def test_a_run_in_either_mode_repeats_and_keeps_its_accounts(tmp_path: Path, mode: str) -> None:
    asks = [Ask(f"p{i % 5}", 5 + 3 * (i % 9), gap_s=0.2, beside=bool(i % 3)) for i in range(40)]
    asks[0] = Ask("p0", 5)
    options: dict[str, Any] = {"mode": mode, "l2_adapters": [{"name": "store", "capacity_gb": 2.0}]}
    runs = [run(tmp_path / name, asks, chunks=96, nodes=3, **options) for name in ("one", "two")]
    assert runs[0].summary["digest"] == runs[1].summary["digest"]
    summary = runs[0].summary
    assert summary["cache"] == {"kind": "lmcache", "release": "0.5.6", "mode": mode}
    sources = summary["tokens_by_source"]
    assert sources["dram"] > 0 and sources["shared"] > 0
    assert sum(sources.values()) == summary["load"]["input_tokens"]
    assert runs[0].info.tier is not None
    tiers = runs[0].info.tier["tiers"]
    assert [tier["name"] for tier in tiers] == ["dram", "store"]
    assert tiers[0]["resident_bytes"] <= 3 * 96.5 * CHUNK_BYTES and tiers[1]["resident_bytes"] <= 2 * 2**30


@pytest.mark.parametrize("kind", ["round_robin", "session_sticky"])
def test_two_replicas_of_a_node_share_its_dram_only_in_mp(tmp_path: Path, mode: str, kind: str) -> None:
    """In-process, each replica has a cache of its own: what one computed, the other computes again."""
    made = experiment(chunks=128, mode=mode)
    cluster = made.cluster.model_copy(update={"gpus_per_node": 2})
    made = made.model_copy(update={"cluster": cluster, "router": made.router.model_copy(update={"kind": kind})})
    asks = [Ask("a", 20), Ask("a", 20)]
    done = run_experiment(made, tmp_path / "out", loaded=Loaded([session(asks)], "made"), show_progress=False)
    together = mode == "mp" or kind == "session_sticky"
    assert served(done, "dram")[1] == (pytest.approx(20, abs=1 / CHUNK) if together else 0)
