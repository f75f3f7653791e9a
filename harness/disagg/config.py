"""Options of prefill/decode disaggregation: pools of workers by role, and how KV moves between them."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1, le=10_000)]
Positive = Annotated[float, Field(gt=0, le=1e9)]
NonNegative = Annotated[float, Field(ge=0, le=1e9)]
Role = Literal["prefill", "decode", "both"]

NOTATION = re.compile(r"^(?:(\d+)[pP](\d+)[dD]|(\d+):(\d+))$")
"""`8P2D` counts replicas, `3:1` divides nodes; prefill first."""


class Strict(BaseModel):
    """Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class KvTransferConfig(Strict):
    """The way of a prompt's KV from the prefill worker to the decode worker (vLLM's NIXL connector, the sidecar)."""

    protocol: Literal["nixlv2", "shared-storage", "sglang", "offloading"] = Field(
        "nixlv2",
        description="the sidecar's connector. nixlv2: prefill, then decode, which reads the KV; shared-storage: the "
        "same, KV goes through the shared cache tier; sglang, offloading: both at once, KV is sent when prefill has it",
    )
    mode: Literal["whole", "layerwise"] = Field(
        "whole",
        description="whole: KV is moved when the whole prompt is computed; layerwise: while it is computed, layer by "
        "layer (needs a protocol that sends both requests at once)",
    )
    cost: str = Field(
        "rdma-nixl-descriptors", description="cost table: a name from harness/fabric/tables or a path (docs/fabric.md)"
    )
    bytes_per_token: Annotated[int, Field(ge=1, le=2**32)] | None = Field(
        None,
        description="bytes of one token's KV that are moved, whole model; null: all that the profile counts (fewer "
        "where layers with a sliding window send its tail only)",
    )
    descriptors_per_block: Annotated[int, Field(ge=1, le=10_000)] | None = Field(
        None, description="descriptors per KV block and decode rank; null: layers of the model times key and value"
    )
    lease_s: Positive = Field(
        30.0,
        description="how long a prefill worker keeps KV that nobody has read (vLLM's kv_lease_duration), seconds",
    )
    heartbeat: bool = Field(
        True,
        description="decode workers renew the lease of requests that wait with them (vLLM 0.32); false: it runs out, "
        "as with VLLM_NIXL_ABORT_REQUEST_TIMEOUT",
    )
    failure_share: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="share of transfers that fail at their end (seeded)"
    )
    load_failure_policy: Literal["fail", "recompute"] = Field(
        "fail",
        description="vLLM's kv_load_failure_policy: the request ends in an error, or the prompt is computed anew",
    )
    sidecar_us: NonNegative = Field(
        0.0,
        description="virtual time of the sidecar between the end of prefill and the request to decode, microseconds",
    )


def parse_notation(text: str) -> tuple[int, int, bool]:
    """(prefill, decode, whether they are replicas); ValueError where it is none of the two forms."""
    match = NOTATION.match(text)
    if match is None:
        raise ValueError(f"{text!r} is neither of the form 8P2D (replicas) nor 3:1 (shares of the nodes)")
    first, second = (int(part) for part in match.groups() if part is not None)
    if not first or not second:
        raise ValueError(f"{text!r} has an empty side")
    return first, second, match.group(1) is not None
