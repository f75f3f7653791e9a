"""A storage tier below node DRAM on a fleet under load: mean latencies and throughput, next to published ones.

A fixed number of clients ask one call after the other (a closed loop); every prompt is a long prefix that its group
shares and a question of its own. Cases are data (`data/storage/*.yaml`).
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.errors import InputError
from harness.experiment import Engine, Experiment
from harness.results.store import Run
from harness.runner import run_experiment
from harness.studies.tables import Line, Plot, TableStudy
from harness.trace.model import Call, Session
from harness.workload import Loaded

DATA = Path(__file__).parent / "data" / "storage"
CASE = "llama-3.3-70b-h100-lustre"
CLOSE = 0.2
METRICS = {
    "ttft_mean_s": "TTFT mean, s",
    "ttft_p90_s": "TTFT p90, s",
    "e2e_mean_s": "E2E mean, s",
    "e2e_p90_s": "E2E p90, s",
    "input_tok_s": "input tok/s",
}
_TOPOLOGY = """\
about: nodes behind one switch, and a file system
counts: {{n: 4, g: 4}}
links:
  - {{from: "gpu[n,g]", to: "host[n]", gbytes_per_s: 63, latency_us: 1}}
  - {{from: "host[n]", to: switch, gbytes_per_s: {node}, latency_us: 30}}
  - {{from: switch, to: store, gbytes_per_s: {store}, latency_us: 30}}
"""


class Workload(BaseModel):
    """inference-perf's shared prefix, without the prefix's length."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_groups: int
    num_prompts_per_group: int
    question_len: int
    output_len: int


class Case(BaseModel):
    """One published fleet."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    title: str
    source: str
    profile: str
    nodes: int
    gpus_per_node: int
    engine: Engine
    chunk_size: int
    dram_gb: float = Field(description="LMCache's DRAM per node, GiB")
    node_gbytes_per_s: float
    store_gbytes_per_s: float
    workload: Workload
    requests: int
    concurrency: int
    columns: list[str]
    published: list[tuple[int, str, float, float, float, float, float]]
    notes: list[str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One arm: metrics by name, and what served the prompts' tokens (shares)."""

    prefix_tokens: int
    tier: str
    values: dict[str, float]
    published: dict[str, float]
    served: dict[str, float]
    digest: str
    invalid: list[str]


def load_case(name: str = CASE) -> Case:
    """The shipped case, or a file of the same schema by path."""
    path = Path(name) if name.endswith(".yaml") else DATA / f"{name}.yaml"
    try:
        return Case.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, ValidationError, yaml.YAMLError) as error:
        raise InputError(str(path), " ".join(str(error).split())[:200], "see harness/studies/data/storage") from None


def run_arms(case: Case, scale: str, out: Path, *, command: str = "", show_progress: bool = True) -> list[Outcome]:
    """Every published arm; small: the shortest prefix and a ninth of the requests (nothing is compared then)."""
    shortest = min(row[0] for row in case.published)
    rows = [row for row in case.published if scale == "full" or row[0] == shortest]
    requests = case.requests if scale == "full" else case.requests // 9
    outcomes = []
    for row in rows:
        prefix, tier = row[0], row[1]
        session = closed_loop(case, prefix, requests, seed=1)
        with tempfile.TemporaryDirectory() as folder:
            topology = Path(folder) / "fleet.yaml"
            topology.write_text(_TOPOLOGY.format(node=case.node_gbytes_per_s, store=case.store_gbytes_per_s))
            run = run_experiment(
                _experiment(case, tier, str(topology)),
                out / f"{prefix}-{tier}",
                loaded=Loaded([session], "shared_prefix"),
                label=f"{prefix:,} {tier}",
                command=command,
                show_progress=show_progress,
            )
        published = dict(zip(METRICS, row[2:], strict=True)) if scale == "full" else {}
        outcomes.append(_outcome(prefix, tier, run, published))
    return outcomes


def closed_loop(case: Case, prefix_tokens: int, requests: int, seed: int) -> Session:
    """Clients that take turns: call i is sent when call i - concurrency has ended, in one seeded order of prompts."""
    work, block = case.workload, case.engine.block_size or 16
    total = work.num_groups * work.num_prompts_per_group
    order = np.random.default_rng([seed, 1]).permutation(total)
    shared, whole = prefix_tokens // block, (prefix_tokens + work.question_len) // block
    first_of_group: dict[int, int] = {}
    first_of_prompt: dict[int, int] = {}
    calls: list[Call] = []
    for index in range(requests):
        prompt = int(order[index % total])
        group = prompt // work.num_prompts_per_group
        if prompt in first_of_prompt:
            ref, keep = first_of_prompt[prompt], whole
        else:
            ref, keep = first_of_group.get(group, -1), shared if group in first_of_group else 0
        first_of_prompt.setdefault(prompt, index)
        first_of_group.setdefault(group, index)
        calls.append(
            Call(
                index=index,
                t_s=0.0,
                api_s=None,
                chain=f"client {index % case.concurrency}",
                input_tokens=whole * block,
                output_tokens=work.output_len,
                ref=ref,
                keep_blocks=keep,
                new_blocks=whole - keep,
                deps=(index - case.concurrency,) if index >= case.concurrency else (),
            )
        )
    return Session(id="clients", block_tokens=block, calls=calls)


