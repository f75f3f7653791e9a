"""Another simulator on the same trace: NVIDIA Dynamo's offline replay against ours, round robin, no cache tiers.

    python -m venv DIR && DIR/bin/pip install --no-deps ai-dynamo-runtime==1.6.1 ai-dynamo==1.6.1
    DIR/bin/pip install typing_extensions msgspec
    python benchmarks/second_opinion.py DIR/bin/python MOONCAKE_TRACE.jsonl

The trace: one request a line (timestamp, input_length, output_length, hash_ids of 512 tokens). Prints the share of
prompt tokens found in the GPU cache, four workers, for several sizes of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

SIZES = (8_192, 20_000, 50_000, 200_000)
WORKERS, BLOCK, TRACE_BLOCK = 4, 16, 512
THEIRS = """
import json, sys
from dynamo.replay import run_trace_replay
engine = {"backend": "vllm", "block_size": int(sys.argv[3]), "num_gpu_blocks": int(sys.argv[2])}
report = run_trace_replay([sys.argv[1]], extra_engine_args={"engine": engine}, num_workers=int(sys.argv[4]),
                          trace_format="mooncake", trace_block_size=int(sys.argv[5]), router_mode="round_robin")
summary = getattr(report, "summary", report)
keys = ("first_admission_prefix_cache_reused_ratio", "duration_ms")
print(json.dumps({key: summary[key] for key in keys}))
"""


def ours(trace: Path, folder: Path, blocks: int) -> dict[str, float]:
    """Summary of our run."""
    experiment = folder / "experiment.yaml"
    engine = {"num_gpu_blocks": blocks + 1, "block_size": BLOCK, "max_model_len": 131_072}  # vLLM's null block
    document = {
        "name": "second-opinion",
        "trace": {"path": str(trace)},
        "load": {"arrivals": "recorded", "client_timeout_s": None},
        "cluster": {"nodes": 1, "gpus_per_node": 2 * WORKERS, "engine": engine},
        "model": {"profile": "llama-3.3-70b-fp8-tp2-b200"},
        "router": {"kind": "round_robin"},
        "output": {"report": False},
    }
    experiment.write_text(json.dumps(document))
    command = [
        sys.executable,
        "-m",
        "harness",
        "run",
        str(experiment),
        "--out",
        str(folder / f"run-{blocks}"),
        "--json",
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    summary = json.loads(done.stdout)
    return {"reused": summary["hit_rate"]["token"], "duration_s": summary["virtual_s"]}


def main() -> None:
    """One line per cache size."""
    python, trace = sys.argv[1], Path(sys.argv[2]).resolve()
    print("blocks per worker | reused, dynamo | reused, ours | points apart | duration s, dynamo | ours")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        converted = folder / "trace.jsonl.gz"
        convert = [sys.executable, "-m", "harness", "trace", "convert", str(trace), str(converted)]
        subprocess.run(convert, check=True, capture_output=True)
        for blocks in SIZES:
            arguments = [str(trace), str(blocks), str(BLOCK), str(WORKERS), str(TRACE_BLOCK)]
            done = subprocess.run([python, "-c", THEIRS, *arguments], check=True, capture_output=True, text=True)
            theirs = json.loads(done.stdout.splitlines()[-1])
            mine = ours(converted, folder, blocks)
            reused = 100 * theirs["first_admission_prefix_cache_reused_ratio"], 100 * mine["reused"]
            print(
                f"{blocks:>17,} | {reused[0]:>12.3f} % | {reused[1]:>10.3f} % | {reused[1] - reused[0]:>+12.3f} | "
                f"{theirs['duration_ms'] / 1e3:>18.1f} | {mine['duration_s']:.1f}"
            )


if __name__ == "__main__":
    main()
