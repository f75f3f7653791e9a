"""What the live cluster carries: `python -m benchmarks.live [--stack]`.

Without options: one worker process, streams straight to it, more and more at once: tokens per second, CPU per token.
With --stack: 16 workers behind Envoy and the router, 1,000 requests in flight.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from harness.experiment import Experiment
from harness.live.stack import plan_stack

PROFILE = "qwen3-32b-bf16-tp2-h100"


def experiment(workers: int, gateway: str, processes: int) -> Experiment:
    return Experiment.model_validate(
        {
            "name": "live-benchmark",
            "trace": {"path": "none"},
            "cluster": {"nodes": 1, "gpus_per_node": 2 * workers},
            "model": {"profile": PROFILE},
            "router": {"release": "v0.10.0", "config": "load"},
            "live": {"gateway_port": 0, "page_port": 0, "gateway": gateway, "processes": processes, "kv_events": False},
        }
    )


async def request(base: str, body: dict[str, Any]) -> tuple[int, int]:
    """(status, events in the answer) over a connection of its own."""
    host, port = base.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    status = int((await reader.readline()).split()[1])
    events = 0
    while chunk := await reader.read(1 << 16):
        events += chunk.count(b"data: {")
    writer.close()
    return status, events


async def all_of_them(base: str, bodies: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return await asyncio.gather(*(request(base, body) for body in bodies))


def one_process() -> None:
    print("streams  tokens/s  of the engine's own  CPU of the worker  CPU per token, us")
    for streams in (16, 64, 128, 256):
        with tempfile.TemporaryDirectory() as folder:
            stack = plan_stack(experiment(1, "none", 1), Path(folder))
            stack.start()
            try:
                worker = stack.workers[0].process
                assert worker is not None
                process = psutil.Process(worker.pid)
                tokens = 300
                bodies = [
                    {"prompt": f"stream {i}", "max_tokens": tokens, "ignore_eos": True, "stream": True}
                    for i in range(streams)
                ]

                before, began = sum(process.cpu_times()[:2]), time.monotonic()
                answers = asyncio.run(all_of_them(stack.addresses.workers[0], bodies))
                wall, cpu = time.monotonic() - began, sum(process.cpu_times()[:2]) - before
                assert all(answer == (200, tokens) for answer in answers), answers[:3]
                made = streams * tokens
                records = [json.loads(x) for p in Path(folder).glob("*.jsonl") for x in p.open()]
            finally:
                stack.close()
            records = records or [json.loads(x) for p in Path(folder).glob("*.jsonl") for x in p.open()]
            engine = max(r["finish_ns"] for r in records) - min(r["arrival_ns"] for r in records)
            print(
                f"{streams:7d}  {made / wall:8.0f}  {engine / 1e9 / wall:18.0%}  {cpu / wall:17.0%}  "
                f"{1e6 * cpu / made:17.0f}"
            )


def whole_stack(in_flight: int = 1000, workers: int = 16) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stack = plan_stack(experiment(workers, "envoy", 2), Path(folder))
        stack.start(lambda line: print(line))
        try:
            for stream in (False, True):
                body = {"model": stack.model, "max_tokens": 60, "ignore_eos": True, "stream": stream}
                bodies = [{**body, "prompt": f"request {stream} {i} " * 5} for i in range(in_flight)]

                began = time.monotonic()
                answers = asyncio.run(all_of_them(stack.addresses.gateway, bodies))
                wall = time.monotonic() - began
                statuses = {s: sum(1 for a in answers if a[0] == s) for s in {a[0] for a in answers}}
                what = "streamed" if stream else "whole"
                print(f"{in_flight} in flight, {workers} workers, {what}: statuses {statuses}, {wall:.1f} s, "
                      f"{in_flight * 60 / wall:.0f} tokens/s")  # fmt: skip
        finally:
            stack.close()


if __name__ == "__main__":
    print(f"load average {os.getloadavg()[0]:.1f} on {psutil.cpu_count()} cores")
    whole_stack() if "--stack" in sys.argv else one_process()
