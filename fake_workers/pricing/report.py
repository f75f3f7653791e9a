"""The tables about shipped profiles in docs/fidelity.md, generated from the profiles' own records.

    python -m fake_workers.pricing.report docs/fidelity.md

rewrites the generated parts of the document in place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from fake_workers.pricing.known import UNAVAILABLE
from fake_workers.pricing.profile import StepProfile
from fake_workers.pricing.registry import load_profile, profile_names
from harness.errors import InputError

_CLASSES = ("attention", "same_chunks", "dense", "moe", "decode_attention", "prefill_step", "decode_step")


def error_table(profiles: Iterable[StepProfile]) -> str:
    """Interpolation error per profile and class: mean / 95th percentile / maximum in percent."""
    rows = []
    for profile in profiles:
        errors = profile.provenance["interpolation_error"]
        cells = []
        for name in _CLASSES:
            e = errors.get(name)
            cells.append(f"{100 * e['mean']:.2f} / {100 * e['p95']:.1f} / {100 * e['max']:.1f}" if e else "-")
        rows.append([profile.name, *cells])
    head = ["profile", "context attention", "2-8 equal chunks", "dense", "MoE", "decode attention",
            "whole prefill step", "whole decode step"]  # fmt: skip
    return _markdown(head, rows)


def limit_table(profiles: Iterable[StepProfile]) -> str:
    """How far the tables behind each profile were measured, KV bytes and capacity, source."""
    rows = []
    for profile in profiles:
        origin, limit = profile.provenance, profile.limits
        rows.append(
            [
                profile.name,
                f"{origin['backend']} {origin['backend_version']}",
                f"{limit.new_tokens:,}",
                f"{limit.cached_tokens:,}",
                f"{limit.decode_context_tokens:,}",
                f"{limit.moe_tokens:,}" if limit.moe_tokens else "-",
                f"{profile.kv_bytes_per_token:,}",
                f"{profile.kv_capacity_tokens:,}" + (" (stated)" if profile.capacity_stated_by else ""),
            ]
        )
    head = ["profile", "rows of", "chunk <=", "prefix <=", "decode context <=", "MoE tokens <=",
            "KV bytes/token", "KV tokens per endpoint"]  # fmt: skip
    return _markdown(head, rows)


def unavailable_table() -> str:
    """What a user may look for and the kernel database cannot give, with the reason."""
    return _markdown(["profile", "why not"], [[f"`{pattern}`", reason] for pattern, reason in UNAVAILABLE])


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def generated_parts() -> dict[str, str]:
    """Marker name -> text that stands between its markers in the document."""
    profiles = [load_profile(name) for name in profile_names()]
    return {
        "profile-errors": error_table(profiles),
        "profile-limits": limit_table(profiles),
        "profile-unavailable": unavailable_table(),
    }


def insert_parts(text: str, parts: dict[str, str], where: str) -> str:
    """The document with what stands between `<!-- begin NAME -->` and `<!-- end NAME -->` replaced."""
    for name, part in parts.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise InputError(where, f"needs exactly one {begin} before one {end}", "put the markers back")
        head, rest = text.split(begin)
        text = f"{head}{begin}\n{part}\n{end}{rest.split(end)[1]}"
    return text


def main(arguments: Sequence[str]) -> None:
    """Rewrite the generated parts of the given documents."""
    for name in arguments:
        path = Path(name)
        path.write_text(insert_parts(path.read_text(), generated_parts(), name))


if __name__ == "__main__":
    main(sys.argv[1:])
