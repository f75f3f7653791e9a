"""The generated parts of the documents about validation, from a result of `harness study validation`.

    python -m harness.studies.validation.report runs/study-validation-full/study.json docs/studies/validation.md ...

Rewrites what stands between `<!-- begin NAME -->` and `<!-- end NAME -->` for the names that a document has.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from fake_workers.pricing.report import insert_parts
from harness.studies.validation.longcontext import DATA, Compared, longcontext_markdown
from harness.studies.validation.replay import replay_markdown, replay_of
from harness.studies.validation.silicon import Score
from harness.studies.validation.text import markdown, score_table, summary


def parts_of(document: dict[str, Any]) -> dict[str, str]:
    """Marker name -> text, for the parts that the result holds."""
    parts: dict[str, str] = {}
    if "silicon" in document:
        scores = [Score(**entry) for entry in document["silicon"]["scores"]]
        judged = sorted((s for s in scores if s.judged), key=lambda s: (s.met, s.group))
        parts["validation-silicon"] = markdown(scores, document["silicon"]["notes"], [], False).strip()
        parts["validation-scores"] = f"{summary(scores)}\n\n{score_table(judged)}"
    if "longcontext" in document:
        figures = [
            Compared(**{key: value for key, value in entry.items() if key != "error"})
            for entry in document["longcontext"]["figures"]
        ]
        sources = yaml.safe_load(DATA.read_text(encoding="utf-8"))
        parts["validation-longcontext"] = longcontext_markdown(figures, sources).strip()
    if "llmservingsim" in document:
        parts["validation-llmservingsim"] = replay_markdown(replay_of(document["llmservingsim"])).strip()
    return parts


def main(arguments: Sequence[str]) -> None:
    """Rewrite the documents."""
    parts = parts_of(json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
    for name in arguments[1:]:
        text = Path(name).read_text(encoding="utf-8")
        wanted = {key: part for key, part in parts.items() if f"<!-- begin {key} -->" in text}
        Path(name).write_text(insert_parts(text, wanted, name), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
