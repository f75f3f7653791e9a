"""What stands between a client and the GPU, in virtual time.

On the way in: send, gateway, router, API server, tokenising, engine input. On the way out: detokenising and streaming.

Every part is a named number of its own with the measurement that it comes from (docs/front-end.md). All are zero unless
the experiment says otherwise; `parts: measured` takes the values below, any field sets its own.

Tokenising is done by a fixed number of threads, so a request may wait for one: that wait is what happens when a
router's tokenizer or an API server saturates. The other parts are short and take their own time only.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from heapq import heapify, heapreplace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Time = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Workers = Annotated[int, Field(ge=0, le=10_000)]

_OWN = "benchmarks/front_end.py, CPU time on one core of an AMD EPYC server"
_VLLM = "vLLM 0.32's own code on one CPU core"
_SEAM = "Envoy and the real router on loopback against neither, sequential p50 6.9 against 5.4 ms"


@dataclass(frozen=True, slots=True)
class Part:
    """A measured value in the unit of its field, and where it was measured."""

    value: float
    source: str


MEASURED: dict[str, Part] = {
    "client_ms": Part(0.6, f"aiohttp, request and answer of one chunk: {_OWN}"),
    "gateway_ms": Part(0.6, f"{_SEAM}, less the router's 0.9 ms"),
    "router_ms": Part(0.9, "real router v0.10.0, small body, headers to decision, p50"),
    "router_us_per_token": Part(0.09, "real router v0.10.0, 878 kB of text (220,000 tokens): 20 ms of its CPU"),
    "router_tokenise_us_per_token": Part(0.0, "only routers that tokenise text do: set it as tokenise_us_per_token"),
    "router_tokenise_workers": Part(0, "no limit: how many replicas is the operator's choice"),
    "api_server_ms": Part(1.0, f"FastAPI on uvicorn with vLLM's own request class: {_OWN}"),
    "tokenise_us_per_token": Part(
        2.1,
        "101,615 tokens in 220 ms, 43,359 in 88, 10,840 in 20 (github.com/andyluo7/"
        f"cpu-gpu-codesign-agentic-inference); 1.6 to 2.9 for prose, 1.2 to 3.5 for random tokens: {_OWN}",
    ),
    "tokenise_workers": Part(1, "vLLM: one tokenizer thread per API server"),
    "engine_input_ms": Part(0.3, f"add_request and the message to the engine's process: {_VLLM}"),
    "engine_input_us_per_token": Part(0.22, f"block hashes and token lists, 4,000 to 219,000 tokens: {_VLLM}"),
    "scheduler_step_us": Part(
        11.0, f"only without asynchronous scheduling; schedule() and update_from_output(): {_VLLM}"
    ),
    "scheduler_request_us": Part(17.0, f"the same, per request in the batch: {_VLLM}"),
    "detokenise_us_per_token": Part(0.9, f"tokenizers' DecodeStream, which vLLM uses: {_OWN}"),
    "stream_us_per_token": Part(
        24.5, f"OutputProcessor 3.3, one chunk of vLLM's response class as JSON in an event stream 21.2: {_OWN}"
    ),
    "output_ms": Part(0.0, "loopback adds less than can be told; a network's delay is the user's to give"),
}
"""Every part's measured value, under its name in the experiment file."""


class FrontEndConfig(BaseModel):
    """What stands around the GPU: each part of a call's time that no kernel accounts for (docs/front-end.md)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    parts: Literal["none", "measured"] = Field(
        "none", description="values of the fields that are not given: zero, or as measured (docs/front-end.md)"
    )
    client_ms: Time | None = Field(None, description="client: from its clock's start to the request on the wire")
    gateway_ms: Time | None = Field(None, description="gateway: one request's hop through the proxy")
    router_ms: Time | None = Field(None, description="router: a decision on a small body")
    router_us_per_token: Time | None = Field(None, description="router: parsing the body, per prompt token")
    router_tokenise_us_per_token: Time | None = Field(
        None, description="router: tokenising the prompt, per token (precise prefix scoring of text)"
    )
    router_tokenise_workers: Workers | None = Field(
        None, description="tokenizer threads of the router, all replicas together; 0: no limit"
    )
    api_server_ms: Time | None = Field(None, description="API server: HTTP, parsing and validating one request")
    tokenise_us_per_token: Time | None = Field(None, description="API server: tokenising the prompt, per token")
    tokenise_workers: Workers | None = Field(None, description="tokenizer threads per endpoint; 0: no limit")
    engine_input_ms: Time | None = Field(None, description="engine: taking in one request")
    engine_input_us_per_token: Time | None = Field(None, description="engine: hashing its blocks, per prompt token")
    scheduler_step_us: Time | None = Field(
        None, description="scheduler: added to every step with async_scheduling: false (else it overlaps the GPU)"
    )
    scheduler_request_us: Time | None = Field(None, description="the same, per request in the batch")
    detokenise_us_per_token: Time | None = Field(None, description="output: text of one token")
    stream_us_per_token: Time | None = Field(None, description="output: one chunk of an event stream, made and sent")
    output_ms: Time | None = Field(None, description="output: from the server to the client's clock")

    def value(self, name: str) -> float:
        """A part's value in the unit of its name."""
        given = getattr(self, name)
        if given is not None:
            return float(given)
        return MEASURED[name].value if self.parts == "measured" else 0.0

    def facts(self) -> dict[str, Any]:
        """Parts that are not zero with their origin, for the report."""
        shown = {}
        for name, part in MEASURED.items():
            value = self.value(name)
            if value:
                source = part.source if getattr(self, name) is None else "set by the experiment"
                shown[name.replace("_", " ")] = f"{value:g} ({source})"
        return shown or {"all parts": "0: a call's time is the router's latency, queueing and the GPU's"}


