"""A trace in memory: sessions of calls whose prompts are runs of blocks (see docs/trace-format.md)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SharedPrefix:
    """Leading blocks that sessions with the same key have in common (a system prompt, tool definitions)."""

    key: str
    blocks: int


@dataclass(slots=True)
class Call:
    """One request of a session.

    Block p of the prompt is block p of call `ref` for p < `keep_blocks`, else a block that no call had
    before. Ids are chained: an equal block means an equal prefix up to and including it. `input_tokens` may
    exceed (keep_blocks + new_blocks) * block_tokens by a partial tail. The call is released `gap_s` after the
    latest of: the end of every call in `deps`, the start of call `on_start`; with neither, `gap_s` after the
    session's start.
    """

    index: int
    t_s: float
    api_s: float | None
    chain: str
    input_tokens: int
    output_tokens: int
    ref: int
    keep_blocks: int
    new_blocks: int
    deps: tuple[int, ...] = ()
    on_start: int | None = None
    gap_s: float = 0.0
    model: str | None = None
    stop: str | None = None
    prefix: int = -1
    """Index into Session.prefix, only with `ref` -1: the first blocks of this prompt are that shared prefix.
    They count as new inside the session; a cache that other sessions use too may hold them already. -1:
    nothing shared.
    """

    @property
    def blocks(self) -> int:
        """Full blocks of the prompt."""
        return self.keep_blocks + self.new_blocks

    @property
    def generated_tokens(self) -> int:
        """Output when replayed: an engine generates at least one token, also where the source recorded none."""
        return max(1, self.output_tokens)

    @property
    def sequence_tokens(self) -> int:
        """Prompt plus output when replayed."""
        return self.input_tokens + self.generated_tokens


@dataclass(slots=True)
class Session:
    """Calls in order of their recorded start; `start_s` is the session's recorded arrival, None where the
    source has none.
    """

    id: str
    block_tokens: int
    calls: list[Call]
    scope: str = "local"
    prefix: tuple[SharedPrefix, ...] = field(default=())
    start_s: float | None = None
