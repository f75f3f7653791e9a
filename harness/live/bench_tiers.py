"""Cache tiers in the report of a bench: their account as the workers' process gives it, on the bench's clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import polars as pl

from harness.cache.base import NODE_DRAM
from harness.results.records import CallRecord
from harness.results.tier_data import LINK_COLUMNS, LOADED, RESTORE_COLUMNS, SERIES_COLUMNS, TierData

SPREAD = "the cache tiers are in several processes: no account of them here (the live page shows them)"
BEFORE = "accounts of cache tiers and links hold what came before this bench, too"


@dataclass(slots=True)
class Account:
    """What the tiers did, and what a reader has to know of it."""

    facts: dict[str, Any]
    data: TierData
    notes: list[str]


async def collect(workers: Sequence[str], now: Callable[[], int]) -> Account | str | None:
    """Ask every worker that answered; None without tiers, a note where they cannot be told.

    `now`: the bench's clock, ns, which runs as fast as the engines'.
    """
    found: dict[str, dict[str, Any]] = {}
    async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
        for address in workers:
            try:
                answer = await client.get(f"http://{address}/sim/tiers")
            except httpx.HTTPError:
                continue
            if answer.status_code == 200:
                account = answer.json()
                account["offset_ns"] = int(account["facts"]["ns"]) - now()
                found[account["process"]] = account
    if len(found) > 1:
        return SPREAD
    return next((_account(one) for one in found.values()), None)


def give(records: Sequence[CallRecord], account: Account, peers: frozenset[str]) -> None:
    """A client sees cached tokens; the loads say which of them came from a tier."""
    loads = {_call(row["call_id"]): row for row in account.data.restores.iter_rows(named=True) if _loaded(row)}
    for record in records:
        row = loads.get(record.call_id)
        if row is None:
            continue
        for column, tokens in row.items():
            if not column.endswith("_tokens") or not tokens:
                continue
            taken = min(tokens, record.gpu_tokens)
            tier = column.removesuffix("_tokens")
            record.gpu_tokens -= taken
            if tier == NODE_DRAM:
                record.dram_tokens += taken
            elif tier in peers:
                record.peer_tokens += taken
            else:
                record.shared_tokens += taken


def _account(told: dict[str, Any]) -> Account:
    offset = told["offset_ns"]
    tables = told["tables"]
    kinds = {**RESTORE_COLUMNS, **{name: pl.Int64 for name in tables["restores"] if name.endswith("_tokens")}}
    series = pl.DataFrame(tables["series"], schema=SERIES_COLUMNS)
    before = series.filter(
        pl.col("kind").is_in(["read", "write"]) & (pl.col("start_ns") + pl.col("width_ns") <= offset)
    )
    restores = pl.DataFrame(tables["restores"], schema=kinds)
    times = [name for name in RESTORE_COLUMNS if name.endswith("_ns")]
    data = TierData(
        series=series.with_columns(pl.col("start_ns") - offset).filter(pl.col("start_ns") >= 0),
        links=pl.DataFrame(tables["links"], schema=LINK_COLUMNS),
        restores=restores.with_columns(pl.col(times) - offset).filter(pl.col("ended_ns") >= 0),
    )
    return Account(told["facts"], data, [BEFORE] if before["bytes"].sum() else [])


def _loaded(row: dict[str, Any]) -> bool:
    return bool(row["outcome"] == LOADED)


def _call(request_id: str) -> str:
    """The client's id in an engine's: `0_cmpl-ID-0-7`."""
    return request_id.partition("-")[2].rsplit("-", 2)[0]
