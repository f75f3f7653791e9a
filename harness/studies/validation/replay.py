"""Part `replay` of the validation study: vLLM's own logs of 300 requests each, replayed one by one.

The logs are those that LLMServingSim publishes for its validation (`harness/studies/data/llmservingsim/`): ShareGPT
prompts at ten a second into one engine, arrivals, lengths and engine settings as logged. Two sources of step times
where both exist: LLMServingSim's measured layers of that very box (`harness profile import`), and the kernel database.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from fake_workers.engine.blocks import PromptRuns
from fake_workers.engine.node import Node
from fake_workers.engine.request import EngineRequest
from fake_workers.engine.scheduler import SchedulerConfig
from fake_workers.pricing.node_price import ProfilePrice
from fake_workers.pricing.profile import StepProfile, read_profile
from fake_workers.pricing.registry import load_profile, profile_names
from harness.studies.validation.text import percent, table

DATA = Path(__file__).parent.parent / "data" / "llmservingsim"
RUNS = "runs.yaml"
COLUMNS = ("arrival_us", "prompt_tokens", "output_tokens", "like", "shared_blocks", "ttft_us", "latency_us")
_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Logged:
    """One request of a log. `like`: the earlier request whose first `shared_blocks` blocks it repeats, or -1."""

    arrival_us: int
    prompt_tokens: int
    output_tokens: int
    like: int
    shared_blocks: int
    ttft_us: int
    latency_us: int


@dataclass(frozen=True, slots=True)
class Times:
    """TTFT, TPOT and latency of one request, ms."""

    ttft_ms: float
    tpot_ms: float
    latency_ms: float


@dataclass(frozen=True, slots=True)
class Metric:
    """One of the three over all requests of a run: means, p90, and how far single requests are off."""

    name: str
    logged_mean_ms: float
    ours_mean_ms: float
    logged_p90_ms: float
    ours_p90_ms: float
    request_error: float
    """Mean over requests of |ours - logged|, over the logged mean."""

    @property
    def error(self) -> float:
        """Of the mean."""
        return self.ours_mean_ms / self.logged_mean_ms - 1


@dataclass(frozen=True, slots=True)
class Replayed:
    """One run on one source of step times."""

    run: str
    prices: str
    requests: int
    preemptions: int
    logged_end_s: float
    ours_end_s: float
    metrics: list[Metric]


def load_runs(folder: Path = DATA) -> dict[str, dict[str, Any]]:
    """Name -> settings of the runs."""
    runs: dict[str, dict[str, Any]] = yaml.safe_load((folder / RUNS).read_text(encoding="utf-8"))["runs"]
    return runs


def load_log(name: str, folder: Path = DATA) -> list[Logged]:
    """Requests of one run in the order of arrival."""
    with (folder / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return [Logged(**{key: int(row[key]) for key in COLUMNS}) for row in csv.DictReader(file)]


def profile_named(name: str, folder: Path = DATA) -> StepProfile:
    """A profile of this part, or a shipped one."""
    own = folder / f"{name}.npz"
    if not own.is_file() and name in profile_names():
        return load_profile(name)
    return read_profile(own)


def prompt_runs(log: Sequence[Logged]) -> list[PromptRuns]:
    """Content of every prompt in blocks; what two prompts share has the same origin."""
    out: list[PromptRuns] = []
    for number, one in enumerate(log):
        shared = [run for run in (out[one.like] if one.like >= 0 else []) if run[1] < one.shared_blocks]
        runs = [(origin, start, min(end, one.shared_blocks)) for origin, start, end in shared]
        blocks = one.prompt_tokens // _BLOCK
        if blocks > one.shared_blocks:
            runs.append((number, one.shared_blocks, blocks))
        out.append(runs)
    return out


def replay(profile: StepProfile, log: Sequence[Logged], config: SchedulerConfig) -> tuple[list[Times], int]:
    """Times of every request in the order of the log, and how often one was preempted."""
    node = Node(ProfilePrice(profile), config)
    requests = [
        EngineRequest(str(number), number, runs, one.prompt_tokens, one.output_tokens, one.arrival_us * 1000)
        for number, (one, runs) in enumerate(zip(log, prompt_runs(log), strict=True))
    ]
    for request in sorted(requests, key=lambda r: r.arrival_ns):
        node.advance(request.arrival_ns, False)
        node.submit(0, request)
    while (wake := node.wake_ns()) is not None:
        node.advance(wake)
    return [_times(request) for request in requests], sum(request.preemptions for request in requests)


def _times(request: EngineRequest) -> Times:
    first, last = request.first_token_ns, request.finish_ns
    assert first is not None and last is not None
    ttft, latency = (first - request.arrival_ns) / 1e6, (last - request.arrival_ns) / 1e6
    return Times(ttft, (latency - ttft) / max(1, request.output_tokens - 1), latency)


def logged_times(log: Sequence[Logged]) -> list[Times]:
    """The same as logged."""
    return [
        Times(
            one.ttft_us / 1e3,
            (one.latency_us - one.ttft_us) / 1e3 / max(1, one.output_tokens - 1),
            one.latency_us / 1e3,
        )
        for one in log
    ]


def compare(logged: Sequence[Times], ours: Sequence[Times]) -> list[Metric]:
    """TTFT, TPOT, latency."""
    out = []
    for name in ("ttft_ms", "tpot_ms", "latency_ms"):
        a, b = [getattr(t, name) for t in logged], [getattr(t, name) for t in ours]
        apart = statistics.fmean(abs(x - y) for x, y in zip(a, b, strict=True))
        mean = statistics.fmean(a)
        p90, our_p90 = (statistics.quantiles(values, n=10)[8] for values in (a, b))
        out.append(Metric(name.removesuffix("_ms"), mean, statistics.fmean(b), p90, our_p90, apart / mean))
    return out


def engine_of(settings: dict[str, Any], profile: StepProfile) -> SchedulerConfig:
    """The engine as logged. KV blocks where the log has none: plenty, as the log shows no request waiting for them."""
    return SchedulerConfig(
        num_gpu_blocks=settings["num_gpu_blocks"],
        block_tokens=_BLOCK,
        max_num_batched_tokens=settings["max_num_batched_tokens"],
        max_num_seqs=settings["max_num_seqs"],
        max_model_len=profile.max_model_len,
    )


def run_replay(names: Sequence[str] = (), requests: int | None = None, folder: Path = DATA) -> list[Replayed]:
    """All runs (or those whose name holds one of `names`), up to the first `requests` requests of each."""
    out = []
    for name, settings in load_runs(folder).items():
        if names and not any(part in name for part in names):
            continue
        log = load_log(name, folder)[:requests]
        logged = logged_times(log)
        for prices, profile_name in settings["profiles"].items():
            profile = profile_named(profile_name, folder)
            ours, preemptions = replay(profile, log, engine_of(settings, profile))
            end_s, our_end_s = (
                max(one.arrival_us / 1e6 + t.latency_ms / 1e3 for one, t in zip(log, times, strict=True))
                for times in (logged, ours)
            )
            out.append(Replayed(name, prices, len(log), preemptions, end_s, our_end_s, compare(logged, ours)))
    return out


def replay_document(results: Sequence[Replayed]) -> list[dict[str, Any]]:
    """As plain data."""
    return [asdict(one) for one in results]


def replay_of(entries: Sequence[dict[str, Any]]) -> list[Replayed]:
    """From plain data."""
    return [Replayed(**{**entry, "metrics": [Metric(**metric) for metric in entry["metrics"]]}) for entry in entries]


def replay_markdown(results: Sequence[Replayed], folder: Path = DATA) -> str:
    """A table of means and of single requests, and what is known of the differences."""
    rows = []
    for one in results:
        cells = [one.run, one.prices]
        for metric in one.metrics:
            cells.append(f"{_shown(metric.logged_mean_ms)} / {_shown(metric.ours_mean_ms)}")
            cells.append(f"{percent(metric.error, True)} ({percent(metric.request_error)})")
        rows.append([*cells, f"{one.logged_end_s:.1f} / {one.ours_end_s:.1f}", f"{one.preemptions:,}"])
    head = ["run", "step times"]
    for name in ("TTFT", "TPOT", "latency"):
        head += [f"{name} logged / ours", "error (requests)"]
    document = yaml.safe_load((folder / RUNS).read_text(encoding="utf-8"))
    notes = "\n".join(f"- {name}: {run['note']}" for name, run in document["runs"].items() if run.get("note"))
    return "\n\n".join(["## Request by request", table([*head, "end, s", "preempted"], rows), notes]) + "\n"


def _shown(ms: float) -> str:
    return f"{ms / 1e3:.2f} s" if ms >= 1e3 else f"{ms:.1f} ms"
