"""Coupling of a v0.10.0 configuration."""

from __future__ import annotations

import copy
from typing import Any

from harness.errors import InputError
from harness.router import plugins
from harness.router.config import FOREVER, Adapted, Coupling, Document, PromptForm, plugin_name

Json = dict[str, Any]

TIE_BREAK = "harness-tie-break"
TIE_BREAK_WEIGHT = 1e-6
TIE_BREAK_RANGE = 1000.0
TIE_BREAK_METRIC = "sim:tiebreak"
ONE_SOCKET = (
    "KV events of all workers on one socket, in one order; neighbouring blocks that are evicted together in one "
    "BlockRemoved, where vLLM sends one per block"
)
_ATTRIBUTE = "sim.tiebreak"
_SOURCE = "metrics-data-source"
_EXTRACTOR = "core-metrics-extractor"
_APPROX_MIN_BLOCK_TOKENS = 64
_APPROX_MAX_TOKENS = 131072
_VLLM_SPECS = {
    "name": "vllm",
    "queuedRequestsSpec": "vllm:num_requests_waiting",
    "runningRequestsSpec": "vllm:num_requests_running",
    "kvUsageSpec": "vllm:kv_cache_usage_perc",
    "loraSpec": "vllm:lora_requests_info",
    "cacheInfoSpec": "vllm:cache_config_info",
}


def adapt(doc: Document, coupling: Coupling, out: Adapted) -> None:
    """Adds discovery, metric sources, tie-break, timers, KV events and prompt form."""
    _discovery(doc, coupling, out)
    _metrics(doc, coupling, out)
    _tie_break(doc, out)
    _timers(doc, out)
    _prefix(doc, coupling, out)
    _session(doc, out)
    _producer_order(doc, out)
    out.flags.append("--allow-experimental-plugins")
    if out.prefix_scorer is not None or out.order_matters:
        # what the router believes is read off them; dear with many endpoints
        out.flags.append("--emit-endpoint-scores")


def _discovery(doc: Document, coupling: Coupling, out: Adapted) -> None:
    if coupling.discovery != "file":
        out.added.append("endpoints come from a stand-in for the Kubernetes API")
        return
    section = doc.section("dataLayer", "discovery")
    plugin = doc.named(str(section.get("pluginRef"))) if section else None
    if plugin is None:
        plugin = {"type": "file-discovery", "name": "harness-discovery"}
        doc.plugins.append(plugin)
        section["pluginRef"] = "harness-discovery"
    plugin["type"] = "file-discovery"
    plugin["parameters"] = {"path": str(coupling.endpoints_file), "watchFile": False}
    out.added.append(f"{plugin_name(plugin)}: file-discovery of the simulated endpoints")


def _metrics(doc: Document, coupling: Coupling, out: Adapted) -> None:
    extractors = doc.by_type(_EXTRACTOR)
    if not extractors:
        extractors = [{"type": _EXTRACTOR}]
        doc.plugins.append(extractors[0])
    for extractor in extractors:
        _export_tie_break(doc, extractor)
    out.added.append(f"{_EXTRACTOR}: reads the custom metric {TIE_BREAK_METRIC}")
    sources: list[Json] = doc.section("dataLayer").setdefault("sources", [])
    polled = [s for s in sources if (doc.named(str(s.get("pluginRef"))) or {}).get("type") == _SOURCE]
    if not polled:
        if doc.named(_SOURCE) is None:
            doc.plugins.append({"type": _SOURCE})
        polled = [{"pluginRef": _SOURCE, "extractors": [{"pluginRef": plugin_name(extractors[0])}]}]
        sources += polled
    template = doc.named(str(polled[0]["pluginRef"])) or {"type": _SOURCE}
    copies = coupling.metrics_sources - len(polled)
    for i in range(copies):
        clone = copy.deepcopy(template)
        clone["name"] = f"harness-metrics-{i}"
        doc.plugins.append(clone)
        sources.append({"pluginRef": clone["name"], "extractors": copy.deepcopy(polled[0].get("extractors") or [])})
    out.added.append(f"{copies} more {_SOURCE} instances, so that gauges can be pushed between two 50 ms polls")


