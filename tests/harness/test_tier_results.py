"""Traffic, residency and restores of runs with the real LMCache: exact by hand, conserved in a whole run."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from harness.cache.base import LoadResult
from harness.cache.config import SharedTierConfig
from harness.cache.ledger import CacheLedger, Computed
from harness.results.store import load_run
from harness.results.summary_fields import TIER_FACTS
from harness.tier_facts import tier_facts
from tests.cache.bed import CHUNK_BYTES, Bed
from tests.harness.test_cache_run import _run

GB = 10**9
S = 10**9


@pytest.mark.usefixtures("lmcache")
def test_a_prompt_read_by_another_node_has_known_rates() -> None:
    """20 chunks of 6.4 MB: written by node 0, read by node 1 through the store's link of 64 MB/s: 2 s.

    The host's link (100 MB/s) and the GPU's (63 GB/s) do not limit; the store's is full for 2 s out and 2 s in.
    """
    topology = Path(__file__).parent / "store-64.yaml"
    bed = Bed(nodes=2, tiers=[SharedTierConfig(name="store")], topology=str(topology))
    size = 20 * CHUNK_BYTES
    bed.store(0, 7, 20)
    assert bed.load(1, bed.request("again", (7, 0, 20))) is not None
    bed.settle()
    bed.run(400 * S)
    facts, data = tier_facts(bed.cluster, CacheLedger(16))
    assert (facts["read_bytes_per_s_mean"], facts["write_bytes_per_s_mean"]) == (size / 400, size / 400)
    assert set(facts) == {*TIER_FACTS, "tiers", "links"}
    store = facts["tiers"][1]
    assert (store["read_bytes"], store["written_bytes"], store["peak_bytes"]) == (size, size, size)
    assert [store["name"], store["kind"], facts["tiers"][0]["kind"]] == ["store", "shared", "node"]
    kinds = {kind["kind"]: kind for kind in facts["links"]}
    link = kinds["store>switch"]["busiest"]
    assert link["full_share"] == link["busy_share"] == link["utilisation_mean"] == pytest.approx(2 / 400, rel=1e-6)
    assert kinds["host>switch"]["busiest"]["link"] == "host[0]>switch"
    assert kinds["switch>host"]["busiest"]["link"] == "switch>host[1]"
    assert kinds["switch>host"]["busiest"]["utilisation_mean"] == pytest.approx(size / 400 / 100e6, rel=1e-6)
    # three seconds have traffic (the transfer begins a little after a whole second): p99 of 400 lies below them
    assert facts["read_bytes_per_s_p99"] == pytest.approx(0, abs=1)
    moved = {(k, n): b for k, n, b in data.series.group_by("kind", "name").agg(pl.col("bytes").sum()).iter_rows()}
    assert moved["read", "store"] == moved["write", "store"] == moved["read", "dram"] == moved["link", "store>switch"]
    assert moved["read", "store"] == size
    assert data.links.filter(pl.col("bytes") > 0)["bytes"].sum() == 2 * size * 2 + 2 * size
    held = data.of("resident").group_by("name").agg(pl.col("high_bytes").max()).sort("name")
    assert held.rows() == [("dram/0", size), ("dram/1", size), ("store", size)]
    bed.close()


@pytest.mark.usefixtures("lmcache")
def test_busy_seconds_give_the_percentile() -> None:
    """The same transfer in a run of 100 s: two whole seconds at the link's rate are its 99th percentile and above."""
    topology = Path(__file__).parent / "store-64.yaml"
    bed = Bed(nodes=2, tiers=[SharedTierConfig(name="store")], topology=str(topology))
    bed.store(0, 7, 60)
    bed.load(1, bed.request("again", (7, 0, 60)))
    bed.settle()
    bed.run(100 * S)
    facts, _ = tier_facts(bed.cluster, CacheLedger(16))
    assert facts["read_bytes_per_s_p99"] == pytest.approx(64e6)
    assert facts["write_bytes_per_s_p99"] == pytest.approx(64e6)
    bed.close()


@pytest.mark.usefixtures("lmcache")
def test_what_expires_leaves_at_the_end_of_its_window() -> None:
    """Noticed only at the end of the run, but resident bytes over time are those of the windows."""
    bed = Bed(retention_s=10.0, tiers=[SharedTierConfig(name="store", retention_s=20.0)])
    bed.store(0, 7, 10)
    bed.wait(100)
    facts, data = tier_facts(bed.cluster, CacheLedger(16))
    size = 10 * CHUNK_BYTES
    for name, window, account in (("dram/0", 10, 0), ("store", 20, 1)):
        rows = data.of("resident").filter(pl.col("name") == name)
        held_s = rows.select((pl.col("bytes") * pl.col("width_ns")).sum()).item() / 1e9 / size
        assert held_s == pytest.approx(window, abs=0.1)
        assert facts["tiers"][account]["resident_bytes_mean"] == pytest.approx(size * held_s / 100, rel=1e-3)
        assert facts["tiers"][account]["resident_bytes"] == 0
    bed.close()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["mp", "inproc"])
