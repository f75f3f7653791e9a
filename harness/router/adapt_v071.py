"""Coupling of a v0.7.1 configuration."""

from __future__ import annotations

from typing import Any

from harness.router import plugins
from harness.router.adapt_v0100 import (
    ONE_SOCKET,
    TIE_BREAK,
    TIE_BREAK_METRIC,
    count_admissions,
    leave_out_speculation,
    note_pod_cache,
    one_token_per_block,
    tier_weights,
)
from harness.router.config import FOREVER, Adapted, Coupling, Document, PromptForm, plugin_name
from harness.router.tokens import TEXT_BYTES

Json = dict[str, Any]

TIE_BREAK_WEIGHT = 1e-7
KV_TIE_BREAK_METRIC = "sim:kv_usage_tiebreak"
CHARS_PER_TOKEN = 4
"""The router's estimate of a token's length."""
_EXTRACTOR = "model-server-protocol-metrics"
_SOURCE = "metrics-data-source"
_DEFAULT_BLOCK_TOKENS = 16
_DEFAULT_MAX_BLOCKS = 256


def adapt(doc: Document, coupling: Coupling, out: Adapted) -> None:
    """Adds metric source, tie-break, timers, KV events, tokenizer and prompt form."""
    out.added.append("endpoints come from a stand-in for the Kubernetes API")
    _metrics_and_tie_break(doc, out)
    _timers(doc, out)
    _prefix(doc, coupling, out)
    if doc.has(*plugins.SESSION_AFFINITY):
        out.session_header = "x-session-token"
    out.flags += ["--health-checking", "--refresh-metrics-interval=1ms", "--zap-stacktrace-level=panic"]
    out.added.append(
        "--refresh-metrics-interval 1ms: gauges are pushed, the router asks again as soon as it has an answer"
    )


def _metrics_and_tie_break(doc: Document, out: Adapted) -> None:
    """The router's metric names can only be chosen in its data layer, which in this release has a feature
    gate.

    The tie-break is the running-requests scorer with a negligible weight, reading the rank instead of that
    gauge; it normalises by the largest difference, so it never adds more than its weight. Where the user's
    configuration scores running requests itself, the rank is added to the KV usage instead (1e-9 per rank).
    """
    gates: list[Any] = doc.document.setdefault("featureGates", [])
    if "dataLayer" not in gates:
        gates.append("dataLayer")
        out.added.append(
            "featureGates dataLayer: the router's own metrics data layer, where metric names can be chosen"
        )
    extractor = next(iter(doc.by_type(_EXTRACTOR)), None)
    if extractor is None:
        extractor = {"type": _EXTRACTOR}
        doc.plugins.append(extractor)
    sources: list[Json] = doc.section("data").setdefault("sources", [])
    if not any((doc.named(str(s.get("pluginRef"))) or {}).get("type") == _SOURCE for s in sources):
        if doc.named(_SOURCE) is None:
            doc.plugins.append({"type": _SOURCE})
        sources.append({"pluginRef": _SOURCE, "extractors": [{"pluginRef": plugin_name(extractor)}]})
        out.added.append(f"{_SOURCE} and {plugin_name(extractor)}: scrape the simulated workers")
    engines: list[Json] = doc.parameters(extractor).setdefault("engineConfigs", [])
    vllm = next((e for e in engines if e.get("name") == "vllm"), None)
    if vllm is None:
        vllm = {
            "name": "vllm",
            "queuedRequestsSpec": "vllm:num_requests_waiting",
            "runningRequestsSpec": "vllm:num_requests_running",
            "kvUsageSpec": "vllm:kv_cache_usage_perc",
            "loraSpec": "vllm:lora_requests_info",
            "cacheInfoSpec": "vllm:cache_config_info",
        }
        engines.append(vllm)
    if not doc.has("running-requests-size-scorer"):
        vllm["runningRequestsSpec"] = TIE_BREAK_METRIC
        doc.plugins.append({"type": "running-requests-size-scorer", "name": TIE_BREAK})
        doc.add_to_profiles(TIE_BREAK, TIE_BREAK_WEIGHT)
        how = f"a running-requests-size-scorer of weight {TIE_BREAK_WEIGHT:g} reading {TIE_BREAK_METRIC}"
    else:
        vllm["kvUsageSpec"] = KV_TIE_BREAK_METRIC
        if not doc.has("kv-cache-utilization-scorer"):
            doc.plugins.append({"type": "kv-cache-utilization-scorer", "name": TIE_BREAK})
            doc.add_to_profiles(TIE_BREAK, TIE_BREAK_WEIGHT)
        how = f"KV usage read from {KV_TIE_BREAK_METRIC}, usage plus 1e-9 per rank"
    out.added.append(
        f"{TIE_BREAK}: seeded order among endpoints of equal score in place of the router's shuffle ({how})"
    )


def _timers(doc: Document, out: Adapted) -> None:
    for plugin in doc.by_type("active-request-scorer"):
        doc.parameters(plugin)["requestTimeout"] = FOREVER
        out.added.append(f"{plugin_name(plugin)}: requestTimeout out of reach (it runs on the wall clock)")
    detector = doc.section("saturationDetector")
    detector["metricsStalenessThreshold"] = FOREVER
    out.added.append(
        "saturationDetector.metricsStalenessThreshold out of reach (gauges are as old as virtual time says)"
    )
    if out.flow_control:
        doc.section("flowControl")["defaultRequestTTL"] = FOREVER
        out.added.append("flowControl.defaultRequestTTL out of reach (it runs on the wall clock)")


