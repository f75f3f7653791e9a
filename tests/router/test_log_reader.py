"""What the router's log says of a run: fallbacks counted by request, errors kept, noise left out."""

from __future__ import annotations

import json

from harness.router.log_reader import LogReader


def _line(message: str, level: str = "error", **more: str) -> bytes:
    return json.dumps({"level": level, "ts": 1.5, "msg": message, **more}, separators=(",", ":")).encode()


def test_what_is_said_once_per_endpoint_counts_once_per_request() -> None:
    log = LogReader()
    for request in ("a/1", 'a"/2'):
        for endpoint in ("w0", "w1", "w2"):
            more = {"x-request-id": request, "endpoint": endpoint}
            assert log.line(_line("PrefixCacheMatchInfo not found for endpoint, assigning score 0", **more))
    log.line(_line("failed to prepare per request data", **{"x-request-id": "a/1"}))
    assert log.fallbacks == {"scored without prefix data": 2, "routed without prefix data (producer time-out)": 1}


def test_what_belongs_to_no_request_counts_every_time() -> None:
    log = LogReader()
    for _ in range(3):
        log.line(_line("Failed to parse message"))
    assert log.fallbacks == {"KV events dropped, their message could not be read": 3}


def test_noise_is_not_kept() -> None:
    log = LogReader()
    assert not log.line(_line("anything", level="debug"))
    assert not log.line(_line("totalBlocks is set to 0"))
    assert log.refusal() is None and log.lines == 2
    log.line(_line("no such plugin", error="boom"))
    assert log.refusal() == "no such plugin: boom"
