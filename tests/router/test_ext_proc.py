"""What the ext_proc client does apart from talking to a router (test_llmd does that with the real one)."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading

import pytest

from harness.errors import ComponentError
from harness.router.ext_proc import ExtProcClient, _interrupts_wait, usage_chunk


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
