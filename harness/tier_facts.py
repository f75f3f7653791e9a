"""What is known of a run's cache tiers and links at its end: numbers for the summary, tables for its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import polars as pl

from harness.bins import LevelBins
from harness.cache.base import NODE_DRAM, TierStats
from harness.cache.build import CacheCluster
from harness.cache.ledger import CacheLedger, Restore
from harness.cache.offload_build import OffloadCluster
from harness.cache.transfers import ALL_SHARED
from harness.fabric.flows import Fabric
from harness.fabric.meter import NS_PER_S, RateMeter
from harness.fabric.topology import kind_of
from harness.results.tier_data import LINK_COLUMNS, RESTORE_COLUMNS, SERIES_COLUMNS, TierData

_Level = tuple[LevelBins, int]
"""A level in chunks, and the bytes of a chunk."""

_SUMMED = (
    "resident_bytes",
    "read_bytes",
    "written_bytes",
    "promoted_bytes",
    "evicted_bytes",
    "evicted_unread_bytes",
    "expired_bytes",
    "skipped_bytes",
    "lookups",
    "asked_tokens",
    "hit_tokens",
)


def tier_facts(tiers: CacheCluster | OffloadCluster, ledger: CacheLedger) -> tuple[dict[str, Any], TierData]:
    """Whole run: account of each tier (node tiers over all nodes) and of the links; and the tables behind them."""
    end_ns = tiers.clock.now_ns
    per_node = [node.stats() for node in tiers.nodes]
    levels: dict[str, list[_Level]] = {NODE_DRAM: [(node.level, node.chunk_bytes) for node in tiers.nodes]}
    levels |= {tier.name: [(tier.level, tier.chunk_bytes)] for tier in tiers.tiers}
    kinds = {tier.name: "peer" if tier.name in tiers.peers else "shared" for tier in tiers.tiers}
    names = [stats.name for stats in per_node[0]]
    series: list[tuple[Any, ...]] = []
    accounts: list[dict[str, Any]] = []
    for place, name in enumerate(names):
        own = [stats[place] for stats in per_node] if name == NODE_DRAM else [per_node[0][place]]
        account = {"name": name, "kind": kinds.get(name, "node")} | _account(own)
        account |= _levels(levels[name], end_ns)
        for direction in ("read", "write"):
            account |= _rates(direction, tiers.traffic.meter(direction, name), end_ns)
            series += _flow_rows(direction, name, tiers.traffic.meter(direction, name), end_ns)
        accounts.append(account)
        for number, (level, chunk_bytes) in enumerate(levels[name]):
            label = f"{name}/{number}" if name == NODE_DRAM else name
            series += _level_rows(label, level, chunk_bytes, end_ns)
    links, kinds_of_links, busiest = _links(tiers.fabric, end_ns) if tiers.fabric is not None else ([], [], [])
    for number, name in busiest:
        assert tiers.fabric is not None
        series += _flow_rows("link", name, tiers.fabric.meter(number), end_ns)
    facts = {
        **_rates("read", tiers.traffic.meter("read", ALL_SHARED), end_ns),
        **_rates("write", tiers.traffic.meter("write", ALL_SHARED), end_ns),
        "resident_bytes_per_node_max": max(level.peak * size for level, size in levels[NODE_DRAM]),
        "interval_s": tiers.traffic.interval_ns / NS_PER_S,
        "kv_bytes_per_token": tiers.kv_bytes_per_token,
        "computed_again_tokens": ledger.computed_again_tokens,
        "tiers": accounts,
        "links": kinds_of_links,
    }
    data = TierData(
        series=pl.DataFrame(series, schema=SERIES_COLUMNS, orient="row"),
        links=pl.DataFrame(links, schema=LINK_COLUMNS, orient="row"),
        restores=restore_table(ledger.restores, names),
    )
    return facts, data


def _account(nodes: Sequence[TierStats]) -> dict[str, Any]:
    """The tier's account summed over nodes; its capacity is that of one node."""
    parts = [asdict(stats) for stats in nodes]
    return {"capacity_bytes": parts[0]["capacity_bytes"], **{key: sum(p[key] for p in parts) for key in _SUMMED}}


def _levels(levels: Sequence[_Level], end_ns: int) -> dict[str, Any]:
    """Residency: the fullest node's highest, and the time mean of all nodes."""
    integral = sum(sum(level.until(end_ns)[0]) * size for level, size in levels)
    return {
        "peak_bytes": max(level.peak * size for level, size in levels),
        "resident_bytes_mean": integral / (end_ns * len(levels)) if end_ns else 0.0,
    }


