"""CPU time of what stands around the GPU, one core: HTTP, parsing, event stream, tokenising, detokenising.

    python -m venv fe && fe/bin/pip install aiohttp fastapi uvicorn uvloop httptools tokenizers msgspec pydantic \\
        cachetools cbor2 cloudpickle pyzmq psutil regex pyyaml numpy
    fe/bin/python benchmarks/front_end.py http --vllm PATH/TO/site-packages-with-vllm
    fe/bin/python benchmarks/front_end.py tokens --tokenizer tokenizer.json --text some-prose.txt

`http`: FastAPI on uvicorn (uvloop, httptools) with vLLM's own CompletionRequest and CompletionStreamResponse (its
Python sources suffice, torch is replaced as in tests/differential), an aiohttp client in another process, one request
at a time; then vLLM's OutputProcessor.
`tokens`: tokenizers' encode of prose and of text made of random token ids (what inference-perf sends), DecodeStream.
Times are CPU times of the process in question, so a busy machine changes them little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

PROMPT_BYTES = 46_268
REQUESTS = 300
CHUNKS = 400
PORT = 18_923


def _vllm_protocol(site: str) -> Any:
    """vLLM's request and response classes, its heavy imports replaced by placeholders."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.path.append(site)
    from tests.differential import torch_stub

    real = {"fastapi", "starlette", "uvloop", "aiohttp", "tokenizers", "requests", "httpx", "tqdm", "urllib3"}
    torch_stub._ROOTS = torch_stub._ROOTS - real  # type: ignore[misc]
    torch_stub.install()
    from vllm.entrypoints.openai.completion import protocol

    return protocol


def _serve(site: str) -> None:
    protocol = _vllm_protocol(site)
    import uvicorn
    from fastapi import FastAPI, Request
    from fastapi.responses import StreamingResponse

    app = FastAPI()

    async def stream(request: Any) -> Any:
        for i in range(request.max_tokens):
            chunk = protocol.CompletionStreamResponse(
                id="cmpl-0123456789abcdef",
                created=1_700_000_000,
                model="m",
                choices=[protocol.CompletionResponseStreamChoice(index=0, text=" token", finish_reason=None)],
            )
            yield f"data: {chunk.model_dump_json(exclude_unset=False)}\n\n"
            if i % 8 == 7:
                await asyncio.sleep(0)
        yield "data: [DONE]\n\n"

    async def completions(raw: Any) -> Any:
        request = protocol.CompletionRequest.model_validate(await raw.json())
        return StreamingResponse(content=stream(request), media_type="text/event-stream")

    # FastAPI resolves annotations by name in the module, where these imports are not
    completions.__annotations__ = {"raw": Request, "return": None}
    app.post("/v1/completions", response_model=None)(completions)

    @app.get("/cpu")
    async def cpu() -> float:
        return time.process_time()

    uvicorn.run(app, host="127.0.0.1", port=PORT, log_level="error", loop="uvloop", http="httptools")


