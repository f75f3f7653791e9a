"""POST /v1/completions and /v1/chat/completions, as a stream or in one piece."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from fake_workers.api.errors import ApiError
from fake_workers.api.generation import Sampling
from fake_workers.api.protocol import ChatRequest, Common, CompletionRequest
from fake_workers.api.requests import base_request_id, json_only, priority_of
from fake_workers.api.streaming import (
    EventStream,
    Token,
    ending,
    finish,
    follow,
    ids_of,
    sequences,
    sse,
    text_of,
    usage,
)
from fake_workers.api.worker import Call, Extras, Worker

_MOST_CHOICES = 16384
_MOST_LOGPROBS = 20
"""vLLM's default of --max-logprobs."""


def routes(worker: Worker) -> APIRouter:
    """The routes of one worker."""
    router = APIRouter(dependencies=[Depends(json_only)])

    @router.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        worker.check_model(body.model)
        check_sampling(body)
        check_logprobs(worker, body.logprobs)
        prompts = completion_prompts(worker, body)
        prompts = [worker.check_prompt(prompt, body.truncate_prompt_tokens) for prompt in prompts]
        wanted = 1 if body.echo and body.max_tokens == 0 else body.max_tokens
        samplings = [sampling(body, worker.output_limit(prompt, wanted)) for prompt in prompts]
        request_id = f"cmpl-{base_request_id(request, body.request_id)}"
        call = worker.begin(request_id, body.model, prompts, samplings, extras(body, request), wanted)
        if body.stream:
            return EventStream(worker, call, _completion_chunks(worker, call, body))
        await counted(worker, request, call)
        return JSONResponse(_completion(worker, call, body))

    @router.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        worker.check_model(body.model)
        check_sampling(body)
        check_logprobs(worker, body.top_logprobs if body.logprobs else None)
        prompt = worker.check_prompt(chat_prompt(worker, body), body.truncate_prompt_tokens)
        wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        name = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
        one = sampling(body, worker.output_limit(prompt, wanted, name))
        request_id = f"chatcmpl-{base_request_id(request, body.request_id)}"
        call = worker.begin(request_id, body.model, [prompt], [one], extras(body, request), one.max_tokens)
        if body.stream:
            return EventStream(worker, call, _chat_chunks(worker, call, body))
        await counted(worker, request, call)
        return JSONResponse(_chat(worker, call, body))

    return router


async def counted(worker: Worker, request: Request, call: Call) -> None:
    """`finish`, while the request counts in GET /load."""
    worker.load += 1
    try:
        await finish(worker, request, call)
    finally:
        worker.load -= 1
    if any(stream.reason == "error" for stream in call.streams):
        raise ApiError("Internal server error", 500, "InternalServerError")


def completion_prompts(worker: Worker, body: CompletionRequest) -> list[list[int]]:
    """Text, ids, or a list of either."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [worker.encode(prompt)]
    assert prompt is not None
    if prompt and isinstance(prompt[0], int):
        return [prompt]
    if not prompt:
        raise ApiError("Either prompt or prompt_embeds must be provided and non-empty.", where="prompt")
    return [worker.encode(one) if isinstance(one, str) else one for one in prompt]  # type: ignore[misc]


def chat_prompt(worker: Worker, body: ChatRequest) -> list[int]:
    """The conversation's ids, or those that came along already tokenised."""
    given = (body.kv_transfer_params or {}).get("prompt_token_ids")
    if isinstance(given, list) and given and all(isinstance(i, int) for i in given):
        return given
    return worker.encode_chat(body.messages, body.add_generation_prompt and not body.continue_final_message)


def check_choices(n: int) -> None:
    """How many answers a request may ask for."""
    if n < 1:
        raise ApiError(f"n must be at least 1, got {n}.")
    if n > _MOST_CHOICES:
        raise ApiError(
            f"n must be at most {_MOST_CHOICES}, got {n}. To increase this limit, set the VLLM_MAX_N_SEQUENCES "
            "environment variable."
        )


def check_logprobs(worker: Worker, wanted: int | None) -> None:
    """vLLM's --max-logprobs; -1 asks for the whole vocabulary."""
    if not wanted:
        return
    number = len(worker.tokenizer.words) if wanted == -1 else wanted
    if number > _MOST_LOGPROBS:
        raise ApiError(
            f"Requested sample logprobs of {number}, which is greater than max allowed: {_MOST_LOGPROBS}",
            where="logprobs",
            value=number,
        )


def check_sampling(body: Common) -> None:
    """vLLM's own limits on sampling parameters."""
    check_choices(1 if body.n is None else body.n)
    if body.temperature is not None and (not math.isfinite(body.temperature) or body.temperature < 0):
        raise ApiError(
            f"temperature must be non-negative, got {body.temperature}.", where="temperature", value=body.temperature
        )
    if body.top_p is not None and not 0 < body.top_p <= 1:
        raise ApiError(f"top_p must be in (0, 1], got {body.top_p}.", where="top_p", value=body.top_p)
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(body, name)
        if value is not None and not -2 <= value <= 2:
            raise ApiError(f"{name} must be in [-2, 2], got {value}.")
    if body.min_tokens < 0:
        raise ApiError(f"min_tokens must be greater than or equal to 0, got {body.min_tokens}.")
    if body.use_beam_search:
        raise ApiError("Beam search is not simulated", 501, "NotImplementedError")


