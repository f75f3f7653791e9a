"""Importers: every format that a trace can come in besides the project's own, and how a file of it is recognised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.trace.importers import (
    agentic_mooncake,
    aiperf,
    bailian,
    csv_tables,
    llmservingsim,
    mooncake,
    otel,
    text,
)
from harness.trace.importers.common import TEXT_ROW_LIMIT_BYTES
from harness.trace.importers.options import ImportOptions
from harness.trace.model import Session

Reader = Callable[[Path, bool, ImportOptions], Iterator[Session]]


@dataclass(frozen=True, slots=True)
class Importer:
    """A format: `recognises` a file by its first row, where that is a JSON object, and its first bytes."""

    name: str
    read: Reader
    recognises: Callable[[dict[str, Any] | None, bytes], bool]


def _by_row(test: Callable[[dict[str, Any]], bool]) -> Callable[[dict[str, Any] | None, bytes], bool]:
    return lambda row, head: row is not None and test(row)


IMPORTERS: tuple[Importer, ...] = (
    Importer(
        "agentic_mooncake",
        agentic_mooncake.read_agentic_mooncake,
        _by_row(agentic_mooncake.is_agentic_mooncake),
    ),
    Importer("bailian", bailian.read_bailian, _by_row(bailian.is_bailian)),
    Importer("mooncake", mooncake.read_mooncake, _by_row(mooncake.is_mooncake)),
    Importer("mooncake_multi_turn", mooncake.read_multi_turn, _by_row(mooncake.is_multi_turn)),
    Importer("llmservingsim", llmservingsim.read_llmservingsim, _by_row(llmservingsim.is_llmservingsim)),
    Importer("aiperf_dag", aiperf.read_dag, _by_row(aiperf.is_dag)),
    Importer("aiperf_multi_turn", aiperf.read_multi_turn, _by_row(aiperf.is_multi_turn)),
    Importer("text", text.read_text, _by_row(text.is_text)),
    Importer("otel", otel.read_otel, lambda row, head: head[:1] == b"{" and otel.looks_like(head)),
    Importer("csv", csv_tables.read_csv, lambda row, head: csv_tables.table_of(head) is not None),
)
BY_NAME = {importer.name: importer for importer in IMPORTERS}


def recognise(row: dict[str, Any] | None, head: bytes) -> str | None:
    """The name of the first format whose files begin like this; None for none."""
    return next((importer.name for importer in IMPORTERS if importer.recognises(row, head)), None)


__all__ = ["BY_NAME", "IMPORTERS", "TEXT_ROW_LIMIT_BYTES", "ImportOptions", "Importer", "recognise"]
