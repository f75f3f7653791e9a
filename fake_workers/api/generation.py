"""What a simulated model writes: decided when a request arrives, from its prompt and parameters alone.

Equal requests get equal answers. The words mean nothing; their number, the way they end and what a client sees of them
follow vLLM's rules for max_tokens, min_tokens, ignore_eos, stop strings and stop tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from fake_workers.api.tokenizer import Tokenizer

_MASK = (1 << 64) - 1


@dataclass(slots=True)
class Sampling:
    """The sampling parameters that show in a simulated answer. `max_tokens` is what the context leaves room for."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop: bool = False
    seed: int | None = None
    n: int = 1


@dataclass(slots=True)
class Answer:
    """Token ids, the text that each of them makes visible, and how it ends."""

    token_ids: list[int]
    deltas: list[str]
    finish_reason: str
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        """The whole visible text."""
        return "".join(self.deltas)


def plan(tokenizer: Tokenizer, prompt: Sequence[int], sampling: Sampling, index: int, mean_tokens: int) -> Answer:
    """The answer number `index` (of n). Where nothing else ends it, it ends by itself after half to one and a half
    times `mean_tokens`.
    """
    key = f"{sampling.seed}/{index}".encode()
    digest = hashlib.blake2b(array("Q", prompt).tobytes(), digest_size=16, key=key[:64]).digest()
    state = int.from_bytes(digest[:8], "big") | 1
    own_length = mean_tokens // 2 + int.from_bytes(digest[8:], "big") % (mean_tokens + 1)
    ends_itself = not sampling.ignore_eos and max(own_length, sampling.min_tokens + 1, 1) <= sampling.max_tokens
    count = max(own_length, sampling.min_tokens + 1, 1) if ends_itself else sampling.max_tokens
    ids = _words(tokenizer.words, state, count - 1 if ends_itself else count)
    if ends_itself:
        ids.append(tokenizer.eos)
    reason, stop_reason = ("stop" if ends_itself else "length"), None
    if sampling.stop_token_ids:
        wanted = set(sampling.stop_token_ids)
        at = next((i for i, t in enumerate(ids) if i >= sampling.min_tokens and t in wanted), None)
        if at is not None:
            del ids[at + 1 :]
            hidden = 0 if sampling.include_stop else 1
            pieces = [tokenizer.piece(t) for t in ids[: len(ids) - hidden]] + [""] * hidden
            return Answer(ids, pieces, "stop", ids[at])
    pieces = [tokenizer.piece(t) for t in ids]
    if sampling.stop:
        return _stopped(ids, pieces, sampling, reason)
    return Answer(ids, pieces, reason, stop_reason)


def _words(words: Sequence[int], state: int, count: int) -> list[int]:
    out = []
    size = len(words)
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) & _MASK
        out.append(words[(state >> 33) % size])
    return out


def _stopped(ids: list[int], pieces: list[str], sampling: Sampling, reason: str) -> Answer:
    """Ends at the first stop string, and holds text back as long as it may become one (vLLM's detokenizer)."""
    held_back = 0 if sampling.include_stop else max(len(s) for s in sampling.stop) - 1
    deltas: list[str] = []
    text, shown = "", 0
    for i, piece in enumerate(pieces):
        start = len(text)
        text += piece
        if i >= sampling.min_tokens:
            end = _find(text, start, sampling)
            if end is not None:
                cut, stop = end
                deltas.append(text[shown:cut])
                return Answer(ids[: i + 1], deltas, "stop", stop)
        visible = len(text) if i == len(pieces) - 1 else max(shown, len(text) - held_back)
        deltas.append(text[shown:visible])
        shown = visible
    return Answer(ids, deltas, reason)


def _find(text: str, start: int, sampling: Sampling) -> tuple[int, str] | None:
    """Where to cut, if the text from `start` on completes a stop string."""
    for stop in sampling.stop:
        if not stop:
            continue
        at = text.find(stop, max(0, start - len(stop) + 1))
        if at >= 0:
            return (at + len(stop) if sampling.include_stop else at), stop
    return None
