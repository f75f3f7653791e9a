"""What a bench records when workers die under it: failed calls, and a run that stays valid."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from harness.errors import ComponentError, InputError
from harness.experiment import Experiment
from harness.live.bench import SERVED_BY, run_bench
from harness.trace.model import Session
from harness.trace.write import write_trace
from tests.live.running import experiment
from tests.trace.trace_builders import call


@contextmanager
def _dying(model: str) -> Iterator[str]:
    """A gateway whose worker breaks off the first stream after a token and is gone afterwards."""
    asked: list[str] = []

    class Gateway(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self._answer(200, json.dumps({"data": [{"id": model}]}).encode())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            asked.append(self.path)
            if len(asked) > 1:
                self._answer(503, b"no healthy upstream")
                return
            chunk = json.dumps({"choices": [{"token_ids": [5], "text": "a"}]})
            self._answer(200, f"data: {chunk}\n\n".encode(), short=100)

        def _answer(self, status: int, body: bytes, short: int = 0) -> None:
            self.send_response(status)
            self.send_header(SERVED_BY, "127.0.0.1:1")
            self.send_header("content-length", str(len(body) + short))
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_killed_worker_leaves_failed_calls_and_a_valid_run(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    calls = [call(0, 0.0, 20, output_tokens=5), call(1, 1.0, 30, 0, 20, deps=(0,), gap_s=0.1, output_tokens=5)]
    write_trace(file, [Session(id="s", block_tokens=64, calls=calls)])
    changes = {"trace": {"path": str(file)}, "load": {"arrivals": "at_once"}}
    wanted = Experiment.model_validate(experiment(1).model_dump() | changes)
    with _dying("sim/model") as url:
        run = run_bench(wanted, url, tmp_path / "bench")
    assert run.calls["outcome"].to_list() == ["failed", "failed"]
    assert run.calls["first_token_ns"].is_not_null().to_list() == [True, False]
    assert run.calls["computed_tokens"].to_list() == [0, 0]
    assert run.summary["validity"]["valid"], run.info.invalid


def test_a_gap_that_leads_to_nothing_is_not_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    calls = [call(0, 0.0, 20, output_tokens=5), call(1, 1.0, 300, 0, 20, deps=(0,), gap_s=600, output_tokens=5)]
    write_trace(file, [Session(id="s", block_tokens=64, calls=calls)])
    changes = {"trace": {"path": str(file), "max_call_tokens": 2000}, "load": {"arrivals": "at_once"}}
    wanted = Experiment.model_validate(experiment(1, live={"speed": 1.0}).model_dump() | changes)
    began = time.monotonic()
    with _dying("sim/model") as url:
        run = run_bench(wanted, url, tmp_path / "bench")
    assert len(run.calls) == 1 and time.monotonic() - began < 60
    assert any("1 of 2 calls" in note for note in run.info.notes)


@contextmanager
def _answering(models: bytes, completion: bytes = b"", stop_after: int | None = None) -> Iterator[str]:
    """A server that answers so whatever it is asked; after some completions it is gone."""
    served: list[str] = []

    class Gateway(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self._answer(models)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self._answer(completion)
            served.append(self.path)
            if len(served) == stop_after:
                server.socket.close()
                Thread(target=server.shutdown, daemon=True).start()

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def _wanted(tmp_path: Path, calls: int) -> Experiment:
    file = tmp_path / "trace.jsonl"
    first = call(0, 0.0, 20, output_tokens=1)
    more = [call(i, float(i), 20, deps=(i - 1,), gap_s=1.0, output_tokens=1) for i in range(1, calls)]
    write_trace(file, [Session(id="s", block_tokens=64, calls=[first, *more])])
    changes = {"trace": {"path": str(file)}, "load": {"arrivals": "at_once"}}
    return Experiment.model_validate(experiment(1).model_dump() | changes)


MODELS = b'{"data": [{"id": "sim/model"}]}'


@pytest.mark.parametrize("models", [b"<html>hello</html>", b"[1]", b"{}", b'{"data": [{"name": 1}]}', b"\xff", b"null"])
def test_a_server_that_is_no_gateway_is_one_line(tmp_path: Path, models: bytes) -> None:
    with _answering(models) as url, pytest.raises(InputError, match="does not list its models"):
        run_bench(_wanted(tmp_path, 1), url, tmp_path / "bench")


def test_an_address_that_is_none_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--url http://h:port: is no address"):
        run_bench(_wanted(tmp_path, 1), "http://h:port", tmp_path / "bench")


@pytest.mark.parametrize(
    "line", [b"{", b"{}", b'{"choices": 3}', b'{"error": "x"}', b'{"choices": [], "usage": {"a": 1}}']
)
def test_an_answer_that_is_no_completion_is_a_failed_call(tmp_path: Path, line: bytes) -> None:
    with _answering(MODELS, b"data: " + line + b"\n\n") as url:
        run = run_bench(_wanted(tmp_path, 2), url, tmp_path / "bench")
    assert run.calls["outcome"].to_list() == ["failed", "failed"], "the session goes on after a call that failed"


def test_a_gateway_that_is_gone_ends_the_bench_with_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.live.bench._GONE_AFTER_S", 0.2)
    answer = b'data: {"choices": [{"token_ids": [5]}]}\n\n'
    with (
        _answering(MODELS, answer, stop_after=2) as url,
        pytest.raises(ComponentError, match="no longer answers") as caught,
    ):
        run_bench(_wanted(tmp_path, 10_000), url, tmp_path / "bench")
    assert caught.value.exit_code == 3 and "kept in" in str(caught.value)
    summary = json.loads((tmp_path / "bench/summary.json").read_text())
    assert summary["outcome"]["completed"] == 2 and summary["outcome"]["failed"] < 1000
    assert "gateway was gone" in summary["validity"]["reasons"][0]
