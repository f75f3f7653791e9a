"""KV of prompts between the end of prefill and the decode worker's cache: held, leased, moved, lost.

A `Handoff` is one prompt's KV. The prefill side offers it when its request has ended (`offer`), the decode side asks
for it when it has the blocks (`pull`); the transfer begins when both have happened. It is a group of flows on the
fabric, one per pair of ranks. As in vLLM 0.32's NIXL connector the prefill worker keeps the blocks until they have been
read or the lease runs out; a decode worker that has the request renews the lease.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.cache.transfers import TransferGroup, Wires
from harness.clock import VirtualClock, to_ns
from harness.disagg.config import KvTransferConfig
from harness.disagg.layout import KvShape, RankRead, reads
from harness.fabric.flows import ENDS, Fabric
from harness.fabric.goodput import Goodput, TransferCost, load_cost
from harness.fabric.meter import NS_PER_S
from harness.fabric.share import Path
from harness.fabric.topology import Topology


@dataclass(frozen=True, slots=True)
class Side:
    """GPUs of one endpoint in the topology, by tensor-parallel rank."""

    gpus: tuple[str, ...]


@dataclass(slots=True, eq=False)
class Handoff:
    """One prompt's KV on its way. `blocks` are those that the decode side lacks."""

    key: str
    source: Side
    target: Side | None = None
    offered: bool = False
    expected: bool = False
    """A decode worker has the request and renews the lease."""
    wanted: bool = False
    gone: bool = False
    """Expired, dropped, or the prefill request came to nothing: there is nothing to read."""
    blocks: int = 0
    tokens: int = 0
    bytes: int = 0
    sent_bytes: int = 0
    started_ns: int | None = None
    ended_ns: int | None = None
    release: Callable[[], None] | None = None
    """Frees the prefill side's blocks."""
    arrived: Callable[[bool], None] | None = None
    """Tells the decode side: True, all is there."""
    group: TransferGroup | None = None
    under_way: bool = False
    lease: int | None = None

    # layer by layer: positions in blocks of the prompt
    skip: int = 0
    """The decode side has the blocks before this one."""
    sent: int = 0
    """Blocks up to here are on the wires or there."""
    ready: int = 0
    """Blocks up to here are computed."""
    chunk: tuple[int, int] | None = None
    """What the running step computes: (blocks up to here, its end in ns)."""
    open_parts: int = 0


@dataclass(slots=True)
class HandoffTotals:
    """Account of a run."""

    transfers: int = 0
    bytes: int = 0
    tokens: int = 0
    failed: int = 0
    expired: int = 0
    dropped: int = 0


