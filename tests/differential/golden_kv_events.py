"""Writes tests/api/golden_kv_events.json: KV-event frames as vLLM 0.32's own publisher puts them on the wire.

    $(harness engine install) -m tests.differential.golden_kv_events

A small workload runs on vLLM's scheduler; its event batches, a cache reset among them, go through vLLM's
ZmqEventPublisher and are received by a SUB socket, and again by a DEALER socket from the replay endpoint.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fake_workers.vllm_engine import torch_stub

torch_stub.install()

import msgspec  # noqa: E402
import zmq  # noqa: E402
from vllm.distributed.kv_events import ZmqEventPublisher  # noqa: E402
from vllm.version import __version__ as vllm_version  # noqa: E402

from fake_workers.engine.scheduler import SchedulerConfig  # noqa: E402
from tests.differential.vllm_engine import VllmEngine  # noqa: E402
from tests.engine.workload import Spec, Workload  # noqa: E402

TARGET = Path(__file__).parents[1] / "api" / "golden_kv_events.json"
TOPIC = "kv@127.0.1.10:8000@some/model"
RANK = 3


def batches() -> list[Any]:
    """Event batches of a small engine: stores with and without parent, several blocks, evictions, a reset."""
    config = SchedulerConfig(num_gpu_blocks=8, block_tokens=16, max_model_len=200, async_scheduling=False)
    requests = (
        Spec("r0", 0, ((0, 0, 3),), 50, 20, 1),
        Spec("r1", 1, ((0, 0, 2), (1, 2, 4)), 70, 3, 30),
        Spec("r2", 2, ((2, 0, 6),), 100, 2, 60),
    )
    engine = VllmEngine(Workload(config, requests))
    out: list[Any] = []
    named = engine.scheduler.kv_event_publisher.publish

    def publish(batch: Any) -> None:
        named(batch)
        out.append(batch)

    engine.scheduler.kv_event_publisher.publish = publish
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    engine.scheduler.update_from_output(engine.scheduler.schedule(), engine.model_executor.last.result())
    for at, batch in enumerate(out):
        batch.ts = 1000.0 + at / 8
    return out


def main() -> None:
    """Publish, receive, write."""
    events = batches()
    publisher = ZmqEventPublisher(RANK, "inproc://events", "inproc://replay", topic=TOPIC)
    config = publisher.get_publisher_config()
    context = zmq.Context.instance()
    subscriber = context.socket(zmq.SUB)
    subscriber.connect(config.endpoint)
    subscriber.subscribe(b"")
    dealer = context.socket(zmq.DEALER)
    dealer.connect(config.replay_endpoint)
    time.sleep(0.3)  # a PUB socket drops what nobody has subscribed to yet
    for batch in events:
        publisher.publish(batch)
    frames = [subscriber.recv_multipart() for _ in events]
    first = 1
    dealer.send_multipart([b"", first.to_bytes(8, "big")])
    replay = []
    while not replay or replay[-1][2] != publisher.END_SEQ:
        replay.append(dealer.recv_multipart())
    publisher.shutdown()
    subscriber.close()
    dealer.close()
    golden = {
        "vllm": vllm_version,
        "topic": TOPIC,
        "data_parallel_rank": RANK,
        "batches": [
            {
                "frames": [part.hex() for part in parts],
                "ts": batch.ts,
                "events": msgspec.to_builtins(batch.events),
            }
            for parts, batch in zip(frames, events, strict=True)
        ],
        "replay": {
            "request": ["", first.to_bytes(8, "big").hex()],
            "replies": [[part.hex() for part in parts] for parts in replay],
        },
    }
    TARGET.write_bytes(
        msgspec.json.format(msgspec.json.encode(golden), indent=0).replace(b', {"frames"', b',\n{"frames"')
    )
    print(f"{TARGET}: {len(frames)} batches, {len(replay)} replies")


if __name__ == "__main__":
    main()
