"""What a bench records when workers die under it: failed calls, and a run that stays valid."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

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
