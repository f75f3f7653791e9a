"""The end of every study: its files in its folder, and what the command prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from harness.folders import write_whole, writing

PAGE, TABLE, RESULTS = "study.html", "study.md", "study.json"


def deliver(
    folder: Path, document: dict[str, Any], text: str, page: str | None, as_json: bool, width: int = 140
) -> None:
    """Write study.json, study.md and, unless None, the page; print the document, or the text over `width` columns."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / RESULTS, json.dumps(document, indent=1) + "\n")
        write_whole(folder / TABLE, text)
        if page is not None:
            write_whole(folder / PAGE, page)
    if as_json:
        print(json.dumps(document, indent=2))
        return
    Console(width=max(width, Console().width)).print(Markdown(text))
    print(f"table: {folder / TABLE}" if page is None else f"page: {folder / PAGE}")