def sampling(body: Common, max_tokens: int) -> Sampling:
    """What an answer depends on."""
    if body.min_tokens > max_tokens:
        raise ApiError(f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {body.min_tokens}.")
    stop = [body.stop] if isinstance(body.stop, str) else list(body.stop or [])
    if any(not s for s in stop):
        raise ApiError("stop cannot contain an empty string.")
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        stop=stop,
        stop_token_ids=list(body.stop_token_ids or []),
        include_stop=body.include_stop_str_in_output,
        seed=body.seed,
        n=1 if body.n is None else body.n,
    )


def extras(body: Common, request: Request) -> Extras:
    """What vLLM adds."""
    return Extras(priority_of(request, body.priority), body.cache_salt, body.kv_transfer_params)


# ---------------------------------------------------------------------- completions


def _completion(worker: Worker, call: Call, body: CompletionRequest) -> dict[str, Any]:
    choices = []
    for i in sequences(call):
        reason, stop_reason = ending(call, i)
        prompt = call.prompts[i // call.choices]
        text, ids = text_of(call, i), ids_of(call, i)
        if body.echo:
            before = worker.tokenizer.decode(prompt)
            text, ids = (before, prompt) if body.max_tokens == 0 else (before + text, [*prompt, *ids])
        choices.append(
            {
                "index": i,
                "text": text,
                "logprobs": _logprobs(worker, ids, body.logprobs),
                "finish_reason": reason,
                "stop_reason": stop_reason,
                "token_ids": ids_of(call, i) if body.return_token_ids else None,
                "prompt_logprobs": None,
                "prompt_token_ids": prompt if body.return_token_ids else None,
                "routed_experts": None,
            }
        )
    return {
        "id": call.request_id,
        "object": "text_completion",
        "created": call.created,
        "model": call.model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": None,
        "usage": {**usage(worker, call), "completion_tokens_details": None},
        "kv_transfer_params": call.kv_transfer_params,
        "ec_transfer_params": None,
        "metrics": None,
    }


def _logprobs(worker: Worker, ids: list[int], top: int | None, offset: int = 0) -> dict[str, Any] | None:
    """Every word of the simulated model is as likely as any other."""
    if top is None:
        return None
    tokens = [worker.tokenizer.piece(i) for i in ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    value = -math.log(len(worker.tokenizer.words))
    return {
        "text_offset": offsets,
        "token_logprobs": [value] * len(ids),
        "tokens": tokens,
        "top_logprobs": [_alternatives(worker, i, t, top, value) for i, t in zip(ids, tokens, strict=True)],
    }


def _alternatives(worker: Worker, token_id: int, token: str, top: int, value: float) -> dict[str, float]:
    words = worker.tokenizer.words
    found = {token: value}
    for step in range(1, max(top, 1)):
        found[worker.tokenizer.piece(words[(token_id + step) % len(words)])] = value
    return found


async def _completion_chunks(worker: Worker, call: Call, body: CompletionRequest) -> AsyncIterator[bytes]:
    options = body.stream_options
    with_usage = bool(options and options.include_usage)
    continuous = with_usage and bool(options and options.continuous_usage_stats)
    head = (
        f'data: {{"id":{json.dumps(call.request_id)},"object":"text_completion","created":{call.created},'
        f'"model":{json.dumps(call.model)},"choices":[{{"index":'
    )
    lean = body.logprobs is None and not body.return_token_ids
    begun = [False] * len(call.streams)
    async for tokens in follow(call):
        out = []
        for token in tokens:
            text = token.text
            prompt = call.prompts[token.index // call.choices]
            echoed = not begun[token.index] and body.echo
            if echoed:
                text = worker.tokenizer.decode(prompt) + ("" if body.max_tokens == 0 else text)
            logprobs, prompt_ids, ids = "null", "null", "null"
            if not lean:
                logprobs = json.dumps(_logprobs(worker, [token.token_id] if token.token_id >= 0 else [], body.logprobs))
                if body.return_token_ids:
                    prompt_ids = "null" if begun[token.index] else json.dumps(prompt)
                    ids = f"[{token.token_id}]" if token.token_id >= 0 else "[]"
            begun[token.index] = True
            out.append(
                f'{head}{token.index},"text":{json.dumps(text, ensure_ascii=False)},"logprobs":{logprobs},'
                f'"finish_reason":{_quoted(token.finish_reason)},"stop_reason":{_quoted(token.stop_reason)},'
                f'"prompt_token_ids":{prompt_ids},"token_ids":{ids}}}]{_so_far(len(prompt), token, continuous)}}}\n\n'
            )
        yield "".join(out).encode()
    if with_usage:
        yield sse(_usage_chunk(worker, call, "text_completion"))


# ---------------------------------------------------------------------- chat


def _chat(worker: Worker, call: Call, body: ChatRequest) -> dict[str, Any]:
    choices = []
    for i in sequences(call):
        reason, stop_reason = ending(call, i)
        message = {
            "role": "assistant",
            "content": text_of(call, i),
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
        choices.append(
            {
                "index": i,
                "message": message,
                "logprobs": _chat_logprobs(worker, ids_of(call, i), body),
                "finish_reason": reason,
                "stop_reason": stop_reason,
                "token_ids": ids_of(call, i) if body.return_token_ids else None,
                "routed_experts": None,
            }
        )
    return {
        "id": call.request_id,
        "object": "chat.completion",
        "created": call.created,
        "model": call.model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": None,
        "usage": {**usage(worker, call), "completion_tokens_details": None},
        "prompt_logprobs": None,
        "prompt_token_ids": call.prompts[0] if body.return_token_ids else None,
        "prompt_text": worker.chat_text(body.messages) if body.return_prompt_text else None,
        "kv_transfer_params": call.kv_transfer_params,
        "ec_transfer_params": None,
        "metrics": None,
    }


def _chat_logprobs(worker: Worker, ids: list[int], body: ChatRequest) -> dict[str, Any] | None:
    if not body.logprobs:
        return None
    value = -math.log(len(worker.tokenizer.words))

    def entry(token: str) -> dict[str, Any]:
        return {"token": token, "logprob": value, "bytes": list(token.encode())}

    content = []
    for token_id in ids:
        token = worker.tokenizer.piece(token_id)
        others = _alternatives(worker, token_id, token, body.top_logprobs or 0, value) if body.top_logprobs else {}
        content.append({**entry(token), "top_logprobs": [entry(t) for t in others]})
    return {"content": content}


async def _chat_chunks(worker: Worker, call: Call, body: ChatRequest) -> AsyncIterator[bytes]:
    options = body.stream_options
    with_usage = bool(options and options.include_usage)
    continuous = with_usage and bool(options and options.continuous_usage_stats)
    prompt_tokens = call.prompt_tokens
    base = {
        "id": call.request_id,
        "object": "chat.completion.chunk",
        "created": call.created,
        "model": call.model,
    }
    head = f'data: {json.dumps(base, separators=(",", ":"))[:-1]},"choices":[{{"index":'
    begun = False
    async for tokens in follow(call):
        out = []
        if not begun:
            begun = True
            for i in range(call.choices):
                first: dict[str, Any] = {
                    **base,
                    "choices": [
                        {"index": i, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
                         "finish_reason": None}
                    ],
                    "prompt_token_ids": call.prompts[0] if body.return_token_ids else None,
                    "prompt_text": worker.chat_text(body.messages) if body.return_prompt_text else None,
                }  # fmt: skip
                if continuous:
                    first["usage"] = {
                        "prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens, "completion_tokens": 0
                    }  # fmt: skip
                out.append(sse(first).decode())
        for token in tokens:
            logprobs, ids = "null", "null"
            known = [token.token_id] if token.token_id >= 0 else []
            if body.logprobs:
                logprobs = json.dumps(_chat_logprobs(worker, known, body))
            if body.return_token_ids:
                ids = json.dumps(known)
            stop = f',"stop_reason":{_quoted(token.stop_reason)}' if token.finish_reason else ""
            out.append(
                f'{head}{token.index},"delta":{{"content":{json.dumps(token.text, ensure_ascii=False)}}},'
                f'"logprobs":{logprobs},"finish_reason":{_quoted(token.finish_reason)}{stop},"token_ids":{ids}}}]'
                f"{_so_far(prompt_tokens, token, continuous)}}}\n\n"
            )
        yield "".join(out).encode()
    if with_usage:
        yield sse(_usage_chunk(worker, call, "chat.completion.chunk"))


# ---------------------------------------------------------------------- both


def _usage_chunk(worker: Worker, call: Call, kind: str) -> dict[str, Any]:
    """The last chunk of a stream with include_usage; nulls are left out."""
    shown = {key: value for key, value in usage(worker, call).items() if value is not None}
    return {
        "id": call.request_id,
        "object": kind,
        "created": call.created,
        "model": call.model,
        "choices": [],
        "usage": shown,
    }


def _so_far(prompt_tokens: int, token: Token, continuous: bool) -> str:
    if not continuous:
        return ""
    return (
        f',"usage":{{"prompt_tokens":{prompt_tokens},"total_tokens":{prompt_tokens + token.count},'
        f'"completion_tokens":{token.count}}}'
    )


def _quoted(value: int | str | None) -> str:
    return "null" if value is None else json.dumps(value)
