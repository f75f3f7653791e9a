"""What of a TTFT passes outside the engine, as measured for each part (harness/front_end.py, docs/front-end.md)."""

from __future__ import annotations

from harness.front_end import MEASURED

_PER_REQUEST_MS = ("client_ms", "api_server_ms", "engine_input_ms", "output_ms")


def around_ms(prompt_tokens: int, tokenises: bool = True) -> float:
    """A lone request sent straight to a server: all parts between its client and the engine, both ways."""
    per_token_us = MEASURED["engine_input_us_per_token"].value
    if tokenises:
        per_token_us += MEASURED["tokenise_us_per_token"].value
    return sum(MEASURED[name].value for name in _PER_REQUEST_MS) + prompt_tokens * per_token_us / 1e3
