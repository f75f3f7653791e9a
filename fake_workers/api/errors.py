"""vLLM's error objects: `{"error": {"message", "type", "param", "code"}}`, and which failure gives which."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from fake_workers.api.live_engine import EngineDeadError

_MOST_ERRORS = 10
_MOST_INPUT_CHARS = 200
_MOST_ERROR_CHARS = 1000
_INTERNAL = re.compile(r"[\[\]{}()]")
_INTERNAL_WORDS = frozenset(
    [
        "function-wrap",
        "function-after",
        "function-before",
        "function-plain",
        "nullable",
        "union",
        "default",
        "str",
        "int",
        "float",
        "bool",
        "bytes",
        "list",
        "tuple",
        "dict",
        "set",
        "none",
        "constrained-int",
        "constrained-str",
    ]
)


class ApiError(Exception):
    """A refusal with vLLM's error object. `where`: the parameter at fault."""

    def __init__(
        self,
        message: str,
        status: int = HTTPStatus.BAD_REQUEST,
        kind: str = "BadRequestError",
        where: str | None = None,
        value: Any = None,
    ) -> None:
        self.status, self.kind, self.where = int(status), kind, where
        extras = [f"parameter={where}"] if where is not None and kind == "BadRequestError" else []
        extras += [f"value={value}"] if value is not None else []
        self.message = f"{message} ({', '.join(extras)})" if extras else message
        super().__init__(self.message)

    def body(self) -> dict[str, Any]:
        """The error object."""
        return error_body(self.message, self.kind, self.status, self.where)


def not_found(message: str, where: str | None = "model") -> ApiError:
    """404."""
    return ApiError(message, HTTPStatus.NOT_FOUND, "NotFoundError", where)


def overloaded(message: str) -> ApiError:
    """503 of a queue limit."""
    return ApiError(message, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.SERVICE_UNAVAILABLE.phrase)


def error_body(message: str, kind: str, status: int, where: str | None = None) -> dict[str, Any]:
    """The error object. What a client sent may hold lone surrogates, which are no UTF-8."""
    message = message.encode("utf-8", "backslashreplace").decode()
    return {"error": {"message": message, "type": kind, "param": where, "code": status}}


def install(app: FastAPI) -> None:
    """Every failure of a route becomes an error object."""
    app.exception_handler(ApiError)(_on_api_error)
    app.exception_handler(RequestValidationError)(_on_validation)
    app.exception_handler(HTTPException)(_on_http)
    app.exception_handler(StarletteHTTPException)(_on_http)
    app.exception_handler(EngineDeadError)(_on_dead)


async def _on_api_error(request: Request, error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status)


async def _on_dead(request: Request, error: EngineDeadError) -> JSONResponse:
    return JSONResponse(error_body(str(error), "InternalServerError", 500), 500)


async def _on_http(request: Request, error: StarletteHTTPException) -> JSONResponse:
    body = error_body(str(error.detail), HTTPStatus(error.status_code).phrase, error.status_code)
    return JSONResponse(body, error.status_code)


async def _on_validation(request: Request, error: RequestValidationError) -> JSONResponse:
    errors = error.errors()
    where = None
    if errors and isinstance(errors[0], dict):
        where = _location(errors[0].get("loc") or ()) or None
    label = "error" if len(errors) == 1 else "errors"
    lines = [f"{len(errors)} validation {label}:"]
    lines += [f"  {_one(e)}" for e in errors[:_MOST_ERRORS]]
    if len(errors) > _MOST_ERRORS:
        lines.append(f"  ...and {len(errors) - _MOST_ERRORS} more {label}")
    body = error_body("\n".join(lines), HTTPStatus.BAD_REQUEST.phrase, 400, where)
    return JSONResponse(body, 400)


def _location(loc: Any) -> str:
    parts = [str(p) for p in loc if not _INTERNAL.search(str(p)) and str(p).lower() not in _INTERNAL_WORDS]
    return ".".join(parts)


def _one(error: Any) -> str:
    if isinstance(error, dict):
        error = {k: v for k, v in error.items() if k != "ctx" or not isinstance(v, dict) or "error" not in v}
        if "input" in error:
            error["input"] = _short(error["input"])
        if isinstance(error.get("loc"), (tuple, list)):
            error["loc"] = _location(error["loc"])
    text = str(error)
    return text if len(text) <= _MOST_ERROR_CHARS else text[:_MOST_ERROR_CHARS] + "...[truncated]"


def _short(value: Any) -> Any:
    if isinstance(value, (list, tuple, set, dict)):
        return f"<{type(value).__name__} of {len(value)} items>"
    text = value if isinstance(value, str) else str(value)
    if len(text) > _MOST_INPUT_CHARS:
        return text[:_MOST_INPUT_CHARS] + "...[truncated]"
    return value if isinstance(value, str) else text
