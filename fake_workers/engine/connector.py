"""What an engine needs below it to load and save KV: vLLM 0.32's KV connector interface, and its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from fake_workers.engine.request import EngineRequest

if TYPE_CHECKING:
    from fake_workers.engine.scheduler import Batch


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """vLLM's kv_transfer_config, under its names."""

    kv_role: str = "kv_both"
    kv_load_failure_policy: str = "fail"
    """"fail": the request ends in an error; "recompute": what did not arrive is computed."""
    requires_kv_delivery: bool | None = None
    """Whether tokens under way at a preemption are thrown away; None: as vLLM's base class, for producers."""

    @property
    def consumer(self) -> bool:
        """is_kv_consumer."""
        return self.kv_role in ("kv_consumer", "kv_both")

    @property
    def drops_stale(self) -> bool:
        """requires_kv_delivery, resolved."""
        if self.requires_kv_delivery is not None:
            return self.requires_kv_delivery
        return self.kv_role in ("kv_producer", "kv_both")


class Connector(Protocol):
    """What lies below the engines of one node; `rank` says which of them calls.

    All calls are made at the node's now, in the order of vLLM's. A connector may answer from inside a call.
    """

    def lookup(self, rank: int, request: EngineRequest, local_hit_tokens: int) -> tuple[int, bool] | None:
        """At each attempt of admission (get_num_new_matched_tokens): tokens beyond the local hit, and whether they are
        loaded while the request is held out of the batch (else within the step that admits it).

        None: not known yet; `Node.lookup_ready` tells when to ask again. An answer stands until then: in a leap nobody
        asks. Local hit plus external tokens never exceed the tokens of the request, and with a load inside the step
        at least one is left to compute.
        """

    def start_load(self, rank: int, request: EngineRequest, local_hit_tokens: int, external_tokens: int) -> None:
        """The request was admitted, or has the blocks that its load fills (update_state_after_alloc of a lookup).

        A load that holds its request ends with `Node.load_ended`. Called with 0 where nothing is to be loaded.
        """

    def save(self, rank: int, request: EngineRequest, computed_tokens: int) -> None:
        """A step that computed prompt tokens has ended (wait_for_save): the first `computed_tokens` are in the GPU."""

    def preempted(self, rank: int, request: EngineRequest) -> None:
        """The request lost its blocks; it will be looked up anew."""

    def finish(self, rank: int, request: EngineRequest) -> bool:
        """The request ended or was aborted (request_finished). True: its blocks stay until `Node.blocks_released`.

        If its load is still under way its blocks stay anyway, until `Node.load_ended`; then answer False.
        """


@runtime_checkable
class StreamsLayers(Protocol):
    """A connector that sends a prompt's KV while it is computed hears of every step that computes some of it."""

    def step_begins(self, rank: int, request: EngineRequest, computed_tokens: int, duration_ns: int) -> None:
        """A step begins after which the first `computed_tokens` of a prompt will be in the GPU."""


class EngineSide(Protocol):
    """What a connector tells its node (see Node)."""

    def load_ended(
        self,
        rank: int,
        request: EngineRequest,
        tokens: int | None = None,
        failed: bool = False,
        by_tier: dict[str, int] | None = None,
    ) -> None:
        """A load ends now."""

    def blocks_released(self, rank: int, request: EngineRequest) -> None:
        """The blocks of a finished request may go."""

    def lookup_ready(self) -> None:
        """A lookup would answer something else now."""


@runtime_checkable
class FollowsSteps(Protocol):
    """What a connector may have beside `Connector`, if it decides by the engine's schedules (build_connector_meta)."""

    def scheduled(self, rank: int, batch: Batch) -> None:
        """A schedule() of this engine has ended."""

    def executed(self, rank: int, batch: Batch) -> None:
        """A batch has been executed; after its saves, before ends and aborts of that boundary."""

    def unsettled(self, rank: int) -> bool:
        """Whether the coming schedules matter to the connector, so that they must not be leapt over."""


@dataclass(slots=True)
class Transfer:
    """State of one request towards the connector."""

    loading: bool = False
    """WAITING_FOR_REMOTE_KVS."""
    arrived: bool = False
    """The load has ended and update has seen it (finished_recving_kv_req_ids)."""
    broken: bool = False
    """The load has failed and what is missing will be computed (failed_recving_kv_req_ids)."""
    unanswered: bool = False
    """The last lookup answered None."""
    deferred: bool = False
    """In vLLM's deferred_waiting: was passed over in the line."""
    drop_stale: bool = False
    """drop_stale_output: tokens under way at the last preemption do not count."""
    last_step: int = 0
    """last_sched_seq: the last step that may write to its blocks."""
    local_tokens: int = 0
    external_tokens: int = 0
    """Hits of the load under way."""
    started_ns: int = 0
