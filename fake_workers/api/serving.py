"""Groups of workers in one process: each lock-step group is an engine, each of its ranks an address with an API.

    python -m fake_workers.api.serving SPEC.json

The specification is `ServeSpec` as JSON. The process ends with 2 where it cannot begin (one line says why), and with 0
after SIGTERM or SIGINT.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

import uvicorn
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fake_workers.api.app import make_app
from fake_workers.api.event_socket import EventSocket
from fake_workers.api.kv_events import topic
from fake_workers.api.live_engine import LiveEngine, Stream
from fake_workers.api.lmcache_connector import LmcacheConnector
from fake_workers.api.paced_clock import PacedClock
from fake_workers.api.remote_prefill import RemotePrefill
from fake_workers.api.server_metrics import ServerMetrics
from fake_workers.api.tiers import Tiers
from fake_workers.api.tokenizer import load_tokenizer
from fake_workers.api.worker import Worker, WorkerSettings
from fake_workers.engine.connector import Connector
from fake_workers.engine.events import KvEvent
from fake_workers.engine.request import EngineRequest
from fake_workers.engine.scheduler import SchedulerConfig
from fake_workers.errors import HarnessError, InputError
from fake_workers.pricing.calibration import Calibration
from fake_workers.pricing.node_price import ProfilePrice
from fake_workers.pricing.profile import StepProfile
from fake_workers.pricing.registry import load_profile

_BACKLOG = 2048
_FLUSH_S = 0.5
_KEEP_ALIVE_S = 75


class Place(BaseModel):
    """One worker's name and address."""

    model_config = ConfigDict(extra="forbid")
    name: str
    host: str
    port: int
    address: str | None = None
    """By which the router knows it, where it listens on all of a container's addresses."""

    @property
    def published(self) -> str:
        """Its address for others."""
        return self.address or self.host


class Link(BaseModel):
    """How KV crosses from prefill to decode workers."""

    model_config = ConfigDict(extra="forbid")
    gbytes_per_s: float = Field(gt=0)
    latency_ms: float = Field(0.0, ge=0)


class LmcacheServer(BaseModel):
    """LMCache's server process below the workers, and the link between its memory and each GPU."""

    model_config = ConfigDict(extra="forbid")
    url: str
    gbytes_per_s: float = Field(gt=0)


class ServeSpec(BaseModel):
    """What a process serves."""

    model_config = ConfigDict(extra="forbid")
    profile: str
    model: str
    engine: dict[str, Any]
    """SchedulerConfig's fields."""
    groups: list[list[Place]]
    calibration: dict[str, float] | None = None
    speed: float = 1.0
    tokenizer: str | None = None
    mean_output_tokens: int = 256
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    enable_prompt_tokens_details: bool = True
    dev_mode: bool = True
    events_port: int | None = None
    replay_port: int | None = None
    events_wire: str = "map"
    kv_link: Link | None = None
    lmcache: LmcacheServer | None = None
    records: str | None = None
    """A file that gets one JSON line per sequence."""


class Recorder:
    """One line per sequence that has ended. A full disk ends the recording, never the service."""

    def __init__(self, path: Path | None) -> None:
        self._file: IO[str] | None = None
        self.lost = 0
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8", buffering=1 << 16)

    def write(self, worker: Worker, stream: Stream) -> None:
        """A sequence has ended."""
        request = stream.request
        line = {
            "worker": worker.settings.name,
            "id": request.request_id,
            "arrival_ns": request.arrival_ns,
            "admitted_ns": request.admitted_ns,
            "first_token_ns": request.first_token_ns,
            "finish_ns": request.finish_ns,
            "prompt_tokens": request.prompt_tokens,
            "cached_tokens": request.hit_tokens,
            "external_tokens": stream.external_tokens,
            **({"external_by_tier": request.external_by_tier} if request.external_by_tier else {}),
            "output_tokens": stream.ready,
            "preemptions": request.preemptions,
            "reason": stream.reason,
        }
        self._do(lambda file: file.write(json.dumps(line) + "\n"))

    def flush(self) -> None:
        """Bring what was written to the disk."""
        self._do(lambda file: file.flush())

    def close(self) -> None:
        """Flush and close."""
        self.flush()
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def _do(self, action: Any) -> None:
        if self._file is None:
            self.lost += 1
            return
        try:
            action(self._file)
        except OSError as error:
            print(f"warning: requests are no longer recorded ({error})", file=sys.stderr, flush=True)
            self._file = None
            self.lost += 1