async def _drive() -> None:
    import aiohttp

    body = json.dumps({"model": "m", "prompt": "abcdefgh" * (PROMPT_BYTES // 8), "stream": True})
    url = f"http://127.0.0.1:{PORT}"
    async with aiohttp.ClientSession() as session:
        for _ in range(150):
            try:
                async with session.get(f"{url}/cpu"):
                    break
            except aiohttp.ClientError:
                await asyncio.sleep(0.2)

        async def server_cpu() -> float:
            async with session.get(f"{url}/cpu") as answer:
                return float(await answer.text())

        async def batch(requests: int, chunks: int, prompt: int) -> tuple[float, float, float]:
            """CPU ms per request: server, client; wall ms, median."""
            payload = json.loads(body) | {"max_tokens": chunks}
            payload["prompt"] = payload["prompt"][:prompt]
            before, mine, walls = await server_cpu(), time.process_time(), []
            for _ in range(requests):
                begin = time.perf_counter()
                async with session.post(f"{url}/v1/completions", json=payload) as answer:
                    answer.raise_for_status()
                    async for _line in answer.content:
                        pass
                walls.append(time.perf_counter() - begin)
            server = (await server_cpu() - before) / requests
            return server * 1e3, (time.process_time() - mine) / requests * 1e3, statistics.median(walls) * 1e3

        await batch(50, 1, PROMPT_BYTES)
        for prompt in (40, PROMPT_BYTES, 10 * PROMPT_BYTES):
            server, client, wall = await batch(REQUESTS, 1, prompt)
            print(f"{prompt:8,d} B, 1 chunk: server {server:.2f} ms, client {client:.2f} ms CPU; wall {wall:.2f} ms")
        one = await batch(40, 1, 40)
        many = await batch(40, CHUNKS, 40)
        per = [(m - o) / (CHUNKS - 1) * 1e3 for m, o in zip(many, one, strict=True)]
        print(f"per further chunk: server {per[0]:.1f} us, client {per[1]:.1f} us CPU")


def _http(site: str) -> None:
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(site,), daemon=True)
    server.start()
    try:
        asyncio.run(_drive())
    finally:
        server.terminate()


def _output_processor(site: str) -> None:
    """vLLM's own processing of a step's outputs, per token (no text: see DecodeStream)."""
    _vllm_protocol(site)
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor

    processor, batch = OutputProcessor(None, log_stats=False), 100
    params = SamplingParams(max_tokens=2000, detokenize=False, output_kind=RequestOutputKind.DELTA)
    for i in range(batch):
        request = EngineCoreRequest(
            f"r{i}", list(range(7500)), None, params, None, 0.0, None, None, None, external_req_id=f"r{i}"
        )
        processor.add_request(request, None)
    times = []
    for _ in range(60):
        outputs = [EngineCoreOutput(f"r{i}", [5]) for i in range(batch)]
        begin = time.thread_time()
        processor.process_outputs(outputs)
        times.append(time.thread_time() - begin)
    print(f"OutputProcessor: {min(times) / batch * 1e6:.1f} us per token")


def _tokens(tokenizer: Path, text: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

    tok = Tokenizer.from_file(str(tokenizer))
    ids = tok.encode(text.read_text(encoding="utf-8")).ids
    rng = random.Random(1)
    print("text, tokens drawn, tokens counted again, bytes, ms CPU (least of 15), us per token")
    for kind in ("random", "prose"):
        for n in (1024, 7200, 9000, 16_256, 32_768, 65_536, 131_072):
            drawn = [rng.randrange(tok.get_vocab_size()) for _ in range(n)]
            string = tok.decode(drawn if kind == "random" else (ids * (1 + n // len(ids)))[:n])
            counted, times = len(tok.encode(string).ids), []
            for _ in range(15):
                begin = time.thread_time()
                tok.encode(string)
                times.append(time.thread_time() - begin)
            print(f"{kind}, {n}, {counted}, {len(string.encode())}, {min(times) * 1e3:.2f}, "
                  f"{min(times) * 1e6 / counted:.2f}")  # fmt: skip
    stream, begin = DecodeStream(skip_special_tokens=True), time.thread_time()
    for i in ids[:20_000]:
        stream.step(tok, i)
    print(f"DecodeStream: {(time.thread_time() - begin) / len(ids[:20_000]) * 1e6:.2f} us per token")


def main() -> None:
    """Run one kind of measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("http", "tokens"))
    parser.add_argument("--vllm", help="site-packages folder that holds vLLM's Python sources")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json")
    parser.add_argument("--text", type=Path, help="prose to tokenise")
    args = parser.parse_args()
    if args.kind == "http":
        _http(args.vllm)
        _output_processor(args.vllm)
    else:
        _tokens(args.tokenizer, args.text)


if __name__ == "__main__":
    main()
