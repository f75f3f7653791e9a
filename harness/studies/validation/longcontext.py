"""Part `longcontext`: published measurements at 10k to 1M tokens against the raw tables, and what no table covers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from fake_workers.pricing.node_price import ProfilePrice
from fake_workers.pricing.profile import StepProfile
from fake_workers.pricing.steps import RankBatch
from harness.fabric.goodput import load_cost
from harness.studies.validation.around import around_ms
from harness.studies.validation.closed_loop import Loop, engine_config, run_loop
from harness.studies.validation.points import named_profile
from harness.studies.validation.text import percent, table

DATA = Path(__file__).parent.parent / "data" / "silicon" / "longcontext.yaml"
GOAL = 0.15
_ITL_CONTEXTS = (256, 4096, 16_384, 32_768, 65_536, 98_304, 130_000)
_ITL_OUTPUTS = 128


@dataclass(frozen=True, slots=True)
class Compared:
    """One published figure: what, at which length, published and ours (ms, or a ratio for shapes)."""

    target: str
    what: str
    tokens: int
    published: float
    ours: float

    @property
    def error(self) -> float:
        """Relative error."""
        return self.ours / self.published - 1


def run_longcontext(path: Path = DATA) -> tuple[list[Compared], dict[str, Any]]:
    """Every figure that can be compared, and the document with sources and what cannot."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    out: list[Compared] = []
    for name, target in document["targets"].items():
        out += _target(name, target)
    for name, target in document["shapes"].items():
        out += _shape(name, target)
    return out, document


def cold_ttft_ms(profile: StepProfile, prompt_tokens: int) -> float:
    """One prompt into an idle, empty engine: until its first token is out of the last step."""
    return _alone(profile, prompt_tokens, 2)[0]


def _alone(profile: StepProfile, prompt_tokens: int, output_tokens: int) -> tuple[float, float]:
    loop = Loop(1, prompt_tokens, output_tokens, 1.0, 1)
    room = max(profile.kv_capacity_tokens, prompt_tokens + output_tokens + profile.block_tokens)
    seen = run_loop(ProfilePrice(profile), engine_config(room, loop, block_tokens=profile.block_tokens), loop)
    return seen.ttft_ms, seen.tpot_ms


def _target(name: str, target: dict[str, Any]) -> Iterator[Compared]:
    profile = named_profile(target["profile"])
    if line := target.get("itl_line"):
        for context in _ITL_CONTEXTS:
            ours = _alone(profile, context, _ITL_OUTPUTS)[1]
            # a run of 128 outputs sees the context grow by 64 on average
            theirs = line["intercept_ms"] + line["slope_ms_per_token"] * (context + _ITL_OUTPUTS / 2)
            yield Compared(name, "ITL ms", context, round(theirs, 4), ours)
    for tokens, published in target.get("ttft_ms", {}).items():
        around = around_ms(tokens, target.get("tokenises", True))
        yield Compared(name, "TTFT ms", tokens, published, cold_ttft_ms(profile, tokens) + around)
    if loop := target.get("loop"):
        shape = Loop(loop["concurrency"], loop["prompt_tokens"], loop["output_tokens"], 1.0)
        engine = engine_config(profile.kv_capacity_tokens, shape, block_tokens=profile.block_tokens)
        seen = run_loop(ProfilePrice(profile), engine, shape)
        around = around_ms(shape.prompt_tokens)
        length = shape.prompt_tokens
        yield Compared(name, "TTFT median ms", length, loop["ttft_median_ms"], seen.ttft_median_ms + around)
        yield Compared(name, "ITL ms", length, loop["tpot_ms"], seen.tpot_ms)
    for tokens, published in target.get("prefill_tok_s_per_gpu", {}).items():
        yield Compared(name, "prefill tok/s per GPU", tokens, published, _prefill_rate(profile, tokens))
    for tokens, published in target.get("load_ms", {}).items():
        yield Compared(name, "TTFT ms", tokens, published, _load_ms(profile, tokens, target["cost"]))


def _prefill_rate(profile: StepProfile, prompt_tokens: int) -> float:
    """Tokens per second and GPU with every rank busy with such prompts, one full chunk a step."""
    layout, chunk = profile.layout, 8192
    price = ProfilePrice(profile)
    steps = [(min(chunk, prompt_tokens - done), done) for done in range(0, prompt_tokens, chunk)]
    total_ns = sum(price.step_ns([RankBatch((step,))] * layout.dp) for step in steps)
    return prompt_tokens * layout.dp / (total_ns / 1e9) / layout.gpus


def _load_ms(profile: StepProfile, tokens: int, cost_name: str) -> float:
    """Blocks of `tokens` tokens copied at the goodput of their size, then a step for the last token."""
    cost = load_cost(cost_name)
    nbytes = tokens * profile.kv_bytes_per_token
    blocks = -(-tokens // profile.block_tokens)
    rate = cost.cap_bytes_per_s(nbytes, blocks)
    assert rate is not None
    step = ProfilePrice(profile).step_ns([RankBatch((), 1, tokens)])
    return (cost.start_ns(blocks) + nbytes * 1_000_000_000 // rate + step) / 1e6


def _shape(name: str, target: dict[str, Any]) -> Iterator[Compared]:
    """How TTFT grows from one length to the next."""
    profile = named_profile(target["profile"])
    lengths = sorted(target["ttft_ms"])
    ours = {tokens: cold_ttft_ms(profile, tokens) for tokens in lengths if tokens < profile.max_model_len}
    for before, after in pairwise(lengths):
        if after in ours:
            theirs = target["ttft_ms"][after] / target["ttft_ms"][before]
            yield Compared(name, f"TTFT x from {before:,}", after, round(theirs, 3), ours[after] / ours[before])


def longcontext_document(compared: list[Compared], document: dict[str, Any]) -> dict[str, Any]:
    """As plain data."""
    return {
        "figures": [{**asdict(c), "error": round(c.error, 4)} for c in compared],
        "not_covered": document["not_covered"],
    }


def longcontext_markdown(compared: list[Compared], document: dict[str, Any]) -> str:
    """Targets with their mean absolute error, worst first; every figure; what no table covers."""
    kinds: dict[tuple[str, str], list[Compared]] = {}
    for one in compared:
        kinds.setdefault((one.target, "growth of TTFT" if " x " in one.what else one.what), []).append(one)
    sizes = {key: statistics.fmean(abs(c.error) for c in found) for key, found in kinds.items()}
    rows = []
    for (target, what), found in sorted(kinds.items(), key=lambda item: -sizes[item[0]]):
        size, bias = sizes[target, what], statistics.fmean(c.error for c in found)
        span = f"{min(c.tokens for c in found):,} to {max(c.tokens for c in found):,}"
        text = f"**{percent(size)}**" if size > GOAL else percent(size)
        figures = ", ".join(f"{c.published:g} / {c.ours:.4g}" for c in found)
        rows.append([target, what, span, f"{percent(bias, True)} / {text}", figures])
    head = ("target", "what", "tokens", "bias / mean absolute error", "published / ours")
    sources = {**document["targets"], **document["shapes"]}
    parts = ["## Long context", table(head, rows)]
    parts.append("\n".join(f"- {name}: {_source(entry)}" for name, entry in sources.items()))
    parts += ["### Not covered", "\n".join(f"- {name}: {why}." for name, why in document["not_covered"].items())]
    return "\n\n".join(parts) + "\n"


def _source(entry: dict[str, Any]) -> str:
    note = entry.get("note")
    return f"{entry['source']}. {note}" if note else str(entry["source"])