class _Server(uvicorn.Server):
    """Several share one loop, so none of them may take the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Group:
    """One engine, its workers and their sockets."""

    def __init__(
        self,
        spec: ServeSpec,
        profile: StepProfile,
        config: SchedulerConfig,
        number: int,
        clock: PacedClock,
        tiers: Tiers | None = None,
    ) -> None:
        places = spec.groups[number]
        self.sockets = [_listen(place) for place in places]
        self.engine_config = config
        info = _cache_info(config)
        metrics = [
            ServerMetrics(model=spec.model, engine=0, max_model_len=config.max_model_len, cache_info=info, max_lora=8)
            for _ in places
        ]
        self.workers: list[Worker] = []
        own = self._remote_prefill(spec, profile) or self._lmcache(spec, profile, places[0].name)
        self.lmcache = own if isinstance(own, LmcacheConnector) else None
        connector: Connector | None = tiers.connector(number) if tiers is not None else own
        source = "external_unspecified" if self.lmcache is not None else "p2p"
        self.engine = LiveEngine(
            ProfilePrice(profile),
            config,
            metrics,
            clock,
            keep_events=spec.events_port is not None,
            connector=connector,
            connector_options=tiers.options if tiers is not None else None,
            names=tiers.names if tiers is not None else None,
            hit_source=tiers.hit_source if tiers is not None else source,
        )
        if tiers is not None:
            tiers.attach(self.engine)
            self.engine.below = partial(tiers.said, number)
        elif own is not None:
            own.attach(self.engine.node)
        tokenizer = load_tokenizer(spec.tokenizer)
        for rank, (place, one) in enumerate(zip(places, metrics, strict=True)):
            events = f"tcp://{place.host}:{spec.events_port}" if spec.events_port else ""
            replay = f"tcp://{place.host}:{spec.replay_port}" if spec.events_port and spec.replay_port else ""
            settings = WorkerSettings(
                name=place.name,
                model=spec.model,
                host=place.published,
                port=place.port,
                rank=rank,
                mean_output_tokens=spec.mean_output_tokens,
                enable_prompt_tokens_details=spec.enable_prompt_tokens_details,
                max_num_queued_reqs=spec.max_num_queued_reqs,
                max_num_queued_tokens=spec.max_num_queued_tokens,
                dev_mode=spec.dev_mode,
                tp_size=profile.layout.tp,
                events_endpoint=events,
                replay_endpoint=replay,
            )
            self.workers.append(Worker(settings, self.engine, one, tokenizer))
            if tiers is not None:
                self.workers[-1].more_metrics = tiers.metrics
                self.workers[-1].tiers_account = tiers.account
            elif self.lmcache is not None:
                self.workers[-1].more_metrics = self.lmcache.metrics
        self.events: list[EventSocket] = []
        if spec.events_port is not None:
            form: Any = spec.events_wire
            for rank, worker in enumerate(self.workers):
                place = places[rank]
                label = topic(place.published, place.port, spec.model)
                settings = worker.settings
                self.events.append(
                    EventSocket(
                        settings.events_endpoint,
                        settings.replay_endpoint or None,
                        label,
                        0,
                        self.engine.names[rank],
                        form,
                    )
                )
            self.engine.on_events = self._publish

    def _remote_prefill(self, spec: ServeSpec, profile: StepProfile) -> RemotePrefill | None:
        if spec.kv_link is None:
            return None
        return RemotePrefill(
            lambda rank: self.workers[rank].remote_prefills,
            lambda t_ns, action: self.engine.call_at(t_ns, action),
            profile.kv_bytes_per_token,
            spec.kv_link.gbytes_per_s * 1e9,
            round(spec.kv_link.latency_ms * 1e6),
        )

    def _lmcache(self, spec: ServeSpec, profile: StepProfile, name: str) -> LmcacheConnector | None:
        if spec.lmcache is None:
            return None

        def prompt_of(rank: int, request: EngineRequest) -> tuple[Sequence[int], str]:
            stream = self.engine.stream(rank, request)
            return stream.prompt, stream.salt

        return LmcacheConnector(
            spec.lmcache.url,
            name,
            spec.model,
            profile.kv_bytes_per_token,
            self.engine_config.block_tokens,
            spec.lmcache.gbytes_per_s * 1e9 * profile.layout.tp,
            prompt_of,
            lambda t_ns, action: self.engine.call_at(t_ns, action),
            lambda action: self.engine.tell(action),
        )

    def _publish(self, rank: int, events: list[KvEvent]) -> None:
        self.events[rank].publish(events)


Below = Callable[[PacedClock], Tiers]
"""Builds the tiers of a process on its clock."""


async def serve(spec: ServeSpec, stop: asyncio.Event | None = None, below: Below | None = None) -> None:
    """Serve until `stop` is set, or a signal comes."""
    profile = load_profile(spec.profile)
    if spec.calibration:
        profile = profile.calibrated(Calibration.of(**spec.calibration))  # type: ignore[arg-type]
    config = SchedulerConfig(**spec.engine)
    if spec.kv_link is not None and spec.lmcache is not None:
        raise InputError("kv_link", "and a server of LMCache do not go together", "leave one of them out")
    recorder = Recorder(Path(spec.records) if spec.records else None)
    clock = PacedClock(spec.speed)
    tiers = below(clock) if below is not None else None
    groups = [Group(spec, profile, config, number, clock, tiers) for number in range(len(spec.groups))]
    clock.on_failure = partial(_fail, groups)
    clock.start()
    for group in groups:
        if group.lmcache is not None:
            await group.lmcache.start()
    servers: list[tuple[_Server, socket.socket]] = []
    for group in groups:
        workers = group.workers
        group.engine.on_end = lambda stream, workers=workers: recorder.write(workers[stream.rank], stream)  # type: ignore[misc]
        for worker, listener in zip(group.workers, group.sockets, strict=True):
            server = _Server(
                uvicorn.Config(
                    make_app(worker),
                    log_level="warning",
                    access_log=False,
                    lifespan="off",
                    timeout_keep_alive=_KEEP_ALIVE_S,
                    timeout_graceful_shutdown=1,
                    server_header=True,
                )
            )
            servers.append((server, listener))
    stop = stop or _on_signals()
    tasks = [asyncio.create_task(server.serve(sockets=[listener])) for server, listener in servers]
    helpers = [asyncio.create_task(socket_.serve_replay()) for group in groups for socket_ in group.events]
    helpers.append(asyncio.create_task(_flush(recorder)))
    ended = asyncio.create_task(stop.wait())
    await asyncio.wait([ended, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for group in groups:
        for worker in group.workers:
            worker.draining = True
        group.engine.abort_all()
    for server, _ in servers:
        server.should_exit = True
    await asyncio.gather(*tasks, return_exceptions=True)
    for helper in [*helpers, ended]:
        helper.cancel()
    await asyncio.gather(*helpers, ended, return_exceptions=True)
    for group in groups:
        if group.lmcache is not None:
            await group.lmcache.close()
    clock.close()
    if tiers is not None:
        tiers.close()
    for group in groups:
        for socket_ in group.events:
            socket_.close()
    recorder.close()


def _fail(groups: list[Group], error: BaseException) -> None:
    """What lies below the engines has failed: as with vLLM, no engine of the process goes on."""
    traceback.print_exception(error, file=sys.stderr)
    for group in groups:
        group.engine.die(f"{type(error).__name__}: {error}")


def _on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def _flush(recorder: Recorder) -> None:
    while True:
        await asyncio.sleep(_FLUSH_S)
        recorder.flush()


def _listen(place: Place) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((place.host, place.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        where = f"worker {place.name} at {place.host}:{place.port}"
        raise InputError(
            where, f"cannot listen ({error.strerror})", "stop what listens there, or choose another"
        ) from None
    return listener


def _cache_info(config: SchedulerConfig) -> dict[str, str]:
    """Labels of vllm:cache_config_info: the fields of CacheConfig that a simulated engine has."""
    return {
        "block_size": str(config.block_tokens),
        "cache_dtype": "auto",
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "gpu_memory_utilization": "0.92",
        "hash_block_size": str(config.block_tokens),
        "is_attention_free": "False",
        "kv_cache_size_tokens": str((config.num_gpu_blocks - 1) * config.block_tokens),
        "num_cpu_blocks": "None",
        "num_gpu_blocks": str(config.num_gpu_blocks),
        "num_gpu_blocks_override": "None",
        "prefix_caching_hash_algo": "sha256",
        "sliding_window": "None",
        "user_specified_block_size": "True",
    }


def run(spec: ServeSpec, below: Below | None = None) -> None:
    """Serve in an event loop of this process's own."""
    with contextlib.suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    asyncio.run(serve(spec, below=below))


Spec = TypeVar("Spec", bound=BaseModel)


def begin(arguments: list[str], program: str, model: type[Spec], serve_it: Callable[[Spec], None]) -> int:
    """A process that serves what a specification file says; returns its exit code."""
    try:
        if len(arguments) != 1:
            raise InputError(program, "takes one argument", "give the path of a specification")
        path = Path(arguments[0])
        try:
            spec = model.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValidationError) as error:
            raise InputError(str(path), f"is no specification ({error})", "write one with the harness") from None
        serve_it(spec)
    except HarnessError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def main(arguments: list[str]) -> int:
    """Entry point of the process."""
    return begin(arguments, "serving", ServeSpec, run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
