"""Names for blocks of real token ids: equal prefix, equal name; and back from names to vLLM's hashes and ids.

The engine knows a block as (origin, position). Here a prompt's blocks are hashed in a chain as vLLM 0.32 does
(`hash_block_tokens` with the default algorithm, sha256 of the pickled triple); a hash that was seen before gives the
name it got then.
"""

from __future__ import annotations

import hashlib
import pickle
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fake_workers.engine.blocks import PromptRuns

ExtraKeys = tuple[tuple[str, ...], ...]


def none_hash(seed: str = "vllm-none-hash") -> bytes:
    """The parent of a first block (vLLM: PYTHONHASHSEED, or this constant)."""
    return hashlib.sha256(pickle.dumps(seed, protocol=5)).digest()


NONE_HASH = none_hash()


def block_hash(parent: bytes | None, tokens: Sequence[int], extra: ExtraKeys | None = None) -> bytes:
    """vLLM's hash of one full block."""
    # pickle writes here and is never read
    return hashlib.sha256(pickle.dumps((parent or NONE_HASH, tuple(tokens), extra), protocol=5)).digest()


def event_hash(digest: bytes) -> int:
    """A block hash as KV events carry it by default: the low 64 bits."""
    return int.from_bytes(digest[-8:], "big")


def chunk_hash(last_block: int) -> int:
    """A tier's own hash of the chunk that ends with this block (of `event_hash`): none of the engine's."""
    return event_hash(hashlib.sha256(b"chunk" + last_block.to_bytes(8, "big")).digest())


@dataclass(slots=True)
class _Origin:
    """Blocks first .. first+len(hashes)-1 that got this origin's name."""

    first: int
    before: PromptRuns
    """What the origin continues: blocks 0 .. first-1 under the names of others."""
    adapter: str | None = None
    salt: str | None = None
    hashes: list[bytes] = field(default_factory=list)
    tokens: array[int] = field(default_factory=lambda: array("I"))


@dataclass(frozen=True, slots=True)
class Named:
    """A request's blocks: `runs` of the prompt's full blocks, and the origin of the blocks after them."""

    origin: int
    runs: PromptRuns


class BlockNames:
    """Remembers names of about `most_blocks` blocks. The origins longest unused are forgotten first: a miss, no mix-up.

    `resident(origin)`: whether a cache still holds blocks of it, which is then kept. `forgotten` hears of what goes.
    """

    def __init__(
        self,
        block_tokens: int,
        most_blocks: int,
        resident: Callable[[int], bool] = lambda origin: False,
        forgotten: Callable[[int], None] = lambda origin: None,
    ) -> None:
        self.block_tokens = block_tokens
        self._most = most_blocks
        self._resident = resident
        self._forgotten = forgotten
        self._names: dict[bytes, tuple[int, int]] = {}
        self._origins: dict[int, _Origin] = {}
        self._next = 1

    def __len__(self) -> int:
        return len(self._names)

    def name(
        self,
        prompt: Sequence[int],
        outputs: Sequence[int],
        salt: str | None = None,
        lora: tuple[str, str] | None = None,
    ) -> Named:
        """Names for the blocks of a prompt and of the tokens that will follow it."""
        size = self.block_tokens
        tokens = [*prompt, *outputs]
        prompt_full, full = len(prompt) // size, len(tokens) // size
        adapter: ExtraKeys = (("lora", *lora),) if lora else ()
        parent: bytes | None = None
        digests = []
        for i in range(full):
            extra = (*adapter, ("cache_salt", salt)) if i == 0 and salt else adapter
            parent = block_hash(parent, tokens[i * size : (i + 1) * size], extra or None)
            digests.append(parent)
        known = 0
        runs: PromptRuns = []
        while known < prompt_full and (place := self._names.get(digests[known])) is not None:
            origin, pos = place
            if runs and runs[-1][0] == origin:
                runs[-1] = (origin, runs[-1][1], pos + 1)
            else:
                runs.append((origin, pos, pos + 1))
            known += 1
        own = self._continues(digests, known, prompt_full)
        if own is None:
            own, self._next = self._next, self._next + 1
            start = known if known < prompt_full else prompt_full
            self._origins[own] = _Origin(start, list(runs), lora[0] if lora else None, salt)
        if known < prompt_full:
            runs.append((own, known, prompt_full))
        self._register(own, digests, tokens)
        for used, _, _ in runs:
            if used in self._origins:
                self._origins[used] = self._origins.pop(used)
        self._forget()
        return Named(own, runs)

    def describe(self, origin: int, start: int, count: int) -> tuple[list[int], list[int]] | None:
        """Hashes as events carry them, and token ids, of blocks start .. start+count-1; None if forgotten."""
        entry = self._origins.get(origin)
        if entry is None or start < entry.first or start + count - entry.first > len(entry.hashes):
            return None
        a = start - entry.first
        size = self.block_tokens
        hashes = [event_hash(h) for h in entry.hashes[a : a + count]]
        return hashes, entry.tokens[a * size : (a + count) * size].tolist()

    def chain(self, origin: int, start: int, count: int) -> tuple[list[int], list[int]] | None:
        """As `describe`, also where the first of the blocks are named by what the origin continues."""
        entry = self._origins.get(origin)
        if entry is None:
            return None
        hashes: list[int] = []
        tokens: list[int] = []
        for owner, a, b in (*entry.before, (origin, entry.first, start + count)):
            a, b = max(a, start), min(b, start + count)
            if a < b:
                part = self.describe(owner, a, b - a)
                if part is None:
                    return None
                hashes += part[0]
                tokens += part[1]
        return (hashes, tokens) if len(hashes) == count else None

    def extra_keys(self, origin: int) -> tuple[str | None, str | None] | None:
        """LoRA adapter and cache salt that the origin's blocks are hashed with (the salt in block 0); None: neither."""
        entry = self._origins.get(origin)
        if entry is None or not (entry.adapter or entry.salt):
            return None
        return entry.adapter, entry.salt

    def _continues(self, digests: list[bytes], known: int, prompt_full: int) -> int | None:
        """An origin that the blocks from `prompt_full` on may go on under: they are its own or not yet named."""
        if known < prompt_full or known >= len(digests):
            return None
        place = self._names.get(digests[prompt_full])
        if place is None:
            return None
        origin = place[0]
        entry = self._origins.get(origin)
        if entry is None:
            return None
        for i in range(prompt_full, len(digests)):
            at = i - entry.first
            if at < len(entry.hashes) and entry.hashes[at] != digests[i]:
                return None
        return origin

    def _register(self, origin: int, digests: list[bytes], tokens: list[int]) -> None:
        entry = self._origins[origin]
        if not entry.hashes and entry.first >= len(digests):
            del self._origins[origin]
            return
        size = self.block_tokens
        for i in range(entry.first + len(entry.hashes), len(digests)):
            entry.hashes.append(digests[i])
            entry.tokens.extend(tokens[i * size : (i + 1) * size])
            self._names.setdefault(digests[i], (origin, i))

    def _forget(self) -> None:
        if len(self._names) <= self._most:
            return
        target = self._most * 3 // 4
        newest = next(reversed(self._origins))
        for origin in list(self._origins):
            if len(self._names) <= target:
                break
            if origin == newest or self._resident(origin):
                continue
            entry = self._origins.pop(origin)
            self._forgotten(origin)
            for at, digest in enumerate(entry.hashes):
                if self._names.get(digest) == (origin, entry.first + at):
                    del self._names[digest]