def _experiment(case: Case, tier: str, topology: str) -> Experiment:
    return Experiment.model_validate(
        {
            "name": f"storage-{tier}",
            "trace": {"path": "shared_prefix"},
            "load": {"arrivals": "at_once", "client_timeout_s": None},
            "cluster": {
                "nodes": case.nodes,
                "gpus_per_node": case.gpus_per_node,
                "engine": case.engine.model_dump(mode="json", exclude_unset=True),
            },
            "model": {"profile": case.profile},
            "router": {"kind": "llm-d", "release": "v0.7.1", "config": "approximate"},
            "cache": {
                "kind": "lmcache",
                "lmcache": {
                    "mode": "inproc",
                    "chunk_size": case.chunk_size,
                    "l1_size_gb": case.dram_gb,
                    "l2_adapters": [] if tier == "cpu" else [{"name": tier, "at": "store"}],
                },
            },
            "fabric": {"topology": topology},
            "output": {"report": False},
        }
    )


def _outcome(prefix: int, tier: str, run: Run, published: dict[str, float]) -> Outcome:
    done = run.calls.filter(pl.col("outcome") == "completed")
    ttft = (done["first_token_ns"] - done["arrival_ns"]).to_numpy() / 1e9
    e2e = (done["finish_ns"] - done["arrival_ns"]).to_numpy() / 1e9
    span_s = float((done["finish_ns"].to_numpy().max() - done["arrival_ns"].to_numpy().min()) / 1e9)
    tokens = int(done["input_tokens"].sum())
    values = {
        "ttft_mean_s": float(ttft.mean()),
        "ttft_p90_s": float(np.percentile(ttft, 90)),
        "e2e_mean_s": float(e2e.mean()),
        "e2e_p90_s": float(np.percentile(e2e, 90)),
        "input_tok_s": tokens / span_s,
    }
    served = {source: int(done[f"{source}_tokens"].sum()) / tokens for source in ("gpu", "dram", "shared", "computed")}
    return Outcome(prefix, tier, values, published, served, run.summary["digest"], list(run.info.invalid))


def storage_study(case: Case, outcomes: list[Outcome], command: str) -> TableStudy:
    """All arms in one table."""
    answers = []
    marked: set[tuple[int, int]] = set()
    rows = []
    for number, one in enumerate(outcomes):
        cells = [f"{one.prefix_tokens:,} {one.tier}"]
        for column, name in enumerate(METRICS, start=1):
            ours, theirs = one.values[name], one.published.get(name)
            digits = 0 if name == "input_tok_s" else 2
            text = f"{ours:,.{digits}f}"
            if theirs:
                text = f"{theirs:,.{digits}f} / {text} / {ours / theirs:.2f}"
                if abs(ours / theirs - 1) > CLOSE:
                    marked.add((number, column))
            cells.append(text)
        rows.append([*cells, " / ".join(f"{100 * share:.0f}" for share in one.served.values())])
        answers += [f"{one.prefix_tokens:,} {one.tier} is not valid: {reason}" for reason in one.invalid]
    for prefix in dict.fromkeys(one.prefix_tokens for one in outcomes):
        answers.append(_gain(prefix, outcomes))
    what = "published / ours / ratio" if any(one.published for one in outcomes) else "ours"
    return TableStudy(
        name="storage",
        title=case.title,
        answers=answers,
        headings=[
            "prefix, tier",
            *(f"{title}: {what}" for title in METRICS.values()),
            "GPU / DRAM / store / computed, %",
        ],
        rows=rows,
        plots=_plots(outcomes),
        notes=[f"Published: {case.source}", *case.notes],
        legend=_tiers(outcomes),
        legend_note="Solid with points: ours. Dotted: published. In the table, bold is off by more than a fifth.",
        command=command,
        marked=marked,
    )


def _gain(prefix: int, outcomes: list[Outcome]) -> str:
    """What the tier buys, ours and published."""
    pair = [one for one in outcomes if one.prefix_tokens == prefix]
    without = next(one for one in pair if one.tier == "cpu")
    below = next(one for one in pair if one.tier != "cpu")

    def change(values: str) -> str:
        a, b = getattr(without, values), getattr(below, values)
        more = b["input_tok_s"] / a["input_tok_s"] - 1
        less = b["ttft_mean_s"] / a["ttft_mean_s"] - 1
        return f"mean TTFT {less:+.0%}, input tok/s {more:+.0%}"

    text = f"{prefix:,} tokens, {below.tier} below DRAM: {change('values')}"
    return text + (f" (published: {change('published')})." if below.published else ".")


def _plots(outcomes: list[Outcome]) -> list[Plot]:
    """Mean TTFT by length of the prefix, a line per tier; none where there is only one length."""
    if len({one.prefix_tokens for one in outcomes}) < 2:
        return []
    lines = []
    for color, tier in enumerate(_tiers(outcomes)):
        mine = [one for one in outcomes if one.tier == tier]
        for who, values, dash in (("ours", "values", "solid"), ("published", "published", "dot")):
            points = [
                (float(one.prefix_tokens), getattr(one, values)["ttft_mean_s"]) for one in mine if getattr(one, values)
            ]
            lines.append(Line(f"{tier}, {who}", points, color, dash))
    return [Plot("Mean time to first token", "By length of the shared prefix.", "tokens", "s", lines)]


def _tiers(outcomes: list[Outcome]) -> list[str]:
    return list(dict.fromkeys(one.tier for one in outcomes))


def document(outcomes: list[Outcome], scale: str, command: str) -> dict[str, Any]:
    """The study as data."""
    return {"study": "storage", "scale": scale, "command": command, "arms": [asdict(one) for one in outcomes]}
