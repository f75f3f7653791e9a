"""Request bodies: the prompt in the form that the configuration needs and no more."""

from __future__ import annotations

import json
from dataclasses import dataclass

from harness.router import tokens
from harness.router.adapt_v071 import CHARS_PER_TOKEN
from harness.router.base import RouteRequest
from harness.router.config import Adapted, PromptForm
from harness.router.granularity import Granularity
from harness.router.tokenizer import TokenizerService

PATH = "/v1/completions"
_PARTIAL = (1 << 32) - 1
"""Stands for a prompt without a whole router block."""


@dataclass(slots=True)
class Prompt:
    """A request body, and in how many blocks the prefix scorer counts it."""

    body: bytes
    blocks: int
    runs: tokens.Runs
    """In router blocks."""
    key: str | None = None
    """The text that the tokenizer service must forget afterwards."""


def build(
    request: RouteRequest,
    number: int,
    adapted: Adapted,
    block_tokens: int,
    granularity: Granularity,
    tokenizer: TokenizerService | None,
) -> Prompt:
    """The body of one request; `number` is unique in the run."""
    form, runs = adapted.prompt_form, request.runs
    router_runs = granularity.prompt(runs) if adapted.reads_kv_events else runs
    blocks = tokens.total_blocks(router_runs)
    if adapted.prefix == "precise":
        pass
    elif adapted.match_block_tokens > block_tokens or (
        form is PromptForm.REAL_TEXT and adapted.match_block_tokens == block_tokens
    ):  # counted in tokens: a last part of a block is a block, and the reach may end before the prompt
        reach = request.prompt_tokens if adapted.max_prompt_tokens is None else adapted.max_prompt_tokens
        blocks = -(-min(request.prompt_tokens, reach) // adapted.match_block_tokens)
    elif 0 < adapted.match_block_tokens < block_tokens:
        blocks = blocks * block_tokens // adapted.match_block_tokens
    key = None
    if form is PromptForm.TINY:
        prompt: bytes = b'"x"'
    elif form is PromptForm.BLOCK_IDS:
        # the router refuses an empty prompt; this id is in no block, so it matches nothing, as a partial block would
        prompt = _ids(tokens.prompt_tokens(router_runs).tolist() or [_PARTIAL])
    elif form is PromptForm.REAL_IDS:
        ids = tokens.prompt_tokens(runs).repeat(block_tokens).tolist()
        tail = request.prompt_tokens - len(ids)
        prompt = _ids(ids + [number % (1 << 31)] * max(tail, 0))
    elif form is PromptForm.BLOCK_KEY:
        key = f"prompt {number}"
        prompt = b'"' + key.encode() + b'"'
    elif form is PromptForm.BLOCK_TEXT:
        kept = runs if adapted.max_prompt_blocks is None else tokens.clip(runs, adapted.max_prompt_blocks)
        prompt = b'"' + tokens.prompt_text(kept, adapted.text_bytes_per_block) + b'"'
    else:
        prompt = b'"' + _real_text(request, number, adapted, block_tokens) + b'"'
    if tokenizer is not None and form is not PromptForm.TINY:
        key = prompt[1:-1].decode()
        tokenizer.expect(key, tokens.prompt_tokens(router_runs))
    head = b'{"model":' + json.dumps(request.model).encode() + b',"stream":true,"prompt":'
    return Prompt(head + prompt + b"}", blocks, router_runs, key)


def _ids(values: list[int]) -> bytes:
    return str(values).replace(" ", "").encode()


def _real_text(request: RouteRequest, number: int, adapted: Adapted, block_tokens: int) -> bytes:
    runs, wanted = request.runs, request.prompt_tokens
    if adapted.max_prompt_tokens is not None:
        wanted = min(wanted, adapted.max_prompt_tokens)
        runs = tokens.clip(runs, -(-wanted // block_tokens))
    text = tokens.prompt_text(runs, block_tokens * CHARS_PER_TOKEN)[: wanted * CHARS_PER_TOKEN]
    return text + tokens.tail_text(number, wanted * CHARS_PER_TOKEN - len(text))