class KvExchange:
    """All handoffs of a run."""

    def __init__(
        self,
        clock: VirtualClock,
        config: KvTransferConfig,
        shape: KvShape,
        block_tokens: int,
        fabric: Fabric | None,
        topology: Topology | None,
        seed: int = 1,
    ) -> None:
        """`fabric` None: KV moves in no time (for tests; experiments always have a fabric)."""
        self.clock, self.config, self.shape, self.block_tokens = clock, config, shape, block_tokens
        self.topology = topology
        self.totals = HandoffTotals()
        self.open: dict[str, Handoff] = {}
        """Handoffs that may still be read, by key."""
        self._wires = Wires(fabric, lambda: clock.now_ns)
        self._random = random.Random(f"kv-transfer/{seed}")
        self._cost = load_cost(config.cost)
        self._lease_ns = to_ns(config.lease_s)
        self.layers = max(1, shape.regions // 2 if shape.heads else shape.regions)

    # ------------------------------------------------------------------ the life of a handoff

    def begin(self, key: str, source: Side) -> Handoff:
        """A prefill request is on its way to `source`."""
        handoff = self.open[key] = Handoff(key, source)
        return handoff

    def offer(self, handoff: Handoff, release: Callable[[], None]) -> None:
        """The prompt is computed; its blocks stay until `release`, which may be called at once."""
        handoff.offered, handoff.release = True, release
        if handoff.gone:
            self._free(handoff)
            return
        handoff.lease = self.clock.call_later(self._lease_ns, self._lease_ends, handoff)
        if self.config.mode == "layerwise":
            self._check_all_there(handoff)
        elif handoff.wanted:
            self._move(handoff)

    def come_to_nothing(self, handoff: Handoff) -> None:
        """The prefill request ended without its KV: what waits for it fails."""
        self._lose(handoff)

    def expect(self, handoff: Handoff, target: Side) -> None:
        """The decode worker `target` has the request."""
        handoff.expected, handoff.target = True, target

    def pull(
        self, handoff: Handoff, blocks: int, tokens: int, arrived: Callable[[bool], None], first_block: int = 0
    ) -> None:
        """The decode side has blocks for `tokens` tokens in `blocks` blocks from `first_block` of the prompt on.

        `arrived` follows, never from inside.
        """
        handoff.skip = handoff.sent = first_block
        handoff.wanted, handoff.blocks, handoff.tokens, handoff.arrived = True, blocks, tokens, arrived
        handoff.bytes = self.bytes_of(handoff, blocks)
        if handoff.gone:
            self.clock.call_at(self.clock.now_ns, self._report, handoff, False)
        elif self.config.mode == "layerwise":
            self._catch_up(handoff)
        elif handoff.offered:
            self._move(handoff)

    def drop(self, handoff: Handoff) -> None:
        """Nobody will read it (the decode request went away before it had blocks, or found all in its own cache)."""
        if handoff.under_way:
            return
        if not handoff.gone:
            self.totals.dropped += 1
        handoff.gone = True
        self._close(handoff)
        if handoff.offered:
            self._free(handoff)

    # ------------------------------------------------------------------ moving

    def bytes_of(self, handoff: Handoff, blocks: int) -> int:
        """Bytes of so many blocks over all pairs of ranks."""
        return sum(read.bytes_per_token for read in self._reads(handoff)) * blocks * self.block_tokens

    def _reads(self, handoff: Handoff) -> Sequence[RankRead]:
        assert handoff.target is not None
        return reads(self.shape, len(handoff.source.gpus), len(handoff.target.gpus))

    def _move(self, handoff: Handoff) -> None:
        handoff.under_way = True
        handoff.started_ns = self.clock.now_ns
        parts = self._parts(handoff, handoff.blocks)

        # a move that takes no time ends inside this call, and an engine must not be entered from inside another's call
        def done() -> None:
            self.clock.call_at(self.clock.now_ns, self._moved, handoff)

        handoff.group = self._wires.send(parts, self._cost, done)

    def _parts(self, handoff: Handoff, blocks: int) -> list[tuple[Path, int, int]]:
        assert handoff.target is not None
        topology = self.topology
        parts: list[tuple[Path, int, int]] = []
        for read in self._reads(handoff):
            path: Path = ()
            if topology is not None:
                path = topology.path(handoff.source.gpus[read.source], handoff.target.gpus[read.target])
            nbytes = read.bytes_per_token * blocks * self.block_tokens
            parts.append((path, nbytes, blocks * self.shape.regions))
        return parts

    # ------------------------------------------------------------------ layer by layer

    def computing(self, handoff: Handoff, upto: int, duration_ns: int) -> None:
        """A step of the prefill side begins that computes the prompt's blocks up to `upto`."""
        if handoff.gone:
            return
        handoff.chunk = (upto, self.clock.now_ns + duration_ns)
        if handoff.wanted:
            self._stream(handoff)
        self.clock.call_later(duration_ns, self._computed, handoff, upto, rank=ENDS)

    def _stream(self, handoff: Handoff) -> None:
        """All layers but the last of what the running step computes, no faster than it computes them."""
        assert handoff.chunk is not None
        upto, end_ns = handoff.chunk
        blocks = upto - max(handoff.sent, handoff.ready)
        if blocks > 0 and self.layers > 1:
            self._send_part(handoff, blocks, self.layers - 1, max(1, end_ns - self.clock.now_ns))
            self.clock.call_at(end_ns, self._send_part, handoff, blocks, 1, 0, rank=ENDS)
            handoff.open_parts += 1  # the last layer's, which is still to come
            handoff.sent = upto

    def _computed(self, handoff: Handoff, upto: int) -> None:
        """The step has ended."""
        handoff.ready, handoff.chunk = max(handoff.ready, upto), None
        if handoff.wanted and not handoff.gone:
            self._send_ready(handoff)

    def _catch_up(self, handoff: Handoff) -> None:
        """The decode side has its blocks: what is computed goes at once, what is being computed as it comes."""
        self._send_ready(handoff)
        if handoff.chunk is not None:
            self._stream(handoff)
        self._check_all_there(handoff)

    def _send_ready(self, handoff: Handoff) -> None:
        if handoff.ready > handoff.sent:
            self._send_part(handoff, handoff.ready - handoff.sent, self.layers, 0)
            handoff.sent = handoff.ready

    def _send_part(self, handoff: Handoff, blocks: int, layers: int, at_least_ns: int) -> None:
        """So many layers of so many blocks, over all pairs of ranks, in no less than that time."""
        if at_least_ns == 0 and layers == 1 and self.layers > 1:
            handoff.open_parts -= 1  # counted when the step began
        if handoff.started_ns is None:
            handoff.started_ns = self.clock.now_ns
        handoff.under_way = True
        parts = []
        for path, nbytes, descriptors in self._parts(handoff, blocks):
            share = nbytes * layers // self.layers if layers < self.layers else nbytes
            if layers == 1 and self.layers > 1:
                share = nbytes - nbytes * (self.layers - 1) // self.layers
            parts.append((path, share, max(1, descriptors * layers // self.layers)))
        handoff.open_parts += 1

        def done() -> None:
            self.clock.call_at(self.clock.now_ns, self._part_done, handoff)

        cost = self._cost
        if at_least_ns:
            slowest = max(share for _, share, _ in parts)
            rate = max(1, slowest * NS_PER_S // at_least_ns)
            cost = TransferCost(cost.setup_ns, cost.per_descriptor_ns, Goodput("step", "transfer", (1,), (rate,), ""))
        self._wires.send(parts, cost, done)

    def _part_done(self, handoff: Handoff) -> None:
        handoff.open_parts -= 1
        self._check_all_there(handoff)

    def _check_all_there(self, handoff: Handoff) -> None:
        if handoff.wanted and handoff.offered and not handoff.open_parts and handoff.ended_ns is None:
            if handoff.ready > handoff.sent:
                self._send_ready(handoff)
            elif handoff.under_way:
                self._moved(handoff)

    # ------------------------------------------------------------------ the end

    def _moved(self, handoff: Handoff) -> None:
        handoff.under_way = False
        handoff.ended_ns = self.clock.now_ns
        self.totals.transfers += 1
        self.totals.bytes += handoff.bytes
        self.totals.tokens += handoff.tokens
        good = not handoff.gone and self._random.random() >= self.config.failure_share
        if good:
            self._close(handoff)
            self._free(handoff)
        self._report(handoff, good)

    def _report(self, handoff: Handoff, good: bool) -> None:
        self.totals.failed += not good
        arrived, handoff.arrived = handoff.arrived, None
        # after a failure nobody tells the prefill worker: its lease has to run out
        handoff.expected = False
        if arrived is not None:
            arrived(good)

    def _lease_ends(self, handoff: Handoff) -> None:
        handoff.lease = None
        if self.config.heartbeat and handoff.expected:
            handoff.lease = self.clock.call_later(self._lease_ns, self._lease_ends, handoff)
            return
        self.totals.expired += 1
        handoff.gone = True
        self._close(handoff)
        self._free(handoff)

    def _lose(self, handoff: Handoff) -> None:
        handoff.gone = True
        self._close(handoff)
        if handoff.wanted and handoff.arrived is not None and not handoff.under_way:
            self.clock.call_at(self.clock.now_ns, self._report, handoff, False)

    def _free(self, handoff: Handoff) -> None:
        if handoff.lease is not None:
            self.clock.cancel(handoff.lease)
            handoff.lease = None
        release, handoff.release = handoff.release, None
        if release is not None:
            release()

    def _close(self, handoff: Handoff) -> None:
        self.open.pop(handoff.key, None)
