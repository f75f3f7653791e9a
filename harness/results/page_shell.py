"""The frame of every page of the project: one file, plotly inside, nothing fetched, scripts allowed by hash."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

from harness.results.markup import Markup, render, tag


def page(title: str, body: list[Any], figures: dict[str, Any]) -> str:
    """The whole document; report.js draws `figures` into the elements named plot-KEY."""
    plotly, plotly_hash = _script(_plotly_js())
    script, script_hash = _script(_asset("report.js"))
    policy = (
        f"default-src 'none'; script-src {plotly_hash} {script_hash}; style-src 'unsafe-inline';"
        " img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            tag("title", title),
            f"<style>{_asset('report.css')}</style>",
            "</head>",
            "<body>",
            render(body),
            json_block("figures", figures),
            plotly,
            script,
            "</body>",
            "</html>",
            "",
        ]
    )


def page_header(over: str, title: str, answers: Sequence[str], *context: Any) -> Markup:
    """A page's head: what it is (`over`), its title, the sentences that answer the reader, and lines of context."""
    return tag(
        "header",
        tag("div", tag("p", over, class_="over"), tag("button", "Theme", type="button", id="theme"), class_="bar"),
        tag("h1", title),
        tag("ul", [tag("li", answer) for answer in answers], class_="answer"),
        *context,
    )


@cache
def _asset(name: str) -> str:
    return resources.files("harness.results").joinpath("page", name).read_text(encoding="utf-8")


@cache
def _plotly_js() -> str:
    # 5 MB of script: read once, and only where a page is made.
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs()).replace("\r", "")


def _script(source: str) -> tuple[Markup, str]:
    """An inline script and its source for the policy."""
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    return Markup(f"<script>{source}</script>"), f"'sha256-{digest}'"


def json_block(id: str, value: Any) -> Markup:
    """Data for the page's script. The escapes keep it one element whatever the strings hold; it never
    runs.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(f'<script type="application/json" id="{id}">{text}</script>')
