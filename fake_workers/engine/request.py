"""One request inside an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fake_workers.engine.blocks import PromptRuns, Run

if TYPE_CHECKING:
    from fake_workers.engine.connector import Transfer


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A request as vLLM's scheduler sees it. Times are virtual ns, None until they happen.

    `runs` names the prompt's full blocks; blocks from there on (the partial tail, filled up by output tokens) belong to
    `origin`, the request's own content. `output_tokens` is how many tokens the model will generate (ignore_eos).
    """

    request_id: str
    origin: int
    runs: PromptRuns
    prompt_tokens: int
    output_tokens: int
    arrival_ns: int
    priority: int = 0

    # scheduler state, named as in vLLM
    computed: int = 0
    """num_computed_tokens: advanced when scheduled, not when executed."""
    outputs: int = 0
    """Tokens sampled and returned so far."""
    placeholders: int = 0
    """Async scheduling: sampled tokens in flight (num_output_placeholders)."""
    in_flight: int = 0
    """Tokens scheduled but not yet processed (num_in_flight_tokens)."""
    stale: int = 0
    """Share of `in_flight` scheduled before a preemption (num_stale_output_tokens)."""
    running: bool = False
    finished: bool = False
    preemptions: int = 0

    # blocks
    held: list[Run] = field(default_factory=list)
    """Blocks with identity, in position order."""
    cached_blocks: int = 0
    """How many blocks `held` covers."""
    blocks: int = 0
    """All blocks held, those without identity included."""

    # what the client and the records see
    hit_tokens: int | None = None
    """Prompt tokens found in the GPU cache at first admission."""
    admitted_ns: int | None = None
    first_token_ns: int | None = None
    finish_ns: int | None = None

    # only with a connector
    transfer: Transfer | None = None
    failed: bool = False
    """Ended in an error: its load failed."""
    external_tokens: int = 0
    """Tokens that came through the connector, over all its loads."""
    external_by_tier: dict[str, int] | None = None
    """The same by tier, as the connector names them."""
    restore_ns: int = 0
    """Time that loads held it out of the batch, from start to end of each."""

    @property
    def tokens(self) -> int:
        """num_tokens: prompt plus sampled tokens."""
        return self.prompt_tokens + self.outputs

    def known_runs(self, block_tokens: int) -> PromptRuns:
        """Runs of every full block of prompt and outputs so far."""
        full = self.tokens // block_tokens
        prompt_full = self.prompt_tokens // block_tokens
        if full == prompt_full:
            return self.runs
        return [*self.runs, (self.origin, prompt_full, full)]