def _export_tie_break(doc: Document, extractor: Json) -> None:
    engines: list[Json] = doc.parameters(extractor).setdefault("engineConfigs", [])
    vllm = next((e for e in engines if e.get("name") == "vllm"), None)
    if vllm is None:
        vllm = dict(_VLLM_SPECS)
        engines.append(vllm)
    custom: list[Json] = vllm.setdefault("customMetrics", [])
    custom.append({"attributeKey": _ATTRIBUTE, "metricSpec": TIE_BREAK_METRIC})


def _tie_break(doc: Document, out: Adapted) -> None:
    algorithm = {
        "type": "linear_lower_is_better",
        "normalization": {"fixedRange": {"min": 0, "max": TIE_BREAK_RANGE}},
    }
    doc.plugins.append(
        {
            "type": "endpoint-attribute-scorer",
            "name": TIE_BREAK,
            "parameters": {"attributeKey": _ATTRIBUTE, "algorithm": algorithm},
        }
    )
    doc.add_to_profiles(TIE_BREAK, TIE_BREAK_WEIGHT)
    out.added.append(
        f"{TIE_BREAK}: seeded order among endpoints of equal score (at most {TIE_BREAK_WEIGHT:g} of score), "
        "in place of the router's unseeded shuffle"
    )


def _timers(doc: Document, out: Adapted) -> None:
    for plugin in doc.by_type(*plugins.SESSION_AFFINITY):
        parameters = plugin.get("parameters") or {}
        if parameters.get("strategy") == "session_id":
            session = doc.section("sessionIdConfig", of=parameters)
            session["evictionTtlSeconds"] = 3.0e9
            session.setdefault("evictionSweepSeconds", 3.0e6)
            out.added.append(f"{plugin_name(plugin)}: evictionTtlSeconds out of reach (it runs on the wall clock)")
    if out.flow_control:
        flow = doc.section("flowControl")
        flow["defaultRequestTTL"] = FOREVER
        out.added.append("flowControl.defaultRequestTTL out of reach (it runs on the wall clock)")
        detector = str(doc.section("saturationDetector", of=flow).setdefault("pluginRef", "utilization-detector"))
        if doc.named(detector) is None:
            doc.plugins.append({"type": detector})
    for plugin in doc.by_type("utilization-detector"):
        doc.parameters(plugin)["metricsStalenessThreshold"] = FOREVER
        out.added.append(
            f"{plugin_name(plugin)}: metricsStalenessThreshold out of reach (gauges are as old as virtual time says)"
        )
    for plugin in doc.by_type("prefix-cache-affinity-filter"):
        if float((plugin.get("parameters") or {}).get("explorationProbability") or 0) > 0:
            out.not_simulated.append(
                f"{plugin_name(plugin)}: explorationProbability draws without a seed, two runs differ"
            )


