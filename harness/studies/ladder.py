"""Ladder files: one published experiment (fleet, workload, stages, router configs) with its figures as data.

The files under `data/` ship; a user's own file of the same schema is given by path, with or without published figures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from harness.cache.config import FabricConfig
from harness.errors import InputError
from harness.experiment import Cache, Engine
from harness.front_end import FrontEndConfig
from harness.studies.files import Strict, checked, path_of, read_document

DATA = Path(__file__).parent / "data"
RELEASES = ("v0.7.1", "v0.10.0")
METRICS = ("output_tok_s", "ttft_mean_s", "ttft_p90_s", "itl_mean_s")
"""What most ladders publish per stage: client-side output tokens per second, TTFT and time between tokens (seconds)."""
ALL_METRICS = (*METRICS, "total_tok_s", "e2e_mean_s", "e2e_p90_s")
"""With what only some publish: prompt and output tokens per second, time from send to last token."""

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class SharedPrefix(Strict):
    """inference-perf's `shared_prefix` data: every prompt is a group's system prompt and a question of its own."""

    num_groups: Count
    num_prompts_per_group: Count
    system_prompt_len: Count
    question_len: Count
    output_len: Count
    observed_input_len: Positive | None = Field(
        None,
        description="mean prompt tokens that the server counted, where published: prompts travel as text made of "
        "random token ids, and such text does not tokenise back into the same number of tokens",
    )


class Stage(Strict):
    """One stage: `rate` requests per second for `duration` seconds; then the driver waits until all have ended."""

    rate: Positive
    duration: Positive

    @property
    def requests(self) -> int:
        """As inference-perf counts them."""
        return int(self.rate * self.duration)


class Load(Strict):
    """Stages in order; the first `warmup_stages` are driven and not reported."""

    type: Literal["poisson", "constant"]
    interval_s: Annotated[float, Field(ge=0)] = Field(description="pause between a stage's end and the next's start")
    warmup_stages: Annotated[int, Field(ge=0)] = 0
    request_timeout_s: Positive | None = None
    stages: list[tuple[Positive, Positive]] = Field(description="[rate per second, seconds]")
    small: list[tuple[Positive, Positive]] = Field(description="the stages of --scale small")

    def at(self, scale: str) -> list[Stage]:
        """The stages of a scale."""
        return [Stage(rate=r, duration=d) for r, d in (self.small if scale == "small" else self.stages)]


class Arm(Strict):
    """One way to place requests. `config`: an EndpointPickerConfig under data/router/RELEASE, or a path."""

    router: Literal["llm-d", "round_robin", "random", "least_loaded"]
    config: str | None = None
    cache: Cache = Field(default_factory=lambda: Cache(), description="cache tiers below the GPUs; default: none")
    small: bool = Field(True, description="whether --scale small runs it")
    source: str | None = Field(None, description="where its figures were published")
    note: str | None = None
    published: list[list[float | None]] = Field(
        default_factory=list, description="rows as named by `columns`; null: not published"
    )

    @model_validator(mode="after")
    def _config(self) -> Arm:
        if (self.router == "llm-d") != (self.config is not None):
            raise ValueError("config is needed with router: llm-d, and only there")
        return self


class Ladder(Strict):
    """One published experiment."""

    name: str = Field(pattern=r"^[\w.+-]+$")
    title: str
    source: str
    profile: str
    nodes: Count
    gpus_per_node: Count
    engine: Engine
    workload: SharedPrefix
    load: Load
    fabric: FabricConfig = Field(default_factory=lambda: FabricConfig())
    release: str = Field(RELEASES[0], description="router release that the arms' configs are written for")
    front_end: FrontEndConfig | None = Field(None, description="null: as measured, see studies/front_end.py")
    seeds: Count = 3
    columns: list[
        Literal[
            "rate", "output_tok_s", "ttft_mean_s", "ttft_p90_s", "itl_mean_s", "total_tok_s", "e2e_mean_s", "e2e_p90_s"
        ]
    ]
    arms: dict[str, Arm]
    notes: list[str] = Field(default_factory=list, description="what of the set-up is not published, or differs here")

    @model_validator(mode="after")
    def _rows(self) -> Ladder:
        if self.columns[:1] != ["rate"]:
            raise ValueError("columns must begin with rate")
        for name, arm in self.arms.items():
            if any(len(row) != len(self.columns) or row[0] is None for row in arm.published):
                raise ValueError(f"arm {name}: a published row needs {len(self.columns)} values, the rate among them")
        return self

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics to show: the usual ones and those that this ladder publishes beyond them."""
        return tuple(m for m in ALL_METRICS if m in METRICS or m in self.columns)

    def published(self, arm: str) -> dict[float, dict[str, float]]:
        """Published figures of an arm: rate -> metric -> value."""
        rows: dict[float, dict[str, float]] = {}
        for row in self.arms[arm].published:
            values: dict[str, float] = {str(c): v for c, v in zip(self.columns, row, strict=True) if v is not None}
            rows[values.pop("rate")] = values
        return rows


def ladder_names() -> list[str]:
    """Names of the shipped ladders, sorted."""
    return sorted(path.stem for path in DATA.glob("*.yaml"))


def load_ladder(name_or_path: str) -> Ladder:
    """A shipped ladder by name, or a file of the same schema by path."""
    path = path_of(name_or_path, DATA)
    if not path.is_file():
        raise InputError(
            f"study {name_or_path}",
            "unknown",
            f"choose one of: {', '.join(ladder_names())}; or the path of a ladder file",
        )
    return checked(Ladder, read_document(path), path, "see harness/studies/data for examples")


def router_config(config: str, release: str) -> Path:
    """The EndpointPickerConfig of an arm for a router release."""
    if "/" in config or config.endswith((".yaml", ".yml")):
        return Path(config)
    path = DATA / "router" / release / f"{config}.yaml"
    if not path.is_file():
        raise InputError(f"router config {config}", f"does not ship for {release}", f"use one of {', '.join(RELEASES)}")
    return path
