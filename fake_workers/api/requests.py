"""What routes read from a request besides its body."""

from __future__ import annotations

from contextlib import suppress

from fastapi import Request
from fastapi.exceptions import RequestValidationError


async def json_only(request: Request) -> None:
    """vLLM's check of the content type."""
    if request.method != "POST":
        return
    kind = request.headers.get("content-type", "").lower().split(";", 1)[0]
    if kind != "application/json":
        raise RequestValidationError(errors=["Unsupported Media Type: Only 'application/json' is allowed"])


def base_request_id(request: Request, default: str) -> str:
    """The client's X-Request-Id, or the body's id (a lone surrogate in it is no UTF-8 and could not be answered)."""
    return request.headers.get("x-request-id") or default.encode("utf-8", "backslashreplace").decode()


def priority_of(request: Request, default: int) -> int:
    """The header wins over the body."""
    with suppress(KeyError, ValueError):
        return int(request.headers["x-vllm-priority"])
    return default