@dataclass(frozen=True, slots=True)
class FrontEndTimes:
    """The parts in nanoseconds (per token: picoseconds, so that small costs stay exact)."""

    before_router_ns: int
    router_ns: int
    router_ps_per_token: int
    router_tokenise_ps_per_token: int
    router_tokenise_workers: int
    api_server_ns: int
    tokenise_ps_per_token: int
    tokenise_workers: int
    engine_input_ns: int
    engine_input_ps_per_token: int
    output_ns: int
    chunk_ps: int

    @classmethod
    def of(cls, config: FrontEndConfig) -> FrontEndTimes | None:
        """The times of a config; None where all are zero, so that nothing of a run changes."""
        v = config.value
        times = cls(
            before_router_ns=_ns(v("client_ms") + v("gateway_ms")),
            router_ns=_ns(v("router_ms")),
            router_ps_per_token=_ps(v("router_us_per_token")),
            router_tokenise_ps_per_token=_ps(v("router_tokenise_us_per_token")),
            router_tokenise_workers=int(v("router_tokenise_workers")),
            api_server_ns=_ns(v("api_server_ms")),
            tokenise_ps_per_token=_ps(v("tokenise_us_per_token")),
            tokenise_workers=int(v("tokenise_workers")),
            engine_input_ns=_ns(v("engine_input_ms")),
            engine_input_ps_per_token=_ps(v("engine_input_us_per_token")),
            output_ns=_ns(v("output_ms")),
            chunk_ps=_ps(v("detokenise_us_per_token") + v("stream_us_per_token")),
        )
        timed = (f.name for f in fields(cls) if not f.name.endswith("_workers"))
        return times if any(getattr(times, name) for name in timed) else None


def scheduler_ns(config: FrontEndConfig, async_scheduling: bool) -> tuple[int, int]:
    """What the engine's scheduler adds to a step, and to it per request in the batch.

    With asynchronous scheduling the next step is scheduled while the GPU computes, so nothing is added.
    """
    if async_scheduling:
        return 0, 0
    return round(config.value("scheduler_step_us") * 1e3), round(config.value("scheduler_request_us") * 1e3)


class FrontEnd:
    """One run's front end: when a call reaches the router, its engine, and when the client sees what comes back."""

    def __init__(self, times: FrontEndTimes, endpoints: int) -> None:
        self._times = times
        self._router_tokenizer = _Pool(times.router_tokenise_workers)
        self._tokenizers = [_Pool(times.tokenise_workers) for _ in range(endpoints)]

    def reaches_router_ns(self, sent_ns: int, prompt_tokens: int) -> int:
        """When the router has decided on a call sent now. Calls must be given in the order they are sent."""
        t = self._times
        arrived = sent_ns + t.before_router_ns + t.router_ns + prompt_tokens * t.router_ps_per_token // 1000
        return self._router_tokenizer.done_ns(arrived, prompt_tokens * t.router_tokenise_ps_per_token // 1000)

    def reaches_engine_ns(self, routed_ns: int, endpoint: int, prompt_tokens: int) -> int:
        """When the endpoint's scheduler has a call that was routed now. In the order of routing."""
        t = self._times
        work = prompt_tokens * t.tokenise_ps_per_token // 1000
        tokenised = self._tokenizers[endpoint].done_ns(routed_ns + t.api_server_ns, work)
        return tokenised + t.engine_input_ns + prompt_tokens * t.engine_input_ps_per_token // 1000

    def reaches_client_ns(self, step_end_ns: int, running: int) -> int:
        """When the client has a token of a step that ended then.

        The API server makes the chunks of a step's requests one after the other: its own, and on average those of half
        of the `running` others before it.
        """
        t = self._times
        return step_end_ns + t.output_ns + t.chunk_ps * (max(running, 1) + 1) // 2000


class _Pool:
    """Equal workers that take jobs first come, first served; 0 workers: as many as there are jobs."""

    def __init__(self, workers: int) -> None:
        self._free_ns = [0] * workers
        heapify(self._free_ns)

    def done_ns(self, arrival_ns: int, work_ns: int) -> int:
        """When a job that arrives then is done."""
        if not self._free_ns or not work_ns:
            return arrival_ns + work_ns
        done = max(arrival_ns, self._free_ns[0]) + work_ns
        heapreplace(self._free_ns, done)
        return done


def _ns(ms: float) -> int:
    return round(ms * 1e6)


def _ps(us: float) -> int:
    return round(us * 1e6)
