"""Writes `points.csv` from the sample that ships with aiconfigurator-core (extra `[profile]`).

    python -m harness.studies.validation.extract [SILICON_SAMPLE.csv]

Kept: aggregated serving (no P/D split) of the groups in `groups.yaml`, with a recorded concurrency up to
MAX_CONCURRENCY, one engine version per layout (that of most points), the newest of equal points.
"""

from __future__ import annotations

import csv
import re
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from harness.errors import InputError
from harness.studies.validation.points import DATA, GROUPS, POINTS

MAX_CONCURRENCY = 128
HEADER = (
    "# Measured serving points, from systems/silicon_sample.csv of aiconfigurator-core 0.12.0 (NVIDIA, Apache-2.0):",
    "# InferenceX runs and gap analyses. Times in ms, as there. By harness.studies.validation.extract.",
)
COLUMNS = ("group", "layout", "prompt_tokens", "output_tokens", "concurrency", "ttft_ms", "tpot_ms", "version", "row")


def sample_path() -> Path:
    """The sample inside the installed package."""
    package = find_spec("aiconfigurator_core")
    if package is None or package.origin is None:
        raise InputError("aiconfigurator-core", "not installed", "pip install '.[profile]', or name the sample file")
    return Path(package.origin).parent / "systems" / "silicon_sample.csv"


def _layout(row: dict[str, str]) -> str | None:
    """tp4, tp4ep4, ...; None for data-parallel attention and for layouts that the record leaves open."""
    if row["attention_dp_size"] not in ("", "1"):
        return None
    tp, expert = int(row["tp_size"]), int(row["moe_ep_size"] or 1)
    if int(row["moe_tp_size"] or 1) * expert not in (tp, 1):
        return None
    return f"tp{tp}" + (f"ep{expert}" if expert > 1 else "")


def extract(sample: Path, groups: dict[str, dict[str, Any]]) -> Iterator[dict[str, object]]:
    """Rows of points.csv."""
    sources = {tuple(entry["source"]): name for name, entry in groups.items()}
    newest: dict[tuple[str, str, int, int, int, str], tuple[str, dict[str, object]]] = {}
    with sample.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            name = sources.get((row["model_path"], row["precision"], row["system"], row["backend"]))
            found = re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"])
            if name is None or found is None or row["mode"] != "agg" or int(found[1]) > MAX_CONCURRENCY:
                continue
            layout = _layout(row)
            if layout not in groups[name]["layouts"]:
                continue
            shape = int(row["isl"]), int(row["osl"]), int(found[1])
            measured = re.search(r"measured=([\d-]+)", row["silicon_data_source"])
            date = measured[1] if measured else ""
            values = (name, layout, *shape, round(float(row["silicon_ttft_ms"]), 3),
                      round(float(row["silicon_tpot_ms"]), 4), row["backend_version"], row["id"])  # fmt: skip
            key = (name, str(layout), *shape, row["backend_version"])
            if key not in newest or newest[key][0] <= date:
                newest[key] = date, dict(zip(COLUMNS, values, strict=True))
    versions: dict[tuple[str, str], Counter[str]] = {}
    for name, layout, *_, version in newest:
        versions.setdefault((name, layout), Counter())[version] += 1
    for key in sorted(newest):
        if key[-1] == versions[key[0], key[1]].most_common(1)[0][0]:
            yield newest[key][1]


def main(arguments: list[str]) -> None:
    """Write the file."""
    groups = yaml.safe_load((DATA / GROUPS).read_text(encoding="utf-8"))["groups"]
    rows = list(extract(Path(arguments[0]) if arguments else sample_path(), groups))
    with (DATA / POINTS).open("w", newline="", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in HEADER)
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"{DATA / POINTS}: {len(rows)} points")


if __name__ == "__main__":
    main(sys.argv[1:])