def _rates(direction: str, meter: RateMeter, end_ns: int) -> dict[str, Any]:
    return {
        f"{direction}_bytes_per_s_mean": meter.mean_bytes_per_s(end_ns),
        f"{direction}_bytes_per_s_p99": meter.percentile_bytes_per_s(99, end_ns),
    }


def _flow_rows(kind: str, name: str, meter: RateMeter, end_ns: int) -> list[tuple[Any, ...]]:
    """Whole bytes per bin that add up to the meter's total."""
    meter.integrate(end_ns)
    sums = meter.series.until(end_ns)
    if not any(sums):
        return []
    width, rows, moved, told = meter.series.bin_ns, [], 0, 0
    for number, value in enumerate(sums):
        moved += value
        start = number * width
        rows.append((kind, name, start, min(width, end_ns - start), moved // NS_PER_S - told, None))
        told = moved // NS_PER_S
    return rows


def _level_rows(name: str, level: LevelBins, chunk_bytes: int, end_ns: int) -> list[tuple[Any, ...]]:
    integrals, highs = level.until(end_ns)
    width, rows = level.bin_ns, []
    for number, (integral, high) in enumerate(zip(integrals, highs, strict=True)):
        start = number * width
        covered = max(1, min(width, end_ns - start))
        rows.append(("resident", name, start, covered, integral * chunk_bytes // covered, high * chunk_bytes))
    return rows


def _links(fabric: Fabric, end_ns: int) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]], list[tuple[int, str]]]:
    """All links; per kind of link that carried anything its links together and its busiest; those by number and name.

    Busiest: longest full, then by percentile and mean of its use, then the first.
    """
    rows: list[tuple[Any, ...]] = []
    by_kind: dict[str, list[tuple[tuple[float, float, float], int, dict[str, Any]]]] = {}
    for number, link in enumerate(fabric.links()):
        meter = fabric.meter(number)
        p99 = meter.percentile_bytes_per_s(99, end_ns)
        facts: dict[str, Any] = {
            "link": link.name,
            "kind": kind_of(link.name),
            "capacity_bytes_per_s": link.bytes_per_s,
            "bytes": meter.nanobytes // NS_PER_S,
            "utilisation_mean": meter.mean_bytes_per_s(end_ns) / link.bytes_per_s,
            "utilisation_p99": None if p99 is None else p99 / link.bytes_per_s,
            "busy_share": meter.busy_ns / end_ns if end_ns else 0.0,
            "full_share": meter.full_ns / end_ns if end_ns else 0.0,
        }
        rows.append(tuple(facts.values()))
        if meter.nanobytes:
            use = (facts["full_share"], facts["utilisation_p99"] or 0.0, facts["utilisation_mean"])
            by_kind.setdefault(facts["kind"], []).append((use, -number, facts))
    kinds, busiest = [], []
    for kind, members in by_kind.items():
        _, number, top = max(members, key=lambda m: (m[0], m[1]))
        busiest.append((-number, str(top["link"])))
        kinds.append(
            {
                "kind": kind,
                "links": sum(kind_of(link.name) == kind for link in fabric.links()),
                "bytes": sum(facts["bytes"] for _, _, facts in members),
                "busiest": {key: value for key, value in top.items() if key != "kind"},
            }
        )
    return rows, kinds, busiest


def restore_table(restores: Sequence[Restore], tiers: Sequence[str]) -> pl.DataFrame:
    """One row per load, in the order of their ends; `tier` is the lowest tier that it brought anything from."""
    columns: dict[str, Any] = {name: [] for name in RESTORE_COLUMNS}
    tokens: dict[str, list[int]] = {f"{name}_tokens": [] for name in tiers}
    for restore in restores:
        for name in RESTORE_COLUMNS:
            if name != "tier":
                columns[name].append(getattr(restore, name))
        used = [name for name in tiers if restore.tokens.get(name)]
        columns["tier"].append(used[-1] if used else None)
        for name in tiers:
            tokens[f"{name}_tokens"].append(restore.tokens.get(name, 0))
    return pl.DataFrame(
        {
            **{name: pl.Series(name, columns[name], dtype=kind) for name, kind in RESTORE_COLUMNS.items()},
            **{name: pl.Series(name, values, dtype=pl.Int64) for name, values in tokens.items()},
        }
    )
