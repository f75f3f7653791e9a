"""Virtual time (fake_workers.clock), for everything that drives workers."""

from __future__ import annotations

from fake_workers.clock import NS_PER_S, VirtualClock, to_ns

__all__ = ["NS_PER_S", "VirtualClock", "to_ns"]
