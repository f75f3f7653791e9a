"""What is known, from measurements, of the time between a client's request and the engine taking it in.

Only the parts with a published measurement are here; HTTP hops, the gateway, the engine's own input processing and the
way back of the first token have none that we know of, so a measured TTFT stays above this.

Tokenising: 101,615 tokens in 220.38 ms, 43,359 in 87.85 ms, 10,840 in 20.46 ms on one core; JSON 0.82 ms at 100k
tokens (github.com/andyluo7/cpu-gpu-codesign-agentic-inference, 2026-05-14, raw files). Another model's tokenizer on
another machine: a size, not a fit. Requests that wait for a busy tokenizer are not modelled.
"""

from __future__ import annotations

import numpy as np

_TOKENS = (0.0, 10_840.0, 43_359.0, 101_615.0)
_TOKENISE_MS = (0.0, 20.46, 87.85, 220.38)
_JSON_MS_PER_TOKEN = 0.82 / 101_615


def pre_engine_ms(prompt_tokens: int, router_tokenises: bool) -> float:
    """Milliseconds before the engine's queue: tokenising in the engine, once more in a router that does; JSON each."""
    once = float(np.interp(prompt_tokens, _TOKENS, _TOKENISE_MS)) + prompt_tokens * _JSON_MS_PER_TOKEN
    return round(once * (2 if router_tokenises else 1), 3)
