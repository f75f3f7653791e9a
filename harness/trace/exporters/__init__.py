"""Exporters: traces in the formats of other tools."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from harness.trace.exporters.agentic_mooncake import export_agentic_mooncake
from harness.trace.exporters.mooncake import export_mooncake
from harness.trace.exporters.weka import export_weka
from harness.trace.model import Session

EXPORTERS: dict[str, Callable[[Path, Iterable[Session]], int]] = {
    "weka": export_weka,
    "mooncake": export_mooncake,
    "agentic_mooncake": export_agentic_mooncake,
}
"""Format -> function that writes sessions and returns the number of calls."""

__all__ = ["EXPORTERS", "export_agentic_mooncake", "export_mooncake", "export_weka"]
