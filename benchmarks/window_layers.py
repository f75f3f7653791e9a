"""What vLLM's pool and CPU tier keep of long prompts where half of the layers have a window: gpt-oss-120b at llm-d.

    harness engine install; python -m benchmarks.window_layers

The engine here has one group of layers. vLLM's hybrid manager draws the blocks of full and of window layers from one
pool; a window layer's block is given back as soon as the window has passed it and then stands in the same LRU order as
the others. `kv_cache_size_tokens`, which vLLM logs, counts what *running* requests need (a window at most), not what
stays for later ones. This asks vLLM's own KVCacheManager how much of random documents hits, and how large a pool of one
group has the same share.
"""

from __future__ import annotations

import random
import subprocess
import sys

from fake_workers.vllm_engine import torch_stub
from fake_workers.vllm_engine.install import interpreter
from harness.cache.offload_manager import OffloadManager, make_key
from harness.cache.offload_scheduler import OffloadScheduler, OffloadState, Scheduled, WindowGroups

BLOCK, WINDOW = 128, 128
LOGGED_TOKENS, MAX_MODEL_LEN, IN_FLIGHT = 1_630_790, 131_072, 2 * 8192
SYSTEM, QUESTION, PROMPTS = 16_000, 256, 5
CHUNK, CALLS = 8192, 1200
TIER_BYTES, TOKEN_BYTES, TIER_CALLS = 100 << 30, 73_728, 2700


def pool_blocks() -> int:
    """Blocks of vLLM's pool from the capacity that it logged (get_max_concurrency_for_kv_cache_config, backwards)."""
    per_request = MAX_MODEL_LEN // BLOCK + -(-(WINDOW - 1 + IN_FLIGHT) // BLOCK) + 1
    return round(LOGGED_TOKENS / MAX_MODEL_LEN * per_request)


def hit_share(blocks: int, hybrid: bool, documents: int) -> float:
    """Share of prompt tokens that hit, of CALLS prompts on random documents, one at a time, after the first third."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    from fake_workers.vllm_engine.scheduler import make_request, token, torch

    shape = {"block_size": BLOCK, "num_kv_heads": 8, "head_size": 64, "dtype": torch.bfloat16}
    groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**shape))]
    if hybrid:
        groups.append(KVCacheGroupSpec(["window"], SlidingWindowSpec(**shape, sliding_window=WINDOW)))
    config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    manager = KVCacheManager(config, MAX_MODEL_LEN, BLOCK, BLOCK, max_in_flight_tokens=IN_FLIGHT)
    rng = random.Random(1)
    length, hits, measured = SYSTEM + QUESTION, 0, 0
    for call in range(CALLS):
        document, question = rng.randrange(documents), rng.randrange(PROMPTS)
        tokens = [token(document + 1, i // BLOCK, i % BLOCK) for i in range(SYSTEM)]
        tokens += [token(10_000 + document * PROMPTS + question, i // BLOCK, i % BLOCK) for i in range(QUESTION)]
        request = make_request(str(call), tokens, 1, BLOCK, 0.0, 0)
        found, computed, _ = manager.get_computed_blocks(request)
        done, extra = computed, (computed, found)
        while done < length:
            chunk = min(CHUNK, length - done)
            assert manager.allocate_slots(request, chunk, *extra) is not None
            extra = ()  # type: ignore[assignment]
            done += chunk
            request.num_computed_tokens = done
        request.append_output_token_ids(7)
        manager.free(request)
        if call >= CALLS // 3:
            hits, measured = hits + computed, measured + length
    return hits / measured


def equal_blocks(documents: int, share: float) -> int:
    """Blocks of a pool of one group with that hit share."""
    low, high = 1_000, 14_000
    while high - low > 100:
        middle = (low + high) // 2
        low, high = (middle, high) if hit_share(middle, False, documents) < share else (low, middle)
    return high


def tier_share(windows: WindowGroups | None, documents: int) -> float:
    """Share of prompt tokens that the tier has, of TIER_CALLS prompts on random documents, after the first third."""
    groups = 1 if windows is None else 1 + windows.groups
    manager = OffloadManager(TIER_BYTES // (TOKEN_BYTES // groups * BLOCK), "lru")
    scheduler = OffloadScheduler(manager, BLOCK, 1, windows=windows)
    rng = random.Random(1)
    shared, blocks = SYSTEM // BLOCK, (SYSTEM + QUESTION) // BLOCK
    hits = measured = 0
    for call in range(TIER_CALLS):
        document, question = rng.randrange(documents), rng.randrange(PROMPTS)
        own = documents + document * PROMPTS + question
        state = OffloadState(str(call), blocks * BLOCK, tokens=blocks * BLOCK)
        state.keys = [make_key(document if i < shared else own, i) for i in range(blocks)]
        found = scheduler.matched(state, 0)
        assert found is not None, "no copy is under way"
        load = scheduler.allocated(state, found)
        if load is not None:
            scheduler.complete(load)
        whole = Scheduled(state, blocks * BLOCK, blocks)
        for job in scheduler.build([whole], []):
            scheduler.complete(job)
        scheduler.build([], [whole])
        manager.events.clear()
        if call >= TIER_CALLS // 3:
            hits, measured = hits + found, measured + blocks * BLOCK
    return hits / measured


def tier_table() -> None:
    """What the CPU tier keeps."""
    for documents in (100, 125, 160):
        one, two = tier_share(None, documents), tier_share(WindowGroups(WINDOW), documents)
        print(f"{documents} documents, CPU tier: hits {one:.3f} with one group, {two:.3f} with two", flush=True)


def main() -> None:
    """The table of the pool on standard output."""
    blocks, logged = pool_blocks(), LOGGED_TOKENS // BLOCK
    print(f"vLLM logs {LOGGED_TOKENS:,} tokens: a pool of {blocks:,} blocks of {BLOCK}", flush=True)
    for documents in (60, 100, 125, 160):
        plain, share = hit_share(logged, False, documents), hit_share(blocks, True, documents)
        text = f"{documents} documents of {SYSTEM:,} tokens: hits {plain:.3f} with one group of {logged:,} blocks"
        text += f", {share:.3f} with vLLM's two groups"
        if share < 0.98:
            text += f" (as one group of {equal_blocks(documents, share):,})"
        print(text, flush=True)


if __name__ == "__main__":
    if "--inside" not in sys.argv:
        tier_table()
        python = interpreter()
        if python is None:
            sys.exit("vLLM's sources are not installed: harness engine install")
        sys.exit(subprocess.run([str(python), "-m", "benchmarks.window_layers", "--inside"], check=False).returncode)
    torch_stub.install()
    main()