def _prefix(doc: Document, coupling: Coupling, out: Adapted) -> None:
    precise = doc.by_type(plugins.PRECISE_PRODUCER, plugins.PRECISE_LEGACY)
    approximate = _approximate_producers(doc)
    counters = _token_counters(doc)
    # with approximate prefixes, or none, the decider sees the prompt as it is
    deciders = doc.by_type(plugins.PD_DECIDER)
    counts = bool(counters) or (bool(deciders) and not precise)
    coarse = coupling.router_block_tokens > coupling.block_tokens and not approximate
    in_blocks = bool(precise) and coarse and all(p["type"] in plugins.IN_BLOCKS for p in counters)
    real = bool(approximate) or (counts and not in_blocks)
    out.reads_kv_events, out.approximate = bool(precise), bool(approximate)
    out.one_approximate = len(approximate) == 1
    out.gives_tokens_back = _gives_tokens_back(doc)
    if in_blocks:
        for plugin in counters:
            _count_in_blocks(doc, plugin, coupling, out)
    for plugin in precise:
        _precise(doc, plugin, coupling, out, real)
    if precise and not real:
        for plugin in deciders:
            _decide_in_blocks(doc, plugin, coupling, out)
    if precise:
        for plugin in doc.by_type("token-producer", "tokenizer"):
            plugin["type"], plugin["parameters"] = "token-producer", {"estimate": {}}
            out.added.append(f"{plugin_name(plugin)}: prompts arrive as token ids, no tokenizer is asked")
        out.prompt_form = PromptForm.REAL_IDS if real else PromptForm.BLOCK_IDS
    elif real:
        out.prompt_form = PromptForm.REAL_TEXT
        if not counts:
            # The producer looks no further than this, and nothing else looks at the prompt at all.
            out.max_prompt_tokens = min(_approximate_reach_tokens(p, coupling) for p in approximate)
    _deciding_prefix(doc, coupling, out)


def _token_counters(doc: Document) -> list[Json]:
    """Plugins that count a prompt's tokens, but for the P/D decider."""
    scorers = doc.by_type(plugins.PREFIX_SCORER)
    by_length = [p for p in scorers if float((p.get("parameters") or {}).get("matchLengthWeight") or 0) > 0]
    return [*doc.by_type(*(t for t in plugins.TOKEN_COUNTERS if t != plugins.PD_DECIDER)), *by_length]


def _gives_tokens_back(doc: Document) -> bool:
    """Whether tokens in flight are read, and given back at the first token (with estimated output: at the end)."""
    producers = doc.by_type(plugins.IN_FLIGHT_PRODUCER)
    if any((p.get("parameters") or {}).get("addEstimatedOutputTokens") for p in producers):
        return False
    return doc.has(*plugins.IN_FLIGHT_TOKENS, plugins.AFFINITY_FILTER)


def _approximate_producers(doc: Document) -> list[Json]:
    """Declared ones, and the one that the router adds on its own for a consumer of the default name."""
    found = doc.by_type(plugins.APPROX_PRODUCER)
    if doc.named(plugins.APPROX_PRODUCER) is None:
        wanted = {
            (p.get("parameters") or {}).get("prefixMatchInfoProducerName") or plugins.APPROX_PRODUCER
            for p in doc.by_type(plugins.PREFIX_SCORER, plugins.AFFINITY_FILTER, plugins.NO_HIT_LRU)
        }
        if plugins.APPROX_PRODUCER in wanted:
            found.append({"type": plugins.APPROX_PRODUCER})
    return found


def _approximate_block_tokens(producer: Json, coupling: Coupling) -> int:
    parameters = producer.get("parameters") or {}
    size = int(parameters.get("blockSizeTokens") or 16)
    if parameters.get("autoTune", True):
        size = coupling.block_tokens
    return max(size, _APPROX_MIN_BLOCK_TOKENS)


def _approximate_reach_tokens(producer: Json, coupling: Coupling) -> int:
    """Tokens at the front of a prompt that the producer hashes."""
    parameters = producer.get("parameters") or {}
    size = _approximate_block_tokens(producer, coupling)
    limit = int(parameters.get("maxPrefixTokensToMatch", _APPROX_MAX_TOKENS))
    if limit > 0:
        return limit // size * size
    blocks = int(parameters.get("maxPrefixBlocksToMatch", 2048))
    return blocks * size if blocks else 1 << 40


