"""Load against recompute by length: one prompt at a time, computed cold and then restored from a tier.

Each case is data (`data/restore/*.yaml`): published figures with their source, and the experiment that stands for the
published set-up. Engine, LMCache and fabric are those of every run; nothing is fitted.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.cache.config import CacheConfig, FabricConfig
from harness.errors import InputError
from harness.experiment import Engine, Experiment
from harness.results.store import Run
from harness.runner import run_experiment
from harness.trace.model import Call, Session
from harness.workload import Loaded

DATA = Path(__file__).parent / "data" / "restore"
CLOSE = 0.2
"""Relative difference up to which a figure counts as met (the project's aim for this study)."""
PAUSE_S = 60.0
"""Between two prompts: all saves have ended."""
_NODES = """\
about: nodes of one GPU (PCIe gen 5 x16) behind one switch, each with {rate} GB/s
counts: {{n: 2, g: 1}}
links:
  - {{from: "gpu[n,g]", to: "host[n]", gbytes_per_s: 63, latency_us: 1}}
  - {{from: "host[n]", to: switch, gbytes_per_s: {rate}, latency_us: 30}}
"""

Positive = Annotated[float, Field(gt=0)]


class Case(BaseModel):
    """One published measurement and the set-up that stands for it."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    name: str
    title: str
    source: str
    profile: str
    kv_bytes_per_token: int | None = None
    nodes: int
    gpus_per_node: int
    origin: Literal["dram", "peer"] = Field(
        alias="from", description="where the prefix lies when it is asked for again"
    )
    given: Literal["load"] | None = Field(None, description="figures that went into the set-up and are not compared")
    engine: Engine
    cache: CacheConfig
    fabric: FabricConfig = Field(default_factory=lambda: FabricConfig())
    node_gbytes_per_s: Positive | None = Field(
        None, description="nodes behind links of this rate instead of a topology"
    )
    columns: list[Literal["tokens", "recompute_ms", "load_ms"]]
    published: list[tuple[int, float, float]]
    why: dict[Literal["recompute_ms", "load_ms"], str] = Field(
        default_factory=dict, description="cause, by evidence, of what is off by more than a fifth"
    )


@dataclass(frozen=True, slots=True)
class Row:
    """One length: published and simulated milliseconds, and what the restored prompt was served from."""

    tokens: int
    recompute_ms: float
    load_ms: float
    published_recompute_ms: float
    published_load_ms: float
    restored_tokens: int

    @property
    def recompute_ratio(self) -> float:
        """Ours over published."""
        return self.recompute_ms / self.published_recompute_ms

    @property
    def load_ratio(self) -> float:
        """Ours over published."""
        return self.load_ms / self.published_load_ms


@dataclass(slots=True)
class Result:
    """A case with its rows; `digest` repeats with the same versions."""

    case: Case
    rows: list[Row]
    digest: str
    invalid: list[str] = field(default_factory=list)

    def missed(self, figure: Literal["recompute", "load"]) -> list[Row]:
        """Rows whose figure is off by more than CLOSE."""
        if figure == self.case.given:
            return []
        return [row for row in self.rows if abs(getattr(row, f"{figure}_ratio") - 1) > CLOSE]

    def crossover_tokens(self, published: bool) -> float | None:
        """Length from which loading is faster, linear between lengths; None: at all of them, or at none."""
        prefix = "published_" if published else ""
        gains = [(r.tokens, getattr(r, f"{prefix}recompute_ms") - getattr(r, f"{prefix}load_ms")) for r in self.rows]
        for (low, before), (high, after) in itertools.pairwise(gains):
            if before <= 0 < after:
                return float(low + (high - low) * -before / (after - before))
        return None


def case_names() -> list[str]:
    """Names of the shipped cases, in the order of the study."""
    return [
        "llama-3.1-8b-h100-dram",
        "gpt-oss-120b-h200-rdma",
        "gpt-oss-120b-h200-rdma-july",
        "gpt-oss-120b-h200-tcp",
        "gpt-oss-120b-h200-slow",
    ]


def load_case(name: str) -> Case:
    """A shipped case, or a file of the same schema by path."""
    path = Path(name) if name.endswith(".yaml") else DATA / f"{name}.yaml"
    if not path.is_file():
        raise InputError(f"restore case {name}", "unknown", f"choose one of: {', '.join(case_names())}; or a file")
    try:
        return Case.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (ValidationError, yaml.YAMLError) as error:
        raise InputError(str(path), " ".join(str(error).split())[:200], "see harness/studies/data/restore") from None


def run_case(
    case: Case, out: Path, lengths: int | None = None, *, command: str = "", show_progress: bool = True
) -> Result:
    """Every length (or the first `lengths`): computed cold, then asked for again and restored.

    The GPU keeps nothing between calls, so that what is asked for again comes from the tier and from nowhere else.
    """
    points = case.published[:lengths]
    session = _session([tokens for tokens, _, _ in points], case.engine.block_size or 16)
    with _topology(case) as topology:
        run = run_experiment(
            _experiment(case, topology),
            out,
            loaded=Loaded([session], case.name),
            label=case.name,
            command=command,
            show_progress=show_progress,
        )
    return Result(case, _rows(points, run), run.summary["digest"], list(run.info.invalid))


def _session(lengths: list[int], block: int) -> Session:
    calls: list[Call] = []
    for tokens in lengths:
        blocks = tokens // block
        for again in (False, True):
            index = len(calls)
            calls.append(
                Call(
                    index=index,
                    t_s=0.0,
                    api_s=None,
                    chain="main",
                    # the prefix and a token of its own, as every published prompt has something after its prefix
                    input_tokens=blocks * block + 1,
                    output_tokens=1,
                    ref=index - 1 if again else -1,
                    keep_blocks=blocks if again else 0,
                    new_blocks=0 if again else blocks,
                    deps=(index - 1,) if index else (),
                    gap_s=PAUSE_S if index else 0.0,
                )
            )
    return Session(id="lengths", block_tokens=block, calls=calls)


def _experiment(case: Case, topology: str) -> Experiment:
    engine = case.engine.model_dump(mode="json", exclude_unset=True)
    return Experiment.model_validate(
        {
            "name": f"restore-{case.name}",
            "trace": {"path": case.name},
            "load": {"arrivals": "at_once", "client_timeout_s": None},
            "cluster": {
                "nodes": case.nodes,
                "gpus_per_node": case.gpus_per_node,
                "engine": {**engine, "enable_prefix_caching": False},
            },
            "model": {"profile": case.profile, "kv_bytes_per_token": case.kv_bytes_per_token},
            # in turn: the second time, the prompt is asked of the other node
            "router": {"kind": "round_robin"},
            "cache": {"kind": "lmcache", "lmcache": case.cache.model_dump(mode="json", exclude_unset=True)},
            "fabric": {**case.fabric.model_dump(mode="json"), "topology": topology},
            "output": {"report": False},
        }
    )


@contextmanager
def _topology(case: Case) -> Iterator[str]:
    if case.node_gbytes_per_s is None:
        yield case.fabric.topology
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "nodes.yaml"
        path.write_text(_NODES.format(rate=case.node_gbytes_per_s))
        yield str(path)


def _rows(points: list[tuple[int, float, float]], run: Run) -> list[Row]:
    calls: list[dict[str, Any]] = run.calls.sort("index").to_dicts()
    rows = []
    for place, (tokens, recompute_ms, load_ms) in enumerate(points):
        cold, again = calls[2 * place], calls[2 * place + 1]
        rows.append(
            Row(
                tokens,
                _ttft_ms(cold),
                _ttft_ms(again),
                recompute_ms,
                load_ms,
                again["dram_tokens"] + again["shared_tokens"] + again["peer_tokens"],
            )
        )
    return rows


def _ttft_ms(call: dict[str, Any]) -> float:
    return float(call["first_token_ns"] - call["arrival_ns"]) / 1e6
