"""One worker from the command line, with vLLM's option names: `python -m fake_workers.api --profile NAME ...`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from fake_workers.api import serving
from fake_workers.api.serving import Link, LmcacheServer, Place, ServeSpec
from fake_workers.errors import HarnessError, InputError
from fake_workers.pricing.registry import load_profile


def parser() -> argparse.ArgumentParser:
    """All options."""
    p = argparse.ArgumentParser(prog="python -m fake_workers.api", description=__doc__)
    p.add_argument("--profile", required=True, help="step-time profile (harness profile list)")
    p.add_argument("--served-model-name", help="default: the profile's model")
    p.add_argument("--name", default="worker", help="the pod's name")
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, default=8000)
    p.add_argument("--address", help="the address by which the router knows this worker; default: --host")
    p.add_argument("--max-model-len", type=int)
    p.add_argument("--num-gpu-blocks-override", type=int, help="default: the profile's memory account")
    p.add_argument("--block-size", type=int, help="default: the profile's")
    p.add_argument("--max-num-seqs", type=int, default=256)
    p.add_argument("--max-num-batched-tokens", type=int, default=8192)
    p.add_argument("--scheduling-policy", choices=["fcfs", "priority"], default="fcfs")
    p.add_argument("--max-num-queued-reqs", type=int)
    p.add_argument("--max-num-queued-tokens", type=int)
    p.add_argument("--tokenizer", help="folder of a Hugging Face tokenizer; default: a built-in one")
    p.add_argument("--kv-events-port", type=int, help="publish KV events on this port")
    p.add_argument("--kv-events-replay-port", type=int)
    p.add_argument("--speed", type=float, default=1.0, help="engine seconds per second")
    p.add_argument("--mean-output-tokens", type=int, default=256)
    p.add_argument("--kv-gbytes-per-s", type=float, help="fetch prompts that a prefill worker has computed, so fast")
    p.add_argument(
        "--lmcache-server", metavar="URL", help="LMCache's server process below this worker (tcp://host:port)"
    )
    p.add_argument("--lmcache-gbytes-per-s", type=float, default=63.0, help="from its memory to each GPU, GB/s")
    p.add_argument("--records", help="a file that gets one JSON line per request")
    p.add_argument("--no-dev-mode", action="store_true", help="without sleep, pause, cache reset, LoRA loading")
    return p


def specification(arguments: argparse.Namespace) -> ServeSpec:
    """The same as a specification; InputError where vLLM would refuse to start."""
    profile = load_profile(arguments.profile)
    block = arguments.block_size or profile.block_tokens
    blocks = arguments.num_gpu_blocks_override or profile.kv_capacity_tokens // block
    longest = arguments.max_model_len or min(profile.max_model_len, (blocks - 1) * block)
    if (blocks - 1) * block < longest or longest < 1:
        what = f"{longest} tokens do not fit {blocks - 1} KV blocks of {block} tokens"
        raise InputError("--max-model-len", what, "lower it, or raise --num-gpu-blocks-override")
    return ServeSpec(
        profile=arguments.profile,
        model=arguments.served_model_name or profile.model,
        engine={
            "num_gpu_blocks": blocks,
            "block_tokens": block,
            "max_model_len": longest,
            "max_num_seqs": arguments.max_num_seqs,
            "max_num_batched_tokens": arguments.max_num_batched_tokens,
            "policy": arguments.scheduling_policy,
        },
        groups=[[Place(name=arguments.name, host=arguments.host, port=arguments.port, address=arguments.address)]],
        speed=arguments.speed,
        tokenizer=arguments.tokenizer,
        mean_output_tokens=arguments.mean_output_tokens,
        max_num_queued_reqs=arguments.max_num_queued_reqs,
        max_num_queued_tokens=arguments.max_num_queued_tokens,
        dev_mode=not arguments.no_dev_mode,
        events_port=arguments.kv_events_port,
        replay_port=arguments.kv_events_replay_port,
        kv_link=Link(gbytes_per_s=arguments.kv_gbytes_per_s) if arguments.kv_gbytes_per_s else None,
        lmcache=LmcacheServer(url=arguments.lmcache_server, gbytes_per_s=arguments.lmcache_gbytes_per_s)
        if arguments.lmcache_server
        else None,
        records=arguments.records,
    )


def main() -> int:
    """Entry point."""
    try:
        spec = specification(parser().parse_args())
    except HarnessError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.json"
        path.write_text(spec.model_dump_json())
        return serving.main([str(path)])


if __name__ == "__main__":
    sys.exit(main())
