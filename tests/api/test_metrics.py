"""The /metrics page."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from fake_workers.api.metrics import render
from fake_workers.engine.gauges import Gauges

LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[^}]*\})? (\S+)$")


def parse(page: bytes) -> dict[str, tuple[str, float]]:
    """Samples by name, as Prometheus' text format defines them; every line must be one or a comment."""
    found = {}
    text = page.decode()
    assert text.endswith("\n")
    for line in text.splitlines():
        if not line.startswith("#"):
            match = LINE.match(line)
            assert match, line
            found[match[1]] = (match[2] or "", float(match[3]))
    return found


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.floats(0, 1))
def test_gauges_come_out_exactly(running: int, waiting: int, kv_usage: float) -> None:
    page = parse(render(Gauges(running, waiting, kv_usage), model="m", block_tokens=16, num_gpu_blocks=1000))
    assert page["vllm:num_requests_running"][1] == running
    assert page["vllm:num_requests_waiting"][1] == waiting
    assert page["vllm:kv_cache_usage_perc"][1] == kv_usage


def test_cache_config_and_extra_gauges() -> None:
    extra = {"sim:tiebreak": 3.0}
    page = parse(render(Gauges(0, 0, 0.5), model="m", block_tokens=64, num_gpu_blocks=4802, extra=extra))
    labels, value = page["vllm:cache_config_info"]
    assert 'block_size="64"' in labels and 'num_gpu_blocks="4802"' in labels and value == 1
    assert page["sim:tiebreak"][1] == 3.0
    assert page["vllm:num_requests_running"][0] == '{engine="0",model_name="m"}'
