"""What the ext_proc client does apart from talking to a router (test_llmd does that with the real one)."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from typing import Any

import pytest
from google.protobuf import json_format, struct_pb2
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import ComponentError
from harness.router.ext_proc import DESTINATION, ExtProcClient, _interrupts_wait, _scores, usage_chunk


def test_usage_chunk_is_what_vllm_streams_last() -> None:
    first, last, end = usage_chunk(100, 64, 7).split(b"\n\n")
    assert (last, end) == (b"data: [DONE]", b"")
    assert json.loads(first.removeprefix(b"data: "))["usage"] == {
        "prompt_tokens": 100,
        "completion_tokens": 7,
        "total_tokens": 107,
        "prompt_tokens_details": {"cached_tokens": 64},
    }


def test_interrupt_comes_after_the_answer(heard_interrupts: None) -> None:
    before = signal.getsignal(signal.SIGINT)
    done = False
    with pytest.raises(KeyboardInterrupt), _interrupts_wait():
        os.kill(os.getpid(), signal.SIGINT)
        done = True
    assert done and signal.getsignal(signal.SIGINT) is before


def test_second_interrupt_comes_at_once(heard_interrupts: None) -> None:
    with pytest.raises(KeyboardInterrupt), _interrupts_wait():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("was held back")


def test_other_threads_are_left_alone() -> None:
    seen = []

    def work() -> None:
        with _interrupts_wait():
            seen.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True]


def test_nobody_listens() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        client = ExtProcClient(s.getsockname()[1])
        assert not client.ready(0.2)
        with pytest.raises(ComponentError, match="UNAVAILABLE"):
            client.decide("r", "/v1/completions", {}, b"{}")
        assert client.open_requests == 0
        client.close()
        client.close()


@given(st.dictionaries(st.text(min_size=1, max_size=12), st.floats(0, 1e6), max_size=20), st.integers(0, 2))
def test_scores_are_what_the_metadata_says(scores: dict[str, float], depth: int) -> None:
    key = DESTINATION + "-scores"
    contents: list[dict[str, Any]] = [{}, {"envoy.lb": {"other": 1.0}}, {"envoy.lb": {"other": "x", key: scores}}]
    content = contents[depth]
    metadata = struct_pb2.Struct()
    metadata.update(content)
    said = json_format.MessageToDict(metadata).get("envoy.lb", {}).get(key, {})
    assert _scores(metadata) == said == (scores if depth == 2 else {})
