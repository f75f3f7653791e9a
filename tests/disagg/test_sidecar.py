"""The sidecar's state machine against the exchange that was captured from the real one (router v0.10.0)."""

from __future__ import annotations

from typing import Any

import pytest

from harness.disagg.sidecar import Exchange, client_cached_tokens

CLIENT = {
    "model": "m",
    "prompt": [1, 2, 3],
    "max_tokens": 250,
    "stream": True,
    "stream_options": {"include_usage": True},
}
PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "e0",
    "remote_block_ids": [[3, 4]],
    "remote_request_id": "cmpl-1",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}


def exchange(protocol: str, prefiller: str | None = "127.0.0.1:8301", body: Any = None) -> Exchange:
    return Exchange(protocol, body or CLIENT, prefiller, lambda: "12345")


def test_without_a_prefiller_the_body_passes_unchanged() -> None:
    (send,) = exchange("nixlv2", None).start()
    assert send.leg == "decode" and send.body == CLIENT and not send.headers


def test_nixlv2_asks_prefill_for_one_token_and_hands_its_parameters_on_verbatim() -> None:
    one = exchange("nixlv2")
    (prefill,) = one.start()
    assert prefill.leg == "prefill" and prefill.headers == {"x-request-id": "12345"}
    assert prefill.body == {
        "model": "m",
        "prompt": [1, 2, 3],
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "min_tokens": 1,
        "stream": False,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }
    (decode,) = one.answered(200, {"kv_transfer_params": PARAMS})
    assert decode.leg == "decode" and decode.headers == prefill.headers
    assert decode.body == {**CLIENT, "kv_transfer_params": PARAMS}
    assert one.answered(200, {}) == []


def test_a_failed_prefill_ends_the_request_and_missing_parameters_do_not() -> None:
    one = exchange("nixlv2")
    one.start()
    assert one.answered(503, {"error": "x"}) == [] and one.failed == (503, {"error": "x"})
    other = exchange("nixlv2")
    other.start()
    (decode,) = other.answered(200, {})
    assert decode.body["kv_transfer_params"] is None


def test_shared_storage_is_serial_and_overrides_the_threshold() -> None:
    one = exchange("shared-storage")
    (prefill,) = one.start()
    assert prefill.body == {**CLIENT, "max_tokens": 1, "max_completion_tokens": 1, "cache_hit_threshold": 0}
    (decode,) = one.answered(200, {})
    assert decode.body == {**CLIENT, "cache_hit_threshold": 0}


@pytest.mark.parametrize("protocol", ["sglang", "offloading"])
def test_concurrent_protocols_ask_both_at_once(protocol: str) -> None:
    one = exchange(protocol)
    prefill, decode = one.start()
    assert one.concurrent and (prefill.leg, decode.leg) == ("prefill", "decode")
    assert one.answered(200, {"kv_transfer_params": PARAMS}) == []
    if protocol == "sglang":
        room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 12345}
        assert prefill.body == decode.body == {**CLIENT, **room}
    else:
        remote = {"kv_request_id": "12345", "remote_host": "127.0.0.1", "remote_port": 7777}
        assert decode.body == {**CLIENT, "kv_transfer_params": {"remote_prefiller": remote}}
        assert prefill.body["kv_transfer_params"] == {"remote_decoder": {"kv_request_id": "12345"}}
        assert (prefill.body["max_tokens"], prefill.body["stream"]) == (1, False)
        assert "max_completion_tokens" not in prefill.body and "stream_options" not in prefill.body


def test_the_client_sees_the_prefill_workers_cached_tokens() -> None:
    assert client_cached_tokens({"usage": {"prompt_tokens_details": {"cached_tokens": 7}}}) == 7
    assert client_cached_tokens({"usage": {"prompt_tokens_details": None}}) == 0
    assert client_cached_tokens({}) == 0