def test_bytes_and_tokens_are_conserved_from_the_wires_to_the_records(tmp_path: Path, lmcache: None, mode: str) -> None:
    run = _run(tmp_path, "run", l2_adapters=[{"name": "store"}], mode=mode)
    tier, data = run.summary["tier"], run.tiers
    assert data is not None
    accounts = {account["name"]: account for account in tier["tiers"]}
    moved = {(k, n): b for k, n, b in data.series.group_by("kind", "name").agg(pl.col("bytes").sum()).iter_rows()}
    for name, account in accounts.items():
        assert moved["read", name] == account["read_bytes"] > 0
        assert moved["write", name] == account["written_bytes"] > 0
    kinds = {kind["kind"]: kind["bytes"] for kind in tier["links"]}
    # bytes sent = bytes received, on every link of the way
    assert kinds["store>switch"] == kinds["switch>host"] == accounts["store"]["read_bytes"]
    assert kinds["host>switch"] == kinds["switch>store"] == accounts["store"]["written_bytes"]
    assert kinds["host>gpu"] == accounts["dram"]["read_bytes"] == data.restores["bytes"].sum()
    assert kinds["gpu>host"] == accounts["dram"]["written_bytes"]
    by_call = run.calls.select("call_id", "dram_tokens", "shared_tokens", "restore_ns").filter(
        pl.col("dram_tokens") + pl.col("shared_tokens") > 0
    )
    loads = data.restores.group_by("call_id").agg(
        pl.col("dram_tokens").sum().alias("dram"),
        pl.col("store_tokens").sum().alias("store"),
        (pl.col("answered_ns") - pl.col("asked_ns") + pl.col("ended_ns") - pl.col("started_ns")).sum().alias("took"),
    )
    both = by_call.join(loads, on="call_id", how="full", coalesce=True)
    assert both["dram_tokens"].to_list() == both["dram"].to_list()
    assert both["shared_tokens"].to_list() == both["store"].to_list()
    assert both["restore_ns"].to_list() == both["took"].to_list()
    assert accounts["dram"]["served_tokens"] == run.summary["tokens_by_source"]["dram"]
    assert accounts["store"]["served_tokens"] == run.summary["tokens_by_source"]["shared"]
    assert load_run(tmp_path / "run").summary == run.summary


@pytest.mark.slow
def test_only_what_no_tier_holds_is_computed_again(tmp_path: Path, lmcache: None) -> None:
    """Round robin scatters sessions: without a shared tier nodes compute what others have; with one they do not."""
    shared = _run(tmp_path, "shared", l2_adapters=[{"name": "store"}])
    local = _run(tmp_path, "local")
    tokens = shared.summary["tokens_by_source"]["computed"], local.summary["tokens_by_source"]["computed"]
    again = [run.summary["tier"]["computed_again_tokens"] for run in (shared, local)]
    assert again[1] > 10_000 > again[0]
    # what one computes more than the other is what it computes again, but for cut chunks
    assert abs((tokens[1] - tokens[0]) - (again[1] - again[0])) < 20 * 256


def test_known_prefixes() -> None:
    computed = Computed(16)
    computed.add([(0, 0, 4), (1, 4, 10)], 9 * 16)
    assert computed.known_tokens([(0, 0, 4), (1, 4, 10)]) == 9 * 16
    assert computed.known_tokens([(0, 0, 3), (2, 3, 8)]) == 3 * 16
    assert computed.known_tokens([(0, 0, 4), (1, 4, 6), (3, 6, 9)]) == 6 * 16
    assert computed.known_tokens([(5, 0, 4)]) == 0
    computed.add([(0, 0, 2)], 32)
    assert computed.known_tokens([(0, 0, 4)]) == 64


def test_a_ledger_keeps_failed_and_cancelled_loads() -> None:
    ledger = CacheLedger(16)
    ledger.ended("a", 0, LoadResult(0, 32, True, 100, 3, 4, {"dram": 32}, 1, 2))
    ledger.cancelled("b", 1, 9)
    assert [(r.call_id, r.outcome, r.bytes) for r in ledger.restores] == [("a", "failed", 0), ("b", "cancelled", 0)]
