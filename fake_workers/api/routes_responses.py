"""POST /v1/responses, GET /v1/responses/{id}, POST /v1/responses/{id}/cancel: OpenAI's newer API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from fake_workers.api.errors import ApiError, not_found
from fake_workers.api.generation import Sampling
from fake_workers.api.protocol import ResponsesRequest, random_id
from fake_workers.api.requests import base_request_id, json_only, priority_of
from fake_workers.api.routes_completions import counted
from fake_workers.api.streaming import EventStream, ending, follow, sse, text_of
from fake_workers.api.tokenizer import Message, message_text
from fake_workers.api.worker import Call, Extras, Worker

_MOST_STORED = 1000


def routes(worker: Worker) -> APIRouter:
    """The routes of one worker."""
    router = APIRouter(dependencies=[Depends(json_only)])

    @router.post("/v1/responses")
    async def create(body: ResponsesRequest, request: Request) -> Response:
        worker.check_model(body.model)
        if body.background:
            raise ApiError("Background responses are not simulated", 501, "NotImplementedError")
        prompt = worker.check_prompt(worker.encode_chat(conversation(worker, body)))
        limit = worker.output_limit(prompt, body.max_output_tokens, "max_output_tokens")
        stop = [body.stop] if isinstance(body.stop, str) else list(body.stop or [])
        sampling = Sampling(
            max_tokens=limit, min_tokens=body.min_tokens, ignore_eos=body.ignore_eos, stop=stop, seed=body.seed
        )
        base = base_request_id(request, body.request_id)
        request_id = base if base.startswith("resp_") else f"resp_{base}"
        extras = Extras(priority_of(request, body.priority), body.cache_salt, body.kv_transfer_params)
        call = worker.begin(request_id, body.model, [prompt], [sampling], extras, limit)
        if body.stream:
            return EventStream(worker, call, _events(worker, call, body, limit), done=b"")
        await counted(worker, request, call)
        return JSONResponse(_remember(worker, body, _response(worker, call, body, limit)))

    @router.get("/v1/responses/{response_id}")
    async def retrieve(response_id: str) -> Response:
        return JSONResponse(_stored(worker, response_id)["response"])

    @router.post("/v1/responses/{response_id}/cancel")
    async def cancel(response_id: str) -> Response:
        _stored(worker, response_id)
        raise ApiError("Cannot cancel a synchronous response.", kind="invalid_request_error")

    return router


def conversation(worker: Worker, body: ResponsesRequest) -> list[Message]:
    """What went before, the instructions, the input."""
    messages: list[Message] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if body.previous_response_id:
        messages.extend(_stored(worker, body.previous_response_id)["messages"])
    messages.extend(_input(body))
    return messages


def _input(body: ResponsesRequest) -> list[Message]:
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    found: list[Message] = []
    for item in body.input:
        role = item.get("role") or ("tool" if item.get("type") == "function_call_output" else "assistant")
        text = message_text(item) or str(item.get("output") or item.get("arguments") or "")
        found.append({"role": role, "content": text})
    return found


def _stored(worker: Worker, response_id: str) -> dict[str, Any]:
    if not response_id.startswith("resp_"):
        raise ApiError(
            f"Invalid 'response_id': '{response_id}'. Expected an ID that begins with 'resp'.",
            kind="invalid_request_error",
        )
    found = worker.responses.get(response_id)
    if found is None:
        raise not_found(f"Response with id '{response_id}' not found.", "response_id")
    return found


def _remember(worker: Worker, body: ResponsesRequest, response: dict[str, Any]) -> dict[str, Any]:
    if body.store:
        before = worker.responses.get(body.previous_response_id or "", {}).get("messages", [])
        text = response["output"][0]["content"][0]["text"]
        messages = [*before, *_input(body), {"role": "assistant", "content": text}]
        worker.responses[response["id"]] = {"response": response, "messages": messages}
        while len(worker.responses) > _MOST_STORED:
            del worker.responses[next(iter(worker.responses))]
    return response


def _response(
    worker: Worker, call: Call, body: ResponsesRequest, limit: int, status: str = "", item_id: str = ""
) -> dict[str, Any]:
    """The response object; with `status` given, one that is still under way."""
    output: list[dict[str, Any]] = []
    usage: dict[str, Any] | None = None
    incomplete = None
    if not status:
        reason, _ = ending(call, 0)
        status = {"length": "incomplete", "abort": "cancelled"}.get(reason, "completed")
        incomplete = {"reason": "max_output_tokens"} if reason == "length" else None
        output = [_item(item_id or f"msg_{random_id()}", text_of(call, 0), status)]
        usage = {
            "input_tokens": call.prompt_tokens,
            "input_tokens_details": {"cached_tokens": call.streams[0].cached_tokens},
            "output_tokens": call.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": call.prompt_tokens + call.output_tokens,
        }
    return {
        "id": call.request_id,
        "created_at": call.created,
        "incomplete_details": incomplete,
        "instructions": body.instructions,
        "metadata": body.metadata,
        "model": call.model,
        "object": "response",
        "output": output,
        "parallel_tool_calls": bool(body.parallel_tool_calls),
        "temperature": body.temperature if body.temperature is not None else 1.0,
        "tool_choice": body.tool_choice,
        "tools": body.tools,
        "top_p": body.top_p if body.top_p is not None else 1.0,
        "background": False,
        "max_output_tokens": limit,
        "previous_response_id": body.previous_response_id,
        "service_tier": "auto",
        "status": status,
        "truncation": body.truncation or "disabled",
        "usage": usage,
        "user": body.user,
    }


def _item(item_id: str, text: str, status: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
    state = "completed" if status == "completed" else "incomplete"
    return {"id": item_id, "type": "message", "role": "assistant", "status": state, "content": [part]}


async def _events(worker: Worker, call: Call, body: ResponsesRequest, limit: int) -> AsyncIterator[bytes]:
    number = -1
    item_id = f"msg_{random_id()}"

    def event(kind: str, **fields: Any) -> bytes:
        nonlocal number
        number += 1
        return sse({"type": kind, "sequence_number": number, **fields}, kind)

    open_response = _response(worker, call, body, limit, "in_progress")
    yield event("response.created", response=open_response) + event("response.in_progress", response=open_response)
    place = {"item_id": item_id, "output_index": 0, "content_index": 0}
    empty = {"id": item_id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
    begun = False
    async for tokens in follow(call):
        out = b""
        if not begun:
            begun = True
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            out = event("response.output_item.added", output_index=0, item=empty)
            out += event("response.content_part.added", **place, part=part)
        for token in tokens:
            if token.text:
                out += event("response.output_text.delta", **place, delta=token.text, logprobs=[])
        yield out
    response = _remember(worker, body, _response(worker, call, body, limit, item_id=item_id))
    item = response["output"][0]
    text = item["content"][0]["text"]
    kind = "response.incomplete" if response["status"] == "incomplete" else "response.completed"
    yield (
        event("response.output_text.done", **place, text=text, logprobs=[])
        + event("response.content_part.done", **place, part=item["content"][0])
        + event("response.output_item.done", output_index=0, item=item)
        + event(kind, response=response)
    )
