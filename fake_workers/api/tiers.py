"""What may lie below all engines of a process: cache tiers, on the engines' own clock."""

from __future__ import annotations

from typing import Any, Protocol

from fake_workers.api.block_names import BlockNames
from fake_workers.api.live_engine import LiveEngine
from fake_workers.engine.connector import Connector, ConnectorOptions
from fake_workers.engine.events import KvEvent


class Tiers(Protocol):
    """Groups are numbered as the process serves them; `engines` lists those that are built, in that order."""

    names: BlockNames
    """Of blocks, for all engines: what one has stored another may find."""
    options: ConnectorOptions | None
    hit_source: str
    """What vLLM's metrics call the source of tokens that come from here (CacheHitSource)."""
    engines: list[LiveEngine]

    def connector(self, group: int) -> Connector:
        """That of a group whose engine is built next."""

    def attach(self, engine: LiveEngine) -> None:
        """The engine of the group whose connector was made last."""

    def said(self, group: int, rank: int, events: list[KvEvent]) -> list[KvEvent]:
        """A rank's own KV events and those of the tiers that leave with them."""

    def metrics(self) -> bytes:
        """Samples to be shown beside vLLM's own, in Prometheus' format."""

    def account(self) -> dict[str, Any]:
        """What the tiers and links have done so far, as JSON."""

    def close(self) -> None:
        """The process ends."""
