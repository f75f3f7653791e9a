"""What a source does not say and its user must: options of the importers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness.errors import InputError

BLOCK_TOKENS = 64
"""Block size (tokens) for sources that have none of their own."""
BYTE_TOKENIZER = "bytes"


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """Every field has the meaning that docs/trace-import.md gives it; a format reads those that it needs.

    `block_tokens`: tokens per block, None for the format's own size. `turns`: whether a row of a conversation
    holds its whole prompt or only what it adds (auto: whole where it has block ids). `tokenizer`: `bytes` or
    a tokenizer.json. `bytes_per_token`: of the byte tokenizer. `output_tokens`: for calls whose source has no
    output length. `reuse`: share 0..1 of the previous prompt that a call repeats, where the source has no
    block ids. `calls_per_session`: mean length of the sessions made out of unrelated requests. `think_s`:
    least time (s) between two calls of such a session. `seed`: for that draw.
    """

    block_tokens: int | None = None
    turns: Literal["auto", "full", "delta"] = "auto"
    tokenizer: str = BYTE_TOKENIZER
    bytes_per_token: int = 4
    output_tokens: int | None = None
    reuse: float | None = None
    calls_per_session: float | None = None
    think_s: float = 0.0
    seed: int = 1

    def __post_init__(self) -> None:
        if self.block_tokens is not None and not 1 <= self.block_tokens <= 2**20:
            raise InputError("--block-tokens", f"{self.block_tokens} is not a block size", "give 1 to 1048576 tokens")
        if self.reuse is not None and not 0 <= self.reuse <= 1:
            raise InputError("--reuse", f"{self.reuse} is not a share", "give a number from 0 to 1")
        if self.calls_per_session is not None and not self.calls_per_session >= 1:
            raise InputError("--calls-per-session", f"{self.calls_per_session} is below 1", "give a mean of 1 or more")
        if self.bytes_per_token < 1:
            raise InputError("--bytes-per-token", f"{self.bytes_per_token} is below 1", "give a whole number from 1")
        if self.output_tokens is not None and self.output_tokens < 0:
            raise InputError("--output-tokens", f"{self.output_tokens} is negative", "give a number of tokens")
        if not self.think_s >= 0:
            raise InputError("--think", f"{self.think_s} is negative", "give a time in seconds")

    def block(self, own: int = BLOCK_TOKENS) -> int:
        """Tokens per block where the format's own size is `own`."""
        return own if self.block_tokens is None else self.block_tokens
