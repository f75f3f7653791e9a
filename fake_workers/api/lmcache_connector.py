"""LMCache's server process below a worker, as LMCacheMPConnector 0.5.6 talks to it.

The server is the real one: it hashes chunks, looks up, locks, stores and evicts, by wall time. KV is not there, so no
byte is copied: a chunk is reserved, and committed when the bytes that it stands for would have crossed the link between
GPU and host memory, one copy after the other in each direction.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from fake_workers.api.exposition import Registry, Series
from fake_workers.api.lmcache_client import LmcacheClient
from fake_workers.engine.node import Node
from fake_workers.engine.request import EngineRequest

TIER = "lmcache"
OBJECT_BYTES = 4096
"""What a chunk takes in the server's memory: its smallest allocation (--l1-align-bytes)."""
_TIMEOUT_S = 5.0
_PING_S = 2.0
_PATIENCE_S = 2.0
"""How long the start and the end of a worker wait for the server."""
_POLL_S = 0.002
_SALT_FORBIDDEN = frozenset("@/\\\x00")

CallAt = Callable[[int, Callable[[], None]], None]
Prompt = tuple[Sequence[int], str]
"""Token ids, and the cache salt."""


@dataclass(slots=True, eq=False)
class _Tracked:
    """A request as LMCacheMPConnector tracks it."""

    session: str
    tokens: list[int]
    salt: str
    asked: bool = False
    hit_chunks: int | None = None
    locked: tuple[int, int] = (0, 0)
    """Chunks whose read locks this request holds."""
    stored_chunks: int = 0
    saves: int = 0
    over: bool = False
    steps: asyncio.Future[None] | None = None
    """The last of the requests to the server, which take their turns."""


@dataclass(slots=True)
class Counts:
    """What the server was asked and gave."""

    asked_tokens: int = 0
    hit_tokens: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    failures: int = 0
    """Loads that the server could not give, and requests without an answer."""


@dataclass(slots=True)
class _Copies:
    """One direction of the link: copies follow each other."""

    ns_per_token: float
    free_ns: int = 0

    def end_ns(self, now_ns: int, tokens: int) -> int:
        """When a copy that is asked for now will have ended."""
        self.free_ns = max(now_ns, self.free_ns) + round(tokens * self.ns_per_token)
        return self.free_ns