def _precise(doc: Document, plugin: Json, coupling: Coupling, out: Adapted, real: bool) -> None:
    name, parameters = plugin_name(plugin), doc.parameters(plugin)
    events = doc.section("kvEventsConfig", of=parameters)
    events.update(zmqEndpoint=coupling.kv_events_url, discoverPods=False, concurrency=1, topicFilter="kv@")
    out.added.append(f"{name}: {ONE_SOCKET} ({coupling.kv_events_url})")
    tokens = doc.section("tokenProcessorConfig", of=parameters)
    tokens.pop("blockSize", None)
    tokens["blockSizeTokens"] = coupling.block_tokens if real else 1
    if real and coupling.router_block_tokens != coupling.block_tokens:
        raise InputError(
            "router.block_tokens",
            f"router blocks of {coupling.router_block_tokens} tokens do not go with plugins that count tokens",
            f"leave it at the engine's {coupling.block_tokens}, or take those plugins out of {doc.where}",
        )
    if not real:
        out.added.append(f"{name}: {one_token_per_block(coupling)}")
    indexer = doc.section("indexerConfig", of=parameters)
    count_admissions(doc, indexer, name, out)
    out.tier_weights = tier_weights(indexer, doc.where)
    if indexer.pop("tokenizersPoolConfig", None) is not None:
        out.added.append(f"{name}: tokenizersPoolConfig left out, prompts arrive as token ids")
    leave_out_speculation(parameters, name, out)
    note_pod_cache(indexer, name, coupling, out)


def _count_in_blocks(doc: Document, plugin: Json, coupling: Coupling, out: Adapted) -> None:
    """A counter's measure in router blocks, as the prompt it sees has one token id per whole block."""
    name, default = plugins.IN_BLOCKS[plugin["type"]]
    size, parameters = coupling.router_block_tokens, doc.parameters(plugin)
    tokens = float(parameters.get(name) or default)
    parameters[name] = max(1, round(tokens / size)) if isinstance(default, int) else tokens / size
    out.added.append(
        f"{plugin_name(plugin)}: {name} {parameters[name]:g} stands for {tokens:g}, prompts are counted in whole "
        f"router blocks of {size} tokens (an approximation)"
    )


