"""Cold prefill of one request, point by point: published time, ours on the GPU, ours with the front end.

A prompt without cached prefix goes through an idle engine in chunks of the step token budget; of a data-parallel group
one rank works, the others join with dummies. Nothing queues, so the time is the sum of its steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from fake_workers.pricing.profile import StepProfile
from fake_workers.pricing.registry import load_profile
from fake_workers.pricing.steps import RankBatch, step_ns
from harness.errors import InputError
from harness.front_end import FrontEnd, FrontEndConfig, FrontEndTimes
from harness.studies.files import Strict, checked, path_of, read_document
from harness.studies.front_end import tokenise_us_per_token

DATA = Path(__file__).parent / "data" / "prefill"
DEFAULT = "llmd"
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]


class Series(Strict):
    """Measured prefills of one model on one fleet; a point without a time is priced all the same."""

    name: str
    profile: str
    source: str = "-"
    note: str | None = None
    router: bool = Field(False, description="whether the request went through gateway and router, as text")
    chunk_tokens: Count = Field(8192, description="the engine's max_num_batched_tokens")
    points: list[tuple[Count, Positive | None]] = Field(description="[prompt tokens, measured ms or null]")


class PrefillFile(Strict):
    """One file of measured prefills."""

    name: str = Field(pattern=r"^[\w.+-]+$")
    title: str
    source: str = "-"
    series: list[Series]
    not_priced: list[str] = Field(default_factory=list, description="published points that no profile can price")


@dataclass(frozen=True, slots=True)
class Point:
    """One prefill: ms as published, of the GPU alone, and with the front end; whether the tables reach so far."""

    prompt_tokens: int
    published_ms: float | None
    gpu_ms: float
    client_ms: float
    out_of_grid: bool


def load_points(name_or_path: str) -> PrefillFile:
    """A shipped file by name, or a user's own by path."""
    path = path_of(name_or_path, DATA)
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in DATA.glob("*.yaml")))
        raise InputError(f"study prefill {name_or_path}", "unknown", f"choose one of: {known}; or the path of a file")
    return checked(PrefillFile, read_document(path), path, f"see {DATA / 'llmd.yaml'}")


def prefill_ns(profile: StepProfile, prompt_tokens: int, chunk_tokens: int) -> int:
    """Duration of the steps that compute a prompt on one rank of an otherwise idle group."""
    total = done = 0
    idle = [RankBatch()] * (profile.layout.dp - 1)
    while done < prompt_tokens:
        new = min(chunk_tokens, prompt_tokens - done)
        total += step_ns(profile, [RankBatch(((new, done),)), *idle])
        done += new
    return total


def front_end_ns(prompt_tokens: int, router: bool) -> int:
    """What the measured front end adds to one request's time to first token, ns."""
    parts: dict[str, Any] = {"parts": "measured", "tokenise_us_per_token": tokenise_us_per_token(prompt_tokens)}
    if not router:
        parts |= {"gateway_ms": 0, "router_ms": 0, "router_us_per_token": 0}
    times = FrontEndTimes.of(FrontEndConfig.model_validate(parts))
    assert times is not None
    way = FrontEnd(times, 1)
    return way.reaches_client_ns(way.reaches_engine_ns(way.reaches_router_ns(0, prompt_tokens), 0, prompt_tokens), 1)


def measure(series: Series) -> list[Point]:
    """Prices of a series' points."""
    points = []
    for tokens, published_ms in series.points:
        profile = load_profile(series.profile)
        gpu_ns = prefill_ns(profile, tokens, series.chunk_tokens)
        whole_ns = gpu_ns + front_end_ns(tokens, series.router)
        points.append(Point(tokens, published_ms, gpu_ns / 1e6, whole_ns / 1e6, bool(profile.out_of_grid)))
    return points


def as_data(file: PrefillFile, results: Sequence[Sequence[Point]]) -> dict[str, Any]:
    """For JSON."""
    return {
        "study": "prefill",
        "name": file.name,
        "series": [
            {"name": s.name, "profile": s.profile, "source": s.source, "points": [asdict(p) for p in points]}
            for s, points in zip(file.series, results, strict=True)
        ],
        "not_priced": file.not_priced,
    }


def markdown(file: PrefillFile, results: Sequence[Sequence[Point]]) -> str:
    """The whole study as Markdown: a table over all points, then errors per series."""
    lines = [
        f"## {file.title}",
        "",
        "| series | prompt tokens | published ms | GPU alone ms (ratio) | with front end ms (ratio) | |",
        "| :--- | ---: | ---: | ---: | ---: | :--- |",
    ]
    for series, points in zip(file.series, results, strict=True):
        for point in points:
            published = "-" if point.published_ms is None else f"{point.published_ms:,.1f}"
            ours = [_with_ratio(ms, point.published_ms) for ms in (point.gpu_ms, point.client_ms)]
            mark = "extrapolated" if point.out_of_grid else ""
            row = (series.name, f"{point.prompt_tokens:,}", published, *ours, mark)
            lines.append("| " + " | ".join(row) + " |")
    lines += [
        "",
        "| series | points | GPU alone: error (bias) | with front end: error (bias) |",
        "| :--- | ---: | ---: | ---: |",
    ]
    for series, points in zip(file.series, results, strict=True):
        known = [(p, p.published_ms) for p in points if p.published_ms is not None]
        if known:
            cells = [_error([get / ms - 1 for get, ms in pairs]) for pairs in
                     ([(p.gpu_ms, ms) for p, ms in known], [(p.client_ms, ms) for p, ms in known])]  # fmt: skip
            lines.append(f"| {series.name} | {len(known)} | {cells[0]} | {cells[1]} |")
    if file.not_priced:
        lines += ["", "Not priced:", "", *(f"- {what}" for what in file.not_priced)]
    return "\n".join(lines) + "\n"


def _with_ratio(ms: float, published_ms: float | None) -> str:
    return f"{ms:,.1f}" if published_ms is None else f"{ms:,.1f} ({ms / published_ms:.2f})"


def _error(values: Sequence[float]) -> str:
    return f"{sum(map(abs, values)) / len(values):.1%} ({sum(values) / len(values):+.1%})"
