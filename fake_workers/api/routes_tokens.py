"""Token ids: /tokenize, /detokenize, the render routes, and /inference/v1/generate (ids in, ids out)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from fake_workers.api.generation import Sampling
from fake_workers.api.protocol import (
    ChatRequest,
    Common,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    MessagesRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from fake_workers.api.requests import base_request_id, json_only, priority_of
from fake_workers.api.routes_completions import chat_prompt, check_choices, completion_prompts, counted
from fake_workers.api.routes_messages import conversation as message_conversation
from fake_workers.api.routes_responses import conversation as response_conversation
from fake_workers.api.streaming import EventStream, ending, follow, ids_of, sequences, sse, text_of, usage
from fake_workers.api.worker import Call, Extras, Worker


def routes(worker: Worker) -> APIRouter:
    """The routes of one worker."""
    router = APIRouter(dependencies=[Depends(json_only)])

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        worker.check_model(body.model)
        if body.prompt is not None:
            ids = worker.encode(body.prompt)
        else:
            ids = worker.encode_chat(body.messages or [], body.add_generation_prompt)
        strings = [worker.tokenizer.piece(i) for i in ids] if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": worker.max_model_len, "tokens": ids, "token_strs": strings}

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        worker.check_model(body.model)
        return {"prompt": worker.tokenizer.decode(body.tokens)}

    @router.post("/v1/completions/render")
    async def render_completions(body: CompletionRequest) -> list[dict[str, Any]]:
        worker.check_model(body.model)
        prompts = [worker.check_prompt(p, body.truncate_prompt_tokens) for p in completion_prompts(worker, body)]
        return [_rendered(worker, p, body, worker.output_limit(p, body.max_tokens)) for p in prompts]

    @router.post("/v1/chat/completions/render")
    async def render_chat(body: ChatRequest) -> dict[str, Any]:
        worker.check_model(body.model)
        prompt = worker.check_prompt(chat_prompt(worker, body), body.truncate_prompt_tokens)
        wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        return _rendered(worker, prompt, body, worker.output_limit(prompt, wanted))

    @router.post("/v1/messages/render")
    async def render_messages(body: MessagesRequest) -> dict[str, Any]:
        worker.check_model(body.model)
        prompt = worker.check_prompt(worker.encode_chat(message_conversation(body)))
        return _rendered(worker, prompt, None, worker.output_limit(prompt, body.max_tokens))

    @router.post("/v1/responses/render")
    async def render_responses(body: ResponsesRequest) -> dict[str, Any]:
        worker.check_model(body.model)
        prompt = worker.check_prompt(worker.encode_chat(response_conversation(worker, body)))
        return _rendered(worker, prompt, None, worker.output_limit(prompt, body.max_output_tokens))

    @router.post("/inference/v1/generate")
    async def generate(body: GenerateRequest, request: Request) -> Response:
        wanted = body.sampling_params
        check_choices(wanted.n)
        prompt = worker.check_prompt(body.token_ids)
        limit = worker.output_limit(prompt, wanted.max_tokens)
        stop = [wanted.stop] if isinstance(wanted.stop, str) else list(wanted.stop or [])
        sampling = Sampling(
            max_tokens=limit,
            min_tokens=wanted.min_tokens,
            ignore_eos=wanted.ignore_eos,
            stop=stop,
            stop_token_ids=list(wanted.stop_token_ids or []),
            include_stop=wanted.include_stop_str_in_output,
            seed=wanted.seed,
            n=wanted.n,
        )
        request_id = f"generate-tokens-{base_request_id(request, body.request_id)}"
        extras = Extras(priority_of(request, body.priority), body.cache_salt, body.kv_transfer_params)
        call = worker.begin(request_id, body.model, [prompt], [sampling], extras, wanted.max_tokens)
        if body.stream:
            return EventStream(worker, call, _chunks(worker, call, body))
        await counted(worker, request, call)
        return JSONResponse(_generated(worker, call, body))

    return router


def _rendered(worker: Worker, prompt: list[int], body: Common | None, max_tokens: int) -> dict[str, Any]:
    """The GenerateRequest that would be sent on."""
    params: dict[str, Any] = {"max_tokens": max_tokens}
    if body is not None:
        params |= {"n": body.n or 1, "min_tokens": body.min_tokens, "ignore_eos": body.ignore_eos, "seed": body.seed}
        params |= {"stop": body.stop or [], "stop_token_ids": body.stop_token_ids or []}
    return {
        "request_id": body.request_id if body else "",
        "token_ids": prompt,
        "token_offsets": None,
        "features": None,
        "content_parts": None,
        "sampling_params": params,
        "model": worker.settings.model,
        "stream": bool(body.stream) if body else False,
        "stream_options": body.stream_options.model_dump() if body and body.stream_options else None,
        "cache_salt": body.cache_salt if body else None,
        "priority": body.priority if body else 0,
        "kv_transfer_params": body.kv_transfer_params if body else None,
    }


def _generated(worker: Worker, call: Call, body: GenerateRequest) -> dict[str, Any]:
    choices: list[dict[str, Any]] = []
    for i in sequences(call):
        reason, stop_reason = ending(call, i)
        choice = {
            "index": i,
            "token_ids": ids_of(call, i),
            "finish_reason": reason,
            "stop_reason": stop_reason,
            "logprobs": None,
        }
        if body.output_mode == "text":
            choice["text"] = text_of(call, i)
        choices.append(choice)
    return {
        "request_id": call.request_id,
        "model": call.model,
        "created": call.created,
        "output_mode": body.output_mode,
        "choices": choices,
        "usage": usage(worker, call),
        "prompt_logprobs": None,
        "prompt_token_ids": call.prompts[0] if body.return_token_ids else None,
        "kv_transfer_params": call.kv_transfer_params,
        "ec_transfer_params": None,
        "metrics": None,
    }


async def _chunks(worker: Worker, call: Call, body: GenerateRequest) -> AsyncIterator[bytes]:
    base = {"request_id": call.request_id, "model": call.model, "created": call.created}
    base["output_mode"] = body.output_mode
    with_usage = bool(body.stream_options and body.stream_options.include_usage)
    async for tokens in follow(call):
        out = []
        for token in tokens:
            choice: dict[str, Any] = {
                "index": token.index,
                "token_ids": [token.token_id] if token.token_id >= 0 else [],
                "finish_reason": token.finish_reason,
                "stop_reason": token.stop_reason,
                "logprobs": None,
            }
            if body.output_mode == "text":
                choice["text"] = token.text
            out.append(sse({**base, "choices": [choice]}))
        yield b"".join(out)
    if with_usage:
        yield sse({**base, "choices": [], "usage": usage(worker, call)})
