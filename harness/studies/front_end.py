"""The front end of a published fleet: each part as measured (harness/front_end.py), for the text that its load sends.

inference-perf sends text made of random token ids. Such text costs other time to tokenise than prose, growing with its
length; measured with Qwen's tokenizer (benchmarks/front_end.py tokens, one core, least of 15).
"""

from __future__ import annotations

import numpy as np

from harness.front_end import FrontEndConfig
from harness.studies.ladder import Arm, Ladder

_COUNTED_TOKENS = (1_073.0, 7_556.0, 9_448.0, 17_087.0, 34_464.0, 68_970.0)
_US_PER_TOKEN = (1.18, 2.10, 2.57, 3.46, 3.46, 3.23)


def tokenise_us_per_token(prompt_tokens: int) -> float:
    """Microseconds per token of tokenising a prompt of random-token text."""
    return round(float(np.interp(prompt_tokens, _COUNTED_TOKENS, _US_PER_TOKEN)), 3)


def front_end_of(ladder: Ladder, arm: Arm, prompt_tokens: int) -> FrontEndConfig:
    """The ladder's own front end if it states one; else every part as measured, those that the arm does not have at 0.

    A Kubernetes Service forwards packets: no gateway, no router. A router with precise prefix scoring tokenises too.
    """
    if ladder.front_end is not None:
        return ladder.front_end
    tokenise = tokenise_us_per_token(prompt_tokens)
    parts: dict[str, float] = {"tokenise_us_per_token": tokenise}
    if arm.config is None:
        parts |= {"gateway_ms": 0, "router_ms": 0, "router_us_per_token": 0}
    elif "precise" in arm.config:
        parts["router_tokenise_us_per_token"] = tokenise
    return FrontEndConfig.model_validate({"parts": "measured", **parts})
