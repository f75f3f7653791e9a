"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, as vLLM serves it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from fake_workers.api.errors import ApiError
from fake_workers.api.generation import Sampling
from fake_workers.api.protocol import CountTokensRequest, MessagesRequest, check_salt, random_id
from fake_workers.api.requests import base_request_id, json_only
from fake_workers.api.routes_completions import counted
from fake_workers.api.streaming import EventStream, ending, follow, sse, text_of
from fake_workers.api.tokenizer import Message, message_text
from fake_workers.api.worker import Call, Extras, Worker


def routes(worker: Worker) -> APIRouter:
    """The routes of one worker."""
    router = APIRouter(dependencies=[Depends(json_only)])

    @router.post("/v1/messages")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        try:
            worker.check_model(body.model)
            check_salt(body.cache_salt)
            prompt = worker.check_prompt(worker.encode_chat(conversation(body)))
            limit = worker.output_limit(prompt, body.max_tokens)
            sampling = Sampling(max_tokens=limit, stop=list(body.stop_sequences or []))
            extras = Extras(0, body.cache_salt, body.kv_transfer_params)
            request_id = f"chatcmpl-{base_request_id(request, random_id())}"
            call = worker.begin(request_id, body.model, [prompt], [sampling], extras, body.max_tokens)
            if body.stream:
                return EventStream(worker, call, _events(worker, call), done=b"")
            await counted(worker, request, call)
        except ApiError as error:
            return _refusal(error)
        reason, sequence = _stop_reason(call)
        return JSONResponse(
            {
                "id": call.request_id,
                "type": "message",
                "role": "assistant",
                "content": [{"type": "text", "text": text_of(call, 0)}],
                "model": call.model,
                "stop_reason": reason,
                "stop_sequence": sequence,
                "usage": _usage(worker, call),
            }
        )

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest) -> Response:
        try:
            worker.check_model(body.model)
            prompt = worker.encode_chat(conversation(body))
        except ApiError as error:
            return _refusal(error)
        return JSONResponse({"input_tokens": len(prompt)})

    return router


def conversation(body: MessagesRequest | CountTokensRequest) -> list[Message]:
    """The messages with the system prompt in front."""
    found: list[Message] = []
    if body.system:
        found.append({"role": "system", "content": message_text({"content": body.system})})
    found.extend({"role": str(m.get("role", "user")), "content": _content(m.get("content"))} for m in body.messages)
    return found


def _content(content: Any) -> str:
    """Text of a message's blocks; results of tools count as text too."""
    if isinstance(content, str) or content is None:
        return content or ""
    parts = []
    for block in content if isinstance(content, list) else []:
        if isinstance(block, dict):
            inner = block.get("text") or block.get("thinking") or block.get("content")
            parts.append(inner if isinstance(inner, str) else _content(inner))
    return "".join(parts)


def _refusal(error: ApiError) -> JSONResponse:
    body = {"type": "error", "error": {"type": error.kind, "message": error.message}}
    return JSONResponse(body, error.status)


def _stop_reason(call: Call) -> tuple[str, str | None]:
    reason, stop = ending(call, 0)
    if isinstance(stop, str):
        return "stop_sequence", stop
    return {"length": "max_tokens", "stop": "end_turn"}.get(reason, "end_turn"), None


def _usage(worker: Worker, call: Call) -> dict[str, int]:
    cached = call.streams[0].cached_tokens if worker.settings.enable_prompt_tokens_details else 0
    return {
        "input_tokens": call.prompt_tokens - cached,
        "output_tokens": call.output_tokens,
        "cache_read_input_tokens": cached,
    }


async def _events(worker: Worker, call: Call) -> AsyncIterator[bytes]:
    begun = False
    async for tokens in follow(call):
        out = []
        if not begun:
            begun = True
            message: dict[str, Any] = {
                "id": call.request_id,
                "type": "message",
                "role": "assistant",
                "content": [],
                "model": call.model,
                "stop_reason": None,
                "stop_sequence": None,
                "usage": {**_usage(worker, call), "output_tokens": 0},
            }
            out.append(sse({"type": "message_start", "message": message}, "message_start"))
            block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
            out.append(sse(block, "content_block_start"))
        for token in tokens:
            if token.text:
                delta = {"type": "text_delta", "text": token.text}
                out.append(sse({"type": "content_block_delta", "index": 0, "delta": delta}, "content_block_delta"))
        yield b"".join(out)
    reason, sequence = _stop_reason(call)
    ends = {
        "type": "message_delta",
        "delta": {"stop_reason": reason, "stop_sequence": sequence},
        "usage": _usage(worker, call),
    }
    yield (
        sse({"type": "content_block_stop", "index": 0}, "content_block_stop")
        + sse(ends, "message_delta")
        + sse({"type": "message_stop"}, "message_stop")
    )
