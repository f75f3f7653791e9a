"""Replays the experiment's trace through a running gateway, as a client: sessions, dependencies and prompts as in a
replay on the virtual clock, over real HTTP, with the same records, table and page at the end.

A prompt's blocks become words that the workers' tokenizer reads back as one token each. Blocks that an earlier call's
answer filled carry what was really answered, so a conversation finds its own past in the caches.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from fake_workers.api.tokenizer import Tokenizer, load_tokenizer
from harness.clock import to_ns
from harness.errors import ComponentError, HarnessError, InputError
from harness.experiment import Experiment, resolved_yaml
from harness.folders import write_whole, writing
from harness.live import bench_tiers
from harness.live.config import LiveConfig
from harness.load.prompts import Origins
from harness.load.session import SessionRun
from harness.placement import plan_pools, with_nodes
from harness.progress import Progress
from harness.results.records import COMPLETED, FAILED, REJECTED, TIMED_OUT, CallRecord, arrived
from harness.results.runinfo import LoadFacts, RunInfo
from harness.results.store import Run, write_run
from harness.run_facts import left_out_note
from harness.runner import Interrupted, undisturbed
from harness.workload import Loaded, as_sent, load_sessions

SERVED_BY = "x-served-by"
"""Response header of the gateway: the worker's address."""
_PROGRESS_S = 1.0
_MOST_CONNECTIONS = 4096
_ANSWERS_WITHIN_S = 10.0
_GONE_AFTER_S = 10.0
"""A gateway that is started again is back sooner."""


