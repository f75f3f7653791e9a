"""What can be said of the published load without running it: the trace's anatomy, and how large its KV cache is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from fake_workers.pricing.registry import load_profile
from harness.results.compare import number
from harness.trace.generate import generate_sessions
from harness.trace.profile import load_profile as load_generator
from harness.trace.stats import trace_stats
from harness.trace.targets import Comparison, compare, load_targets

PUBLISHED_KV_BYTES: Final = {
    "llama-3.3-70b-fp8-tp8-h200": 163_840,
    "minimax-m3-bf16-dp8ep8-b200": 61_440,
    "deepseek-v3.2-fp8-dp8ep8-h200": 42_944,
    "glm-5.2-fp8-dp8ep8-b200": 47_616,
}
"""KV bytes per token that the published analysis states: 163.8, 61.4 and 42.9 KB; GLM-5.2 by 49.9 GB for 2^20."""

AVERAGE_CALL_TOKENS: Final = 218_996
"""Published mean input of a call."""
MILLION_TOKENS: Final = 1 << 20
"""A context of a million tokens."""


@dataclass(frozen=True, slots=True)
class KvSize:
    """One model's KV cache."""

    profile: str
    model: str
    bytes_per_token: int
    published_bytes_per_token: int
    average_call_gb: float
    million_tokens_gb: float


def kv_sizes() -> list[KvSize]:
    """From the profiles' model shapes, next to the published bytes; GB are 1e9 bytes."""
    found = []
    for name, published in PUBLISHED_KV_BYTES.items():
        profile = load_profile(name)
        size = profile.kv_bytes_per_token
        found.append(
            KvSize(name, profile.model, size, published, size * AVERAGE_CALL_TOKENS / 1e9, size * MILLION_TOKENS / 1e9)
        )
    return found


def kv_size_markdown(sizes: Sequence[KvSize]) -> str:
    """The table. Published: 9.4 GB per average call, 49.9 GB for a million tokens on GLM-5.2."""
    lines = [
        "## How large is the KV cache of agentic calls?",
        "",
        "Published: 163.8, 61.4 and 42.9 KB per token; 9.4 GB per average call; 49.9 GB for 2^20 tokens (GLM-5.2).",
        "",
        "| model | published bytes/token | ours | ratio | average call of 219k tokens (GB) | 2^20 tokens (GB) |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {s.model} | {s.published_bytes_per_token:,} | {s.bytes_per_token:,} | "
        f"{s.bytes_per_token / s.published_bytes_per_token:.3f} | {s.average_call_gb:.1f} | {s.million_tokens_gb:.1f} |"
        for s in sizes
    ]
    average = next(s for s in sizes if s.model.lower().startswith("deepseek")).average_call_gb
    lines += ["", f"- 9.4 GB per average call is DeepSeek-V3.2's size: {average:.2f} GB.", ""]
    return "\n".join(lines)


def workload(seeds: Sequence[int], profile: str = "claude-code") -> list[Comparison]:
    """The generated load's statistics against the published trace's, seed by seed."""
    targets = load_targets(profile)
    made = load_generator(profile)
    return compare(targets, [trace_stats(generate_sessions(made, seed, targets.sessions)) for seed in seeds])


def workload_data(rows: Sequence[Comparison], seeds: Sequence[int]) -> dict[str, Any]:
    """For JSON."""
    return {
        "study": "workload",
        "seeds": list(seeds),
        "figures": [
            {
                "name": row.target.name,
                "source": row.target.source,
                "published": row.target.value if row.target.range is None else list(row.target.range),
                "ours": list(row.got),
                "met": list(row.met),
            }
            for row in rows
        ],
    }


def workload_markdown(rows: Sequence[Comparison], seeds: Sequence[int]) -> str:
    """Published, ours (mean over seeds), ratio."""
    lines = [
        "## What is agentic traffic made of?",
        "",
        "The published analysis of 393 Claude Code sessions against the generated load that stands in for them.",
        "",
        f"| statistic | published | ours (mean of {len(seeds)} seeds) | ratio | within what is allowed |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        mean = sum(row.got) / len(row.got)
        target = row.target
        if target.range is not None:
            published, ratio = f"{target.range[0]:g} to {target.range[1]:g}", "-"
        else:
            published = number(target.value or 0.0)
            ratio = f"{mean / target.value:.2f}" if target.value else "-"
        lines.append(f"| {target.name} | {published} | {number(mean)} | {ratio} | {sum(row.met)} of {len(row.met)} |")
    missed = [row.target.name for row in rows if not any(row.met)]
    lines += ["", f"- missed under every seed: {', '.join(missed) or 'none'}", "- shares are fractions of 1", ""]
    return "\n".join(lines)