def _prefix(doc: Document, coupling: Coupling, out: Adapted) -> None:
    precise = doc.by_type(plugins.PRECISE_V071)
    approximate = doc.by_type(plugins.PREFIX_V071)
    counts = doc.has(*plugins.TOKEN_COUNTERS)
    out.reads_kv_events, out.approximate = bool(precise), bool(approximate)
    for plugin in precise:
        _precise(doc, plugin, coupling, out)
    for plugin in doc.by_type("tokenizer"):
        doc.parameters(plugin)["udsTokenizerConfig"] = {"socketFile": str(coupling.tokenizer_socket)}
    out.needs_tokenizer = bool(precise) or doc.has("tokenizer")
    if precise:
        out.prompt_form = PromptForm.BLOCK_KEY
    if counts:
        out.prompt_form = PromptForm.REAL_TEXT
    elif approximate:
        _approximate_form(doc, approximate, coupling, out)
    for scorer in out.scorers:
        if scorer.type in (plugins.PRECISE_V071, plugins.PREFIX_V071):
            out.prefix = "precise" if scorer.type == plugins.PRECISE_V071 else "approximate"
            out.prefix_scorer = scorer.name
            out.match_block_tokens = coupling.router_block_tokens
            if out.prefix == "approximate":
                out.match_block_tokens = _approximate_block_tokens(scorer.parameters, coupling)
            break


def _precise(doc: Document, plugin: Json, coupling: Coupling, out: Adapted) -> None:
    name, parameters = plugin_name(plugin), doc.parameters(plugin)
    events = doc.section("kvEventsConfig", of=parameters)
    events.update(zmqEndpoint=coupling.kv_events_url, discoverPods=False, concurrency=1, topicFilter="kv@")
    out.added.append(f"{name}: {ONE_SOCKET} ({coupling.kv_events_url})")
    tokens = doc.section("tokenProcessorConfig", of=parameters)
    tokens.pop("blockSize", None)
    tokens["blockSizeTokens"] = 1
    out.added.append(f"{name}: {one_token_per_block(coupling)}")
    indexer = doc.section("indexerConfig", of=parameters)
    indexer.pop("tokenProcessorConfig", None)
    count_admissions(doc, indexer, name, out)
    out.tier_weights = tier_weights(indexer, doc.where)
    pool = doc.section("tokenizersPoolConfig", of=indexer)
    pool.setdefault("modelName", coupling.model)
    pool.setdefault("workersCount", 4)
    for other in ("local", "hf", "huggingFace"):
        pool.pop(other, None)
    pool["uds"] = {"socketFile": str(coupling.tokenizer_socket)}
    out.added.append(f"{name}: the harness is the tokenizer service")
    leave_out_speculation(parameters, name, out)
    note_pod_cache(indexer, name, coupling, out)


def _approximate_block_tokens(parameters: Json, coupling: Coupling) -> int:
    if parameters.get("autoTune", True):
        return coupling.block_tokens
    return int(parameters.get("blockSizeTokens") or _DEFAULT_BLOCK_TOKENS)


def _approximate_form(doc: Document, approximate: list[Json], coupling: Coupling, out: Adapted) -> None:
    """Eight characters per engine block instead of four per token.

    The plugin cuts the text into blocks of `blockSizeTokens * 4` characters and hashes each together with the
    hash before it; it ignores a last piece that is shorter. Only equality of pieces matters, so a piece of 8
    characters per engine block says the same as one of 64, as long as a router block is a whole multiple of
    an engine block or the other way round. `maxPrefixBlocksToMatch` and the LRU capacity count router blocks
    and stay as they are.
    """
    sizes = {_approximate_block_tokens(p.get("parameters") or {}, coupling) for p in approximate}
    engine = coupling.block_tokens
    if len(sizes) > 1 or any(size % engine and engine % size for size in sizes):
        out.prompt_form = PromptForm.REAL_TEXT
        return
    size = sizes.pop()
    pieces_per_engine_block = max(1, engine // size)
    engine_blocks_per_piece = max(1, size // engine)
    out.prompt_form = PromptForm.BLOCK_TEXT
    out.text_bytes_per_block = TEXT_BYTES * pieces_per_engine_block
    reach = 0
    for plugin in approximate:
        parameters = doc.parameters(plugin)
        blocks = int(parameters.get("maxPrefixBlocksToMatch") or _DEFAULT_MAX_BLOCKS)
        reach = max(reach, -(-blocks * engine_blocks_per_piece // pieces_per_engine_block))
        if parameters.get("autoTune", True):
            parameters["autoTune"] = False
            parameters["lruCapacityPerServer"] = coupling.num_gpu_blocks
            out.added.append(
                f"{plugin_name(plugin)}: autoTune replaced by the values that it would read from the workers"
            )
        parameters.pop("blockSize", None)
        parameters["blockSizeTokens"] = TEXT_BYTES // CHARS_PER_TOKEN * engine_blocks_per_piece
        out.added.append(
            f"{plugin_name(plugin)}: blockSizeTokens {parameters['blockSizeTokens']} stands for {size} tokens, "
            f"the prompt carries {TEXT_BYTES} characters per engine block"
        )
    if out.needs_tokenizer:
        return  # the tokenizer must know the prompt from its text: not clipped
    out.max_prompt_blocks = reach