def _decide_in_blocks(doc: Document, plugin: Json, coupling: Coupling, out: Adapted) -> None:
    """The decider's thresholds in router blocks, as the prompt it sees has one token id per block.

    A prompt of n whole blocks and a rest lacks t tokens or more, of which h blocks are cached, exactly if n - h reaches
    t / block, where that is a whole number; else the threshold is rounded up to whole blocks.
    """
    size, parameters = coupling.router_block_tokens, doc.parameters(plugin)
    words = []
    for name in ("nonCachedTokens", "promptTokens"):
        tokens = int(parameters.get(name) or 0)
        if tokens:
            parameters[name] = -(-tokens // size)
            words.append(f"{name} {parameters[name]} stands for {tokens} tokens")
            if tokens % size:
                out.notes.append(
                    f"{plugin_name(plugin)}: {name} {tokens} is no multiple of the router's block of {size} tokens "
                    f"and was rounded up to {parameters[name] * size} (router.block_tokens)"
                )
    if words:
        out.added.append(f"{plugin_name(plugin)}: {', '.join(words)}, in router blocks of {size}")


def one_token_per_block(coupling: Coupling) -> str:
    """How blocks are represented, in words."""
    size = coupling.router_block_tokens
    words = f"block size 1, one token id stands for a block of {size} tokens"
    if size > coupling.block_tokens:
        words += f" ({size // coupling.block_tokens} engine blocks, an approximation)"
    return words


def leave_out_speculation(parameters: Json, name: str, out: Adapted) -> None:
    """Entries that the router makes of its own decisions live for seconds of the wall clock, which stands still for
    virtual time, and in its counts they cannot be told from blocks that engines have published.
    """
    if parameters.pop("speculativeIndexing", None):
        parameters.pop("speculativeTTL", None)
        out.not_simulated.append(
            f"{name}: speculativeIndexing was left out, its entries live on the wall clock; a prefix is known when the "
            "engine has published it"
        )


def count_admissions(doc: Document, indexer: Json, name: str, out: Adapted) -> None:
    """The barrier reads the index's own counters."""
    index = doc.section("kvBlockIndexConfig", of=indexer)
    if not index.get("enableMetrics"):
        index["enableMetrics"] = True
        out.added.append(f"{name}: enableMetrics, the count of admitted blocks shows when all events are in")


def tier_weights(indexer: Json, where: str) -> dict[str, float] | None:
    """What the index weighs each tier with; None where the configuration leaves it to the router."""
    entries = indexer.get("kvCacheBackendConfigs")
    if entries is None:
        return None
    try:
        return {str(entry["name"]): float(entry["weight"]) for entry in entries}
    except (TypeError, KeyError, ValueError):
        raise InputError(
            f"{where}: kvCacheBackendConfigs", "is no list of names and weights", "write `- {name: cpu, weight: 0.8}`"
        ) from None


def note_pod_cache(indexer: Json, name: str, coupling: Coupling, out: Adapted) -> None:
    """Warns where the index forgets holders of a block because there are more endpoints than it keeps per
    block.
    """
    in_memory = ((indexer.get("kvBlockIndexConfig") or {}).get("inMemoryConfig")) or {}
    size = int(in_memory.get("podCacheSize") or 10)
    if size < coupling.endpoints * coupling.entries_per_endpoint:
        tiers = f", each with {coupling.entries_per_endpoint} tiers" if coupling.entries_per_endpoint > 1 else ""
        out.notes.append(
            f"{name}: the router remembers at most {size} holders of a block (podCacheSize) "
            f"while there are {coupling.endpoints} endpoints{tiers}"
        )


def _deciding_prefix(doc: Document, coupling: Coupling, out: Adapted) -> None:
    """What decides by prefixes: the deciding profile's prefix scorer, or else its affinity filter."""
    scorer = next((s for s in out.scorers if s.type in (plugins.PRECISE_LEGACY, plugins.PREFIX_SCORER)), None)
    if scorer is not None:
        out.prefix_scorer = scorer.name
        kind, parameters = scorer.type, scorer.parameters
    else:
        profile = doc.deciding_profile()
        used = [doc.named(str(ref.get("pluginRef"))) for ref in doc.refs(profile)] if profile else []
        found = next((p for p in used if p is not None and p["type"] == plugins.AFFINITY_FILTER), None)
        if found is None:
            return
        kind, parameters = found["type"], found.get("parameters") or {}
    producer = doc.named(parameters.get("prefixMatchInfoProducerName") or plugins.APPROX_PRODUCER)
    precise = kind == plugins.PRECISE_LEGACY or (producer and producer["type"] == plugins.PRECISE_PRODUCER)
    out.prefix = "precise" if precise else "approximate"
    out.match_block_tokens = (
        coupling.router_block_tokens if precise else _approximate_block_tokens(producer or {}, coupling)
    )


def _producer_order(doc: Document, out: Adapted) -> None:
    scorers = doc.by_type("token-load-scorer")
    if not scorers:
        return
    name = plugin_name(scorers[0])
    alone = out.prefix is not None and out.prefix_scorer is None and any(s.name == name for s in out.scorers)
    out.order_matters = alone and len(doc.profiles()) == 1
    if out.order_matters:
        out.added.append(
            f"{name}: the router is started again until its count of tokens in flight comes after the prefix producer; "
            "the release draws that order at every start, and in the other one the score takes nothing off for what is "
            "cached"
        )
    else:
        out.notes.append(
            f"{name}: whether its score takes off what is cached is drawn at every start of the router, as the release "
            "does not order its producers; two runs may differ"
        )


def _session(doc: Document, out: Adapted) -> None:
    for plugin in doc.by_type(*plugins.SESSION_AFFINITY):
        parameters = plugin.get("parameters") or {}
        if parameters.get("strategy", "encoded_endpoint_header") == "encoded_endpoint_header":
            config = parameters.get("encodedEndpointHeaderConfig") or {}
            out.session_header = str(config.get("header") or "x-session-token").lower()
