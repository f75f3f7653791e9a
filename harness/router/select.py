"""The router that an experiment asks for: the real one, obtained and coupled, or a baseline."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from fake_workers.engine.scheduler import SchedulerConfig
from harness.errors import InputError
from harness.experiment import Experiment
from harness.router.base import Endpoint, Router
from harness.router.baselines import BaselineRouter
from harness.router.tier_events import check_tier_grain

CONFIGS = Path(__file__).parents[2] / "deploy" / "router" / "configs"
"""The router configs that ship with the project, one folder per release."""


def config_path(name_or_path: str, release: str) -> Path:
    """A config file as given, or the shipped one of that name for the release."""
    given = Path(name_or_path)
    if given.suffix in (".yaml", ".yml") or len(given.parts) > 1:
        if not given.is_file():
            raise InputError(f"router config {given}", "no such file", "give the path of an EndpointPickerConfig")
        return given
    shipped = CONFIGS / release / f"{name_or_path}.yaml"
    if not shipped.is_file():
        known = ", ".join(sorted(path.stem for path in shipped.parent.glob("*.yaml"))) or "none for this release"
        raise InputError(
            f"router config {name_or_path}", f"unknown for {release}", f"choose one of: {known}; or a file"
        )
    return shipped


def make_router(
    experiment: Experiment,
    endpoints: list[Endpoint],
    model: str,
    engine: SchedulerConfig,
    workdir: Path,
    gpu_blocks: Sequence[int] | None = None,
) -> Router:
    """Not started yet. The real router's program is obtained here (path, cache, image or build).

    `gpu_blocks`: KV blocks of each endpoint, where they differ from `engine`'s.
    """
    wanted = experiment.router
    if wanted.kind != "llm-d":
        return BaselineRouter(wanted.kind, endpoints, experiment.seed)
    from harness.router.binaries import obtain
    from harness.router.llmd import LlmdRouter

    config = config_path(wanted.config, wanted.release)
    ratio = blocks_per_router_block(wanted.block_tokens, engine.block_tokens)
    if experiment.cache.publishes_events:
        check_tier_grain(experiment.cache.hash_tokens(engine.block_tokens) // engine.block_tokens, ratio)
    binary = obtain(wanted.release, _tell, path=wanted.binary, image=wanted.image)
    return LlmdRouter(
        binary.path,
        wanted.release,
        config,
        endpoints,
        model=model,
        block_tokens=engine.block_tokens,
        router_block_tokens=engine.block_tokens * ratio,
        num_gpu_blocks=engine.num_gpu_blocks,
        seed=experiment.seed,
        workdir=workdir,
        events_wire=experiment.cluster.kv_events,
        discovery=None if wanted.discovery == "auto" else wanted.discovery,
        unmodified=binary.unmodified,
        provenance_note=binary.note,
        tier_events=experiment.cache.publishes_events,
        gpu_blocks=gpu_blocks,
    )


def blocks_per_router_block(router_block: int | None, engine_block: int) -> int:
    """How many engine blocks make one block towards the router."""
    if router_block is None or router_block <= engine_block:
        return 1
    if router_block % engine_block:
        raise InputError(
            "router.block_tokens",
            f"{router_block} is no multiple of the engine's block size {engine_block}",
            "choose a multiple, or null for the engine's block size",
        )
    return router_block // engine_block


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