class WallClock:
    """The virtual clock's interface on the event loop; time runs `speed` times as fast as the wall."""

    def __init__(self, speed: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._began_ns = time.monotonic_ns()
        self.speed = speed
        self.pending = 0

    @property
    def now_ns(self) -> int:
        """Since the start."""
        return int((time.monotonic_ns() - self._began_ns) * self.speed)

    def call_at(self, t_ns: int, action: Callable[..., None], *args: Any, rank: int = 1) -> None:
        """Run `action(*args)` at t_ns."""
        self.pending += 1

        def run() -> None:
            self.pending -= 1
            action(*args)

        self._loop.call_later(max(0.0, (t_ns - self.now_ns) / 1e9 / self.speed), run)

    def call_later(self, delay_ns: int, action: Callable[..., None], *args: Any, rank: int = 1) -> None:
        """Run `action(*args)` delay_ns from now."""
        self.call_at(self.now_ns + delay_ns, action, *args)


class Prompts:
    """Token ids of prompts: made up for blocks that nobody has answered, remembered for those that somebody has."""

    def __init__(self, tokenizer: Tokenizer, block_tokens: int) -> None:
        self._words = list(tokenizer.words)
        self._block = block_tokens
        self._known: dict[int, list[int]] = {}

    def ids(self, runs: Sequence[tuple[int, int, int]], own: int, tokens: int) -> list[int]:
        """A prompt of so many tokens whose full blocks are `runs`."""
        out: list[int] = []
        for origin, start, end in runs:
            known = self._known.get(origin, [])
            for pos in range(start, end):
                a, b = pos * self._block, (pos + 1) * self._block
                out.extend(known[a:b] if len(known) >= b else self._made_up(origin, pos))
        out.extend(self._made_up(own, len(out) // self._block, tail=True)[: tokens - len(out)])
        self._known[own] = list(out)
        return out

    def answered(self, own: int, ids: Sequence[int]) -> None:
        """What was answered to the prompt of this origin."""
        if own in self._known:
            self._known[own].extend(ids)

    def _made_up(self, origin: int, pos: int, tail: bool = False) -> list[int]:
        """A block that no other name has."""
        words = self._words
        size = len(words)
        digits = []
        for value in (2 * origin + tail, pos):
            for _ in range(4):
                value, digit = divmod(value, size)
                digits.append(words[digit])
        filler = [words[(origin * 31 + pos * 7 + k) % size] for k in range(max(0, self._block - len(digits)))]
        return (digits + filler)[: self._block]


class Bench:
    """One replay. `records` fill up as calls end."""

    def __init__(self, experiment: Experiment, loaded: Loaded, url: str, token_ids: bool) -> None:
        self.loaded, self._starts_ns = as_sent(experiment, loaded)
        self.url = url.rstrip("/")
        try:
            httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise InputError(f"--url {url}", f"is no address ({error})", "write http://HOST:PORT") from None
        self.live = experiment.live or LiveConfig()
        self.pools = plan_pools(experiment)
        self.experiment = with_nodes(experiment, self.pools)
        self.engine = self.pools[0].engine
        self.model = experiment.model.name or self.pools[0].profile.model
        self._tokenizer = load_tokenizer(self.live.tokenizer)
        self._prompts = Prompts(self._tokenizer, self.engine.block_tokens)
        self._token_ids = token_ids
        self._tokens_of_session: dict[str, str] = {}
        self._workers: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.records: list[CallRecord] = []
        self.ended = 0
        self.gone = False
        """Whether the bench ended because nothing listened any more."""
        self._refused_since: float | None = None
        self.tiers: bench_tiers.Account | str | None = None
        """What the cache tiers did, or why that is not known."""
        self._clock: WallClock
        self._client: httpx.AsyncClient
        self._origins = Origins()

    @property
    def expected(self) -> int:
        """Calls that will be sent."""
        return len(self.loaded.sent(self.experiment.trace.max_call_tokens))

    async def run(self, on_progress: Callable[[int, int], None]) -> None:
        """Until every call has ended, or load.until_s."""
        load = self.experiment.load
        limits = httpx.Limits(max_connections=_MOST_CONNECTIONS, max_keepalive_connections=_MOST_CONNECTIONS)
        timeout = httpx.Timeout(None, connect=10.0)
        async with httpx.AsyncClient(base_url=self.url, limits=limits, timeout=timeout, trust_env=False) as client:
            self._client = client
            await self._check()
            self._clock = WallClock(self.live.speed)
            for session, start in zip(self.loaded.sessions, self._starts_ns, strict=True):
                self._clock.call_at(start, self._begin, session)
            until = to_ns(load.until_s) if load.until_s is not None else None
            while self._clock.pending or self._tasks:
                if until is not None and self._clock.now_ns >= until:
                    await self._cancel()
                    break
                if await self._has_gone():
                    self.gone = True
                    await self._cancel()
                    return
                on_progress(self.ended, self._clock.now_ns)
                await asyncio.sleep(0.05)
            on_progress(self.ended, self._clock.now_ns)
            if self.experiment.cache.kind != "none":
                self.tiers = await bench_tiers.collect(self.workers, lambda: self._clock.now_ns)

    async def _has_gone(self) -> bool:
        """Whether connections have been refused for a while and still are."""
        if self._refused_since is None or time.monotonic() - self._refused_since < _GONE_AFTER_S:
            return False
        try:
            await self._check()
        except HarnessError:
            return True
        self._refused_since = None
        return False

    async def _cancel(self) -> None:
        """Calls that are open stay so in the records."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _check(self) -> None:
        """The gateway answers, and serves this model."""
        try:
            async with asyncio.timeout(_ANSWERS_WITHIN_S):
                answer = await self._client.get("/v1/models", timeout=_ANSWERS_WITHIN_S)
        except (TimeoutError, httpx.HTTPError) as error:
            raise ComponentError(
                "gateway", f"{self.url} does not answer ({type(error).__name__})", "start it, or give its --url"
            ) from None
        try:
            served = [str(card["id"]) for card in answer.json()["data"]] if answer.status_code == 200 else []
        except (ValueError, KeyError, TypeError):
            raise InputError(
                self.url, "does not list its models as OpenAI's API does", "give the gateway's --url"
            ) from None
        if self.model not in served:
            what = f"serves {', '.join(served) or 'nothing'}, not {self.model}"
            raise InputError(self.url, what, "run the experiment that the cluster was started with")

    def _begin(self, session: Any) -> None:
        SessionRun(
            session,
            self._clock,  # type: ignore[arg-type]
            self._release,
            self.experiment.load.gap_cap_s,
            self.engine.block_tokens,
            self._origins,
            self.experiment.trace.max_call_tokens,
        ).start()

    def _release(self, session: SessionRun, index: int) -> None:
        call = session.session.calls[index]
        session.call_started(index)
        record = arrived(session.session.id, call, self._clock.now_ns)
        self.records.append(record)
        task = asyncio.get_running_loop().create_task(self._send(session, index, record))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, session: SessionRun, index: int, record: CallRecord) -> None:
        limit = self.experiment.load.client_timeout_s
        try:
            async with asyncio.timeout(limit / self.live.speed if limit is not None else None):
                await self._stream(session, index, record)
        except TimeoutError:
            record.outcome, record.message = TIMED_OUT, "client time-out"
        except httpx.HTTPError as error:
            record.outcome, record.message = FAILED, f"{type(error).__name__}: {error}"
            if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                self._refused_since = self._refused_since or time.monotonic()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            record.outcome, record.message = FAILED, f"the answer is not a completion ({type(error).__name__}: {error})"
        except asyncio.CancelledError:
            return
        record.finish_ns = self._clock.now_ns
        self.ended += 1
        session.call_ended(index)

    async def _stream(self, session: SessionRun, index: int, record: CallRecord) -> None:
        own = session.prompts.origin(index)
        ids = self._prompts.ids(session.prompts.runs(index), own, record.input_tokens)
        body = {
            "model": self.model,
            "prompt": ids if self._token_ids else self._tokenizer.decode(ids),
            "max_tokens": record.requested_output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        headers = {"x-request-id": record.call_id, "x-session-id": record.session}
        if token := self._tokens_of_session.get(record.session):
            headers["x-session-token"] = token
        async with self._client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            record.routed_ns = self._clock.now_ns
            self._refused_since = None
            record.router_status = response.status_code
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                record.outcome = REJECTED if response.status_code == 400 else FAILED
                record.message = f"{response.status_code} {text[:200]}"
                return
            record.admitted_ns = record.routed_ns
            record.endpoint = self._worker(response.headers.get(SERVED_BY))
            if token := response.headers.get("x-session-token"):
                self._tokens_of_session[record.session] = token
            await self._read(own, record, response)

    async def _read(self, own: int, record: CallRecord, response: httpx.Response) -> None:
        answer: list[int] = []
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                record.outcome, record.message = FAILED, str(chunk["error"].get("message"))
                return
            for choice in chunk["choices"]:
                if record.first_token_ns is None:
                    record.first_token_ns = self._clock.now_ns
                answer.extend(choice.get("token_ids") or [])
            if not chunk["choices"] and chunk.get("usage"):
                details = chunk["usage"].get("prompt_tokens_details") or {}
                record.gpu_tokens = int(details.get("cached_tokens") or 0)
                record.computed_tokens = int(chunk["usage"]["prompt_tokens"]) - record.gpu_tokens
        record.output_tokens = len(answer)
        self._prompts.answered(own, answer)
        record.outcome = COMPLETED if len(answer) == record.requested_output_tokens else FAILED
        if record.outcome == FAILED:
            record.message = f"{len(answer)} of {record.requested_output_tokens} tokens came"

    def _worker(self, address: str | None) -> int | None:
        if not address:
            return None
        return self._workers.setdefault(address, len(self._workers))

    @property
    def workers(self) -> list[str]:
        """Addresses of workers that answered, by endpoint number."""
        return list(self._workers)


def run_bench(experiment: Experiment, url: str, folder: Path, *, token_ids: bool = False, command: str = "") -> Run:
    """Replay, write the folder, return the run. After Ctrl-C or the gateway's end: write what there is, then raise."""
    loaded = load_sessions(experiment)
    bench = Bench(experiment, loaded, url, token_ids)
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    progress = folder / "progress.json"
    told = 0.0

    def tell(done: int, now_ns: int) -> None:
        nonlocal told
        shown.update(done, now_ns)
        if time.monotonic() - told > _PROGRESS_S or done == bench.expected:
            told = time.monotonic()
            text = json.dumps({"done": done, "calls": bench.expected, "seconds": now_ns / 1e9})
            with suppress(OSError):
                write_whole(progress, text)

    interrupted = False
    shown = Progress("bench", bench.expected)
    try:
        asyncio.run(bench.run(tell))
        shown.close("the gateway is gone" if bench.gone else "")
    except KeyboardInterrupt:
        if not bench.records:
            shown.cancel()
            raise
        interrupted = True
        shown.close("interrupted")
    except BaseException:
        shown.cancel()
        raise
    for record in bench.records:
        record.node = 0 if record.endpoint is not None else None
    account = bench.tiers if isinstance(bench.tiers, bench_tiers.Account) else None
    if account is not None:
        lmcache = experiment.cache.lmcache
        peers = (tier.name for tier in (lmcache.l2_adapters if lmcache else ()) if tier.placement == "writer")
        bench_tiers.give(bench.records, account, frozenset(peers))
    end_ns = max((r.finish_ns or r.arrival_ns for r in bench.records), default=0)
    info = _info(bench, end_ns, command)
    info.interrupted = interrupted or bench.gone
    if bench.gone:
        info.invalid.insert(0, "the run did not end: the gateway was gone")
    info.wall_s = time.monotonic() - began
    data = None
    if account is not None:
        identity = account.facts["identity"]
        info.cache = {"kind": experiment.cache.kind, "release": identity["version"], **identity}
        info.tier, data = account.facts, account.data
        info.notes += account.notes
    elif bench.tiers:
        info.notes.append(str(bench.tiers))
    with undisturbed(), writing(folder):
        run = write_run(folder, bench.records, info, None, len(bench.records), drained=False, tiers=data, live=True)
    kept = f"{bench.ended} of {bench.expected} calls; kept in {folder}"
    if bench.gone:
        raise ComponentError("gateway", f"{url} no longer answers", kept)
    if interrupted:
        raise Interrupted(f"interrupted after {kept}")
    return run


def _info(bench: Bench, end_ns: int, command: str) -> RunInfo:
    experiment, load = bench.experiment, bench.experiment.load
    calls = bench.loaded.sent(experiment.trace.max_call_tokens)
    rated = load.arrivals in ("poisson", "uniform")
    wanted = experiment.router
    notes = [
        "a live run: times are the client's, over HTTP; two live runs are not the same to the last byte; "
        "waiting in a worker's queue is part of the time to first token, a client cannot tell it apart"
    ]
    if len(calls) < bench.loaded.calls:
        notes.append(left_out_note(experiment, bench.loaded))
    return RunInfo(
        experiment=experiment.model_dump(mode="json"),
        experiment_yaml=resolved_yaml(experiment),
        router={
            "kind": wanted.kind,
            "release": wanted.release,
            "config": Path(wanted.config).stem,
            "config_text": "",
            "added": [],
            "unmodified": None,
            "sha256": None,
        },
        load=LoadFacts(
            sessions=len(bench.loaded.sessions),
            calls=len(calls),
            input_tokens=sum(call.input_tokens for call in calls),
            output_tokens=sum(call.output_tokens for call in calls),
            sessions_per_hour_per_node=load.sessions_per_hour_per_node if rated else None,
        ),
        endpoint_nodes=[0] * max(1, len(bench.workers)),
        virtual_ns=end_ns,
        name=experiment.name,
        label=f"live {Path(wanted.config).stem}",
        seed=experiment.seed,
        window_ns=(to_ns(load.warmup_s), None),
        workload={"trace": Path(bench.loaded.path).name, "gateway": bench.url, "workers": ", ".join(bench.workers)},
        notes=notes,
        command=command,
    )
