"""HTML written as function calls: every text is escaped unless it is already Markup, so no name can break the
page.
"""

from __future__ import annotations

import html
from typing import Any


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def render(content: Any) -> Markup:
    """Content as HTML: Markup as it is, None as nothing, lists one after the other, everything else
    escaped.
    """
    if content is None:
        return Markup("")
    if isinstance(content, Markup):
        return content
    if isinstance(content, (list, tuple)):
        return Markup("".join(render(part) for part in content))
    return Markup(html.escape(str(content), quote=True))


def tag(name: str, *content: Any, **attributes: Any) -> Markup:
    """An element. `class_` is class, other underscores are hyphens; True is a bare attribute, None and False
    are none.
    """
    written = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = key.rstrip("_").replace("_", "-")
        written.append(f" {attribute}" if value is True else f' {attribute}="{html.escape(str(value), quote=True)}"')
    return Markup(f"<{name}{''.join(written)}>{render(content)}</{name}>")