@dataclass(slots=True)
class LmcacheConnector:
    """The connector of one engine. `start` runs inside the event loop, before the first request.

    `prompt_of` gives the tokens of a rank's request, `call_at` runs something at an engine time, `tell` runs it
    now, when the engine has been brought up to now, and lets the engine go on.
    """

    url: str
    name: str
    """The worker's."""
    model: str
    kv_bytes_per_token: float
    block_tokens: int
    bytes_per_s: float
    prompt_of: Callable[[int, EngineRequest], Prompt]
    call_at: CallAt
    tell: Callable[[Callable[[], None]], None]
    counts: Counts = field(default_factory=Counts)
    healthy: bool = False
    node: Node = field(init=False)
    chunk_tokens: int = 256
    _client: LmcacheClient = field(init=False)
    _instance: int = field(default_factory=lambda: random.SystemRandom().randrange(1, 1 << 31))
    _known: dict[EngineRequest, _Tracked] = field(default_factory=dict)
    _sessions: int = 0
    _tasks: set[asyncio.Future[None]] = field(default_factory=set)
    _loads: _Copies = field(init=False)
    _saves: _Copies = field(init=False)
    _registry: Registry = field(default_factory=Registry)
    _samples: tuple[Series, dict[str, Series]] = field(init=False)

    def __post_init__(self) -> None:
        labels = {"tier": TIER, "node": self.name}
        clock = self._registry.family("sim_clock_seconds", "The engine's time.", "counter").series()
        names = ("asked_tokens", "hit_tokens", "read_bytes", "written_bytes", "failures")
        text = "LMCache's server, as this worker sees it"
        self._samples = (
            clock,
            {
                name: self._registry.family(f"sim_tier_{name}", f"{text}: {name}.", "counter").series(labels)
                for name in names
            },
        )
        self._loads = _Copies(self.kv_bytes_per_token / self.bytes_per_s * 1e9)
        self._saves = _Copies(self.kv_bytes_per_token / self.bytes_per_s * 1e9)

    def attach(self, node: Node) -> None:
        """The node whose requests are held."""
        self.node = node

    async def start(self) -> None:
        """Connect; while no server answers, the worker serves without it, as vLLM does."""
        self._client = LmcacheClient(self.url, _TIMEOUT_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                await self._greet()
        self._keep(self._stay_in_touch())

    async def close(self) -> None:
        """Say good-bye."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                await self._call("unregister_kv_cache_engine_driven_context", self._instance)
        await self._client.close()

    def metrics(self) -> bytes:
        """What the server gave this worker, as the tiers of `harness live` show it."""
        clock, samples = self._samples
        clock.set(self.node.now_ns / 1e9)
        for name, sample in samples.items():
            sample.set(getattr(self.counts, name))
        return self._registry.render()

    # ------------------------------------------------------------------ called by the engine

    def lookup(self, rank: int, request: EngineRequest, local_hit_tokens: int) -> tuple[int, bool] | None:
        """See Connector."""
        tracked = self._known.get(request)
        if tracked is None:
            if not self.healthy:
                return 0, False
            tracked = self._track(rank, request)
        if not tracked.asked:
            tracked.asked = True
            self._step(tracked, self._ask(tracked))
        if tracked.hit_chunks is None:
            return None
        hit = tracked.hit_chunks * self.chunk_tokens
        more = max(0, hit - local_hit_tokens)
        if more and hit == request.prompt_tokens:
            more -= 1  # the last token of a full hit is computed, so that there is something to sample from
        return more, True

    def start_load(self, rank: int, request: EngineRequest, local_hit_tokens: int, external_tokens: int) -> None:
        """See Connector: locks of chunks that the GPU holds go back; the others are read and released at the end."""
        tracked = self._known.get(request)
        if tracked is None:
            return
        hit = tracked.hit_chunks or 0
        first = min(hit, local_hit_tokens // self.chunk_tokens) if external_tokens else hit
        self._free(tracked, first)
        if not external_tokens:
            return
        tokens = hit * self.chunk_tokens - local_hit_tokens
        read: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        tracked.locked = (hit, hit)
        answer: list[bool] = []

        async def load() -> None:
            key = self._key(tracked, first, hit, worker=True)
            found = await self._call("prepare_retrieve", key, self._instance)
            answer.append(bool(found and found["success"]))
            await read
            if answer[0]:
                await self._call("commit_retrieve", key, self._instance)
            self.tell(lambda: self._loaded(rank, request, external_tokens, tokens, answer[0]))

        self._copy(self._loads, tokens, read)
        self._step(tracked, load())

    def save(self, rank: int, request: EngineRequest, computed_tokens: int) -> None:
        """See Connector: whole new chunks of the prompt."""
        tracked = self._known.get(request)
        if tracked is None:
            return
        ready = min(computed_tokens, request.prompt_tokens) // self.chunk_tokens
        first = tracked.stored_chunks
        if ready <= first:
            return
        tracked.stored_chunks = ready
        tracked.saves += 1
        tokens = (ready - first) * self.chunk_tokens
        copied: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._copy(self._saves, tokens, copied)

        async def store() -> None:
            key = self._key(tracked, first, ready, worker=True)
            reserved = await self._call("prepare_store", key, self._instance)
            await copied
            slots = len(reserved["context"].get("slots", ())) if reserved else 0
            if slots and await self._call("commit_store", key, self._instance, b""):
                self.counts.written_bytes += round(slots * self.chunk_tokens * self.kv_bytes_per_token)
            self.tell(lambda: self._saved(rank, request, tracked))

        self._step(tracked, store())

    def preempted(self, rank: int, request: EngineRequest) -> None:
        """See Connector: the next lookup starts from nothing."""
        tracked = self._known.pop(request, None)
        if tracked is not None:
            self._let_go(tracked)

    def finish(self, rank: int, request: EngineRequest) -> bool:
        """See Connector."""
        tracked = self._known.pop(request, None)
        if tracked is None:
            return False
        self._let_go(tracked)
        return tracked.saves > 0

    # ------------------------------------------------------------------ steps towards the server

    async def _ask(self, tracked: _Tracked) -> None:
        whole = len(tracked.tokens) // self.chunk_tokens
        hit = 0
        if whole:
            await self._call("lookup", self._key(tracked, 0, whole), 1)
            while self.healthy:
                found = await self._call("query_prefetch_status", tracked.session)
                if found is not None:
                    hit = int(found)
                    break
                await asyncio.sleep(_POLL_S)
        self.counts.asked_tokens += whole * self.chunk_tokens
        self.counts.hit_tokens += hit * self.chunk_tokens

        def told() -> None:
            tracked.hit_chunks = tracked.stored_chunks = hit
            tracked.locked = (0, hit)
            if tracked.over:
                self._let_go(tracked)
            else:
                self.node.lookup_ready()

        self.tell(told)

    def _copy(self, direction: _Copies, tokens: int, ended: asyncio.Future[None]) -> None:
        def done() -> None:
            if not ended.done():
                ended.set_result(None)

        self.call_at(direction.end_ns(self.node.now_ns, tokens), done)

    def _loaded(self, rank: int, request: EngineRequest, external_tokens: int, tokens: int, fine: bool) -> None:
        if fine:
            self.counts.read_bytes += round(tokens * self.kv_bytes_per_token)
            self.node.load_ended(rank, request, by_tier={TIER: external_tokens})
        else:
            self.counts.failures += 1
            self.node.load_ended(rank, request, 0, failed=True)

    def _saved(self, rank: int, request: EngineRequest, tracked: _Tracked) -> None:
        tracked.saves -= 1
        if tracked.over and not tracked.saves and request.finished:
            self.node.blocks_released(rank, request)

    def _free(self, tracked: _Tracked, end: int) -> None:
        """Locks of the chunks before `end` go back."""
        first, last = tracked.locked
        end = min(end, last)
        if end > first:
            tracked.locked = (end, last)
            self._step(tracked, self._say("free_lookup_locks", self._key(tracked, first, end), 1))

    def _let_go(self, tracked: _Tracked) -> None:
        """The request is over or starts anew; a lookup that has no answer yet is waited for."""
        tracked.over = True
        if tracked.asked and tracked.hit_chunks is None:
            return
        self._free(tracked, tracked.locked[1])
        self._step(tracked, self._say("end_session", tracked.session))

    async def _say(self, operation: str, *payloads: Any) -> None:
        await self._call(operation, *payloads)

    async def _call(self, operation: str, *payloads: Any) -> Any:
        """None also where the server does not answer: then it counts as gone until it answers a ping."""
        if not self.healthy:
            return None
        try:
            return await self._client.call(operation, *payloads)
        except TimeoutError:
            self._gone()
            return None

    def _step(self, tracked: _Tracked, work: Coroutine[Any, Any, None]) -> None:
        """Requests about one request of the engine take their turns."""
        before = tracked.steps

        async def run() -> None:
            if before is not None:
                await asyncio.wait([before])
            await work

        tracked.steps = self._keep(run())

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _track(self, rank: int, request: EngineRequest) -> _Tracked:
        tokens, salt = self.prompt_of(rank, request)
        self._sessions += 1
        usable = len(salt) <= 128 and not _SALT_FORBIDDEN & set(salt)
        session = f"{self._instance}-{self._sessions}"
        tracked = self._known[request] = _Tracked(session, list(tokens) if usable else [], salt if usable else "")
        return tracked

    def _key(self, tracked: _Tracked, first: int, end: int, worker: bool = False) -> dict[str, Any]:
        """IPCCacheServerKey: these chunks of the prompt."""
        return {
            "model_name": self.model,
            "world_size": 1,
            "worker_id": 0 if worker else None,
            "token_ids": tracked.tokens,
            "start": first * self.chunk_tokens,
            "end": end * self.chunk_tokens,
            "request_id": tracked.session,
            "cache_salt": tracked.salt,
            "num_kv_readers": 1,
        }

    # ------------------------------------------------------------------ the server's health

    async def _greet(self) -> None:
        """Register: a chunk of one layer with a byte for every 64th of it."""
        payload = {
            "instance_id": self._instance,
            "model_name": self.model,
            "world_size": 1,
            "block_size": self.block_tokens,
            "num_layers": 1,
            "hidden_dim_size": 1,
            "dtype_str": "uint8",
            "use_mla": True,
            "num_physical_slots": 64,
        }
        try:
            self.chunk_tokens = int(await self._client.call("get_chunk_size"))
            pool = await self._client.call("register_kv_cache_engine_driven_context", payload)
        except TimeoutError:
            self._gone()
            return
        if not pool or not pool["shm_name"]:
            print("warning: LMCache's server needs --shm-name; served without it", file=sys.stderr, flush=True)
            return
        self.healthy = True

    async def _stay_in_touch(self) -> None:
        """A server that began anew does not know this worker: it is told again each time, which does no harm."""
        while True:
            await asyncio.sleep(_PING_S)
            if self.healthy:
                await self._call("ping", self._instance)
            await self._greet()

    def _gone(self) -> None:
        if self.healthy or self.counts.failures == 0:
            print(f"warning: LMCache's server at {self.url} does not answer", file=sys.stderr, flush=True)
        self.counts.failures += 1
        self.healthy = False
