"""LMCache's own eviction of L2 adapters on a shared tier, at virtual ticks. Importing this module imports lmcache.

In a fleet every server evicts for its own adapters; for a store that several servers share, LMCache counts bytes and
evicts in one place (its coordinator). Here one adapter object owns the account of the shared tier, and one
L2EvictionController, never started, checks it.
"""

from __future__ import annotations

from lmcache.v1.distributed.config import EvictionConfig
from lmcache.v1.distributed.storage_controllers import L2AdapterEvictionState, L2EvictionController

from harness.cache.adapter import TIERS, HeldL2Adapter
from harness.cache.config import Eviction
from harness.cache.l1 import OBJECT_BYTES
from harness.cache.ticks import Ticks
from harness.cache.tier import SharedTier


def attach_eviction(tier: SharedTier, eviction: Eviction, tick_ns: int) -> HeldL2Adapter:
    """Put LMCache's policy and watermark on a tier with a capacity; returns the adapter that keeps its account."""
    assert tier.capacity is not None
    key = f"owner of {id(tier)}"
    TIERS[key] = tier
    owner = HeldL2Adapter({"tier": key, "auto": False, "signal": False, "capacity": tier.capacity * OBJECT_BYTES})
    del TIERS[key]
    owner.set_backend_identity("plugin", True)
    state = L2AdapterEvictionState(
        0, owner, EvictionConfig(eviction.eviction_policy, eviction.trigger_watermark, eviction.eviction_ratio)
    )
    controller = L2EvictionController([state])
    tier.on_stored.append(lambda keys: owner.note_stored(keys, OBJECT_BYTES))
    tier.on_used.append(owner.note_used)
    tier.on_deleted.append(lambda keys: owner.note_deleted(keys, OBJECT_BYTES))

    def tick(t_ns: int) -> bool:
        tier.expire(t_ns)
        before = len(tier.objects)
        controller._check_and_evict(state)
        return len(tier.objects) != before

    tier.before_use = Ticks(tick_ns, tick_ns, tick).catch_up
    return owner
