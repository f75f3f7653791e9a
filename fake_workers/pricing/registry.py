"""Which profiles there are and how to get one: shipped files by name, a user's own by path."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from fake_workers.errors import InputError
from fake_workers.pricing.csv import read_csv_profile
from fake_workers.pricing.known import nearest, why_unavailable
from fake_workers.pricing.profile import StepProfile, read_profile

PROFILES = Path(__file__).parent / "profiles"


def profile_names() -> list[str]:
    """Names of the shipped profiles, sorted."""
    return sorted(path.stem for path in PROFILES.glob("*.npz"))


def load_profile(name_or_path: str | Path) -> StepProfile:
    """A shipped profile by name, or by path a profile file (.npz) or a folder of CSV tables (see csv.py).

    Every call returns a profile of its own, so one run's out-of-grid record is not another's.
    """
    text = str(name_or_path)
    shipped = PROFILES / f"{text}.npz"
    if "/" not in text and shipped.is_file():
        return read_profile(shipped)
    path = Path(text)
    if path.is_dir():
        return read_csv_profile(path)
    if path.suffix == ".npz" or "/" in text:
        return read_profile(path)
    reason = why_unavailable(text)
    raise InputError(
        f"profile {text!r}",
        f"not available: {reason}" if reason else "no step-time profile of that name",
        f"{nearest(text, profile_names())}; or the path of an .npz file or of a folder with CSV tables",
    )


def list_profiles() -> list[dict[str, Any]]:
    """One summary per shipped profile, for a listing: what it is, KV size, source, interpolation errors."""
    return [dict(summary) for summary in _summaries()]


@cache
def _summaries() -> tuple[dict[str, Any], ...]:
    rows = []
    for name in profile_names():
        profile = load_profile(name)
        origin = profile.provenance
        errors = origin.get("interpolation_error", {})
        rows.append(
            {
                "name": name,
                "model": profile.model,
                "gpu": profile.gpu,
                "tp": profile.layout.tp,
                "dp": profile.layout.dp,
                "ep": profile.layout.ep,
                "gpus": profile.layout.gpus,
                "kv_bytes_per_token": profile.kv_bytes_per_token,
                "kv_capacity_tokens": profile.kv_capacity_tokens,
                "block_tokens": profile.block_tokens,
                "max_model_len": profile.max_model_len,
                "source": f"{origin['package']} {origin['package_version']}, {origin['system']}, "
                f"{origin['backend']} {origin['backend_version']}",
                "prefill_step_error": errors.get("prefill_step", {}).get("mean"),
                "decode_step_error": errors.get("decode_step", {}).get("mean"),
            }
        )
    return tuple(rows)


def show_profile(name_or_path: str | Path) -> dict[str, Any]:
    """Everything that is known about one profile, as plain data."""
    return load_profile(name_or_path).describe()
