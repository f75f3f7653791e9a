"""Requests before a run, where the router's own order is one of a map, which no seed reaches.

One cold request to every endpoint, for scorers that rank endpoints without one in the order of a map:
with every endpoint known it no longer matters, and the first real cold requests go round the endpoints in a random
order as they would without this, but in the same one in every run of a seed.

A probe, where it is drawn at the router's start whether its count of tokens in flight sees what is cached.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from harness.router.base import Endpoint, RouteRequest

_ORIGIN = 1 << 37
"""Prompts of no call: a call's origin is its number in the trace."""
_PROBE_TOKENS = 4096


def cold_requests(
    endpoints: Sequence[Endpoint], seed: int, model: str, blocks: int, block_tokens: int
) -> Iterator[tuple[Endpoint, RouteRequest]]:
    """Each endpoint once, with a prompt of `blocks` engine blocks that nobody holds."""
    order = list(endpoints)
    random.Random(f"cold-start:{seed}").shuffle(order)
    for endpoint in order:
        runs = [(_ORIGIN + endpoint.index, 0, blocks)]
        yield endpoint, RouteRequest(f"cold-{endpoint.index}", "", model, runs, blocks * block_tokens, 1)


def probe_request(
    endpoints: Sequence[Endpoint], model: str, multiple: int, block_tokens: int
) -> tuple[Endpoint, RouteRequest]:
    """A prompt of its own, of some thousand tokens (a multiple of `multiple` blocks), for the first endpoint."""
    blocks = -(-_PROBE_TOKENS // (multiple * block_tokens)) * multiple
    runs = [(_ORIGIN + len(endpoints), 0, blocks)]
    return endpoints[0], RouteRequest("probe", "", model, runs, blocks * block_tokens, 1)
