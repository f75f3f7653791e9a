"""Adaption of the user's EndpointPickerConfig: everything of it is kept, every addition is named."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.errors import InputError
from harness.router import config
from harness.router.config import Adapted, Coupling, PromptForm

CONFIGS = Path(__file__).parents[2] / "deploy" / "router" / "configs"
SHIPPED = sorted(CONFIGS.glob("*/*.yaml"))
HEAD = {"v0.7.1": "inference.networking.x-k8s.io/v1alpha1", "v0.10.0": "llm-d.ai/v1alpha1"}


def coupling(release: str, **changes: Any) -> Coupling:
    values: dict[str, Any] = {
        "release": release,
        "discovery": "kubernetes" if release == "v0.7.1" else "file",
        "endpoints_file": Path("/run/endpoints.yaml"),
        "endpoints": 8,
        "model": "m",
        "block_tokens": 16,
        "router_block_tokens": 16,
        "num_gpu_blocks": 5000,
        "kv_events_url": "tcp://127.0.0.1:7777",
        "tokenizer_socket": Path("/run/t.sock"),
        "metrics_sources": 4,
    }
    return Coupling(**(values | changes))


def adapted(release: str, plugins: list[dict[str, Any]], weights: dict[str, float], **more: Any) -> Adapted:
    changes = more.pop("coupling", {})
    profile = {"name": "default", "plugins": [{"pluginRef": n, "weight": w} for n, w in weights.items()]}
    document = {
        "apiVersion": HEAD[release],
        "kind": "EndpointPickerConfig",
        "plugins": plugins,
        "schedulingProfiles": [profile],
        **more,
    }
    return config.adapt(document, "test.yaml", coupling(release, **changes))


def plugin(result: Adapted, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(p for p in result.document["plugins"] if config.plugin_name(p) == name)
    return found


def weights(result: Adapted) -> dict[str, float | None]:
    return {r["pluginRef"]: r.get("weight") for r in result.document["schedulingProfiles"][0]["plugins"]}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_shipped_configs_keep_plugins_order_and_weights(path: Path) -> None:
    _, document = config.load(path)
    before = copy.deepcopy(document)
    result = config.adapt(document, str(path), coupling(path.parent.name))
    assert document == before
    names = [config.plugin_name(p) for p in document["plugins"]]
    kept = [config.plugin_name(p) for p in result.document["plugins"] if config.plugin_name(p) in names]
    assert kept == names
    given = {r["pluginRef"]: r.get("weight") for r in document["schedulingProfiles"][0]["plugins"]}
    now = weights(result)
    assert {n: now[n] for n in given} == given
    extra = set(now) - set(given)
    assert all((now[n] or 0) <= 1e-6 for n in extra)
    assert result.reads_gauges
    kinds = {"precise": "precise", "precise-tiers": "precise", "approximate": "approximate"}
    kinds["pd-prefix"] = "precise" if path.parent.name == "v0.10.0" else "approximate"
    assert result.reads_kv_events == (kinds.get(path.stem) == "precise")
    assert result.prefix == kinds.get(path.stem)
    assert result.phase_header == ("EPP-Profile" if path.stem == "pd-coordinator" else None)
    assert result.session_header == ("x-session-token" if path.stem == "session" else None)
    assert not result.not_simulated
    assert result.tier_weights == ({"gpu": 1.0, "cpu": 0.4} if path.stem == "precise-tiers" else None)
    assert yaml.safe_load(result.text) == result.document
    untouched = ("queue-scorer", "kv-cache-utilization-scorer", "session-affinity-scorer", "max-score-picker")
    for entry in document["plugins"]:
        if entry["type"] in untouched:
            assert plugin(result, config.plugin_name(entry)) == entry


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_every_added_plugin_is_named_in_the_record(path: Path) -> None:
    _, document = config.load(path)
    result = config.adapt(document, str(path), coupling(path.parent.name))
    names = {config.plugin_name(p) for p in document["plugins"]}
    words = " ".join(result.added)
    for entry in result.document["plugins"]:
        if config.plugin_name(entry) not in names and not config.plugin_name(entry).startswith("harness-metrics-"):
            assert entry["type"] in words or config.plugin_name(entry) in words, entry


def test_v0100_discovery_sources_and_tie_break() -> None:
    result = adapted("v0.10.0", [{"type": "queue-scorer"}], {"queue-scorer": 1})
    data = result.document["dataLayer"]
    assert plugin(result, data["discovery"]["pluginRef"])["parameters"]["path"] == "/run/endpoints.yaml"
    assert len(data["sources"]) == 4
    assert {plugin(result, s["pluginRef"])["type"] for s in data["sources"]} == {"metrics-data-source"}
    engine = plugin(result, "core-metrics-extractor")["parameters"]["engineConfigs"][0]
    assert engine["customMetrics"] == [{"attributeKey": "sim.tiebreak", "metricSpec": "sim:tiebreak"}]
    assert engine["kvUsageSpec"] == "vllm:kv_cache_usage_perc"
    assert result.prompt_form is PromptForm.TINY


def test_v0100_keeps_the_users_own_data_layer() -> None:
    mine = {
        "type": "core-metrics-extractor",
        "name": "mine",
        "parameters": {"engineConfigs": [{"name": "vllm", "kvUsageSpec": "x"}]},
    }
    result = adapted(
        "v0.10.0",
        [
            {"type": "queue-scorer"},
            mine,
            {"type": "metrics-data-source", "name": "src", "parameters": {"path": "/metrics"}},
        ],
        {"queue-scorer": 1},
        dataLayer={"sources": [{"pluginRef": "src", "extractors": [{"pluginRef": "mine"}]}]},
    )
    sources = result.document["dataLayer"]["sources"]
    assert sources[0]["pluginRef"] == "src" and len(sources) == 4
    assert all(s["extractors"] == [{"pluginRef": "mine"}] for s in sources)
    assert all(plugin(result, s["pluginRef"])["parameters"] == {"path": "/metrics"} for s in sources)
    assert plugin(result, "mine")["parameters"]["engineConfigs"][0]["kvUsageSpec"] == "x"


def test_v0100_kubernetes_discovery_leaves_discovery_alone() -> None:
    result = adapted("v0.10.0", [{"type": "queue-scorer"}], {"queue-scorer": 1}, coupling={"discovery": "kubernetes"})
    assert "discovery" not in result.document["dataLayer"]


PRECISE = {
    "v0.7.1": [
        {
            "type": "precise-prefix-cache-scorer",
            "parameters": {"tokenProcessorConfig": {"blockSize": 16, "hashSeed": "7"}},
        }
    ],
    "v0.10.0": [
        {
            "type": "precise-prefix-cache-producer",
            "parameters": {"tokenProcessorConfig": {"blockSizeTokens": 16, "hashSeed": "7"}},
        },
        {
            "type": "prefix-cache-scorer",
            "parameters": {"prefixMatchInfoProducerName": "precise-prefix-cache-producer"},
        },
    ],
}


@pytest.mark.parametrize("release", config.RELEASES)
def test_precise_prefix_gets_one_token_per_block_and_one_queue(release: str) -> None:
    entries = PRECISE[release]
    result = adapted(release, entries, {entries[-1]["type"]: 3}, coupling={"router_block_tokens": 64})
    parameters = plugin(result, entries[0]["type"])["parameters"]
    assert parameters["tokenProcessorConfig"] == {"blockSizeTokens": 1, "hashSeed": "7"}
    events = parameters["kvEventsConfig"]
    assert (events["zmqEndpoint"], events["concurrency"], events["discoverPods"]) == (
        "tcp://127.0.0.1:7777",
        1,
        False,
    )
    assert parameters["indexerConfig"]["kvBlockIndexConfig"]["enableMetrics"] is True
    assert result.reads_kv_events and result.prefix == "precise" and result.match_block_tokens == 64
    assert result.prompt_form is (PromptForm.BLOCK_KEY if release == "v0.7.1" else PromptForm.BLOCK_IDS)
    assert any("approximation" in line for line in result.added)
    assert result.needs_tokenizer == (release == "v0.7.1")


@pytest.mark.parametrize("release", config.RELEASES)
def test_index_that_forgets_holders_is_noted(release: str) -> None:
    entries = PRECISE[release]
    few = adapted(release, entries, {entries[-1]["type"]: 3}, coupling={"endpoints": 10})
    many = adapted(release, entries, {entries[-1]["type"]: 3}, coupling={"endpoints": 11})
    assert not few.notes and "at most 10 holders" in many.notes[0]


def test_token_counters_see_real_prompts() -> None:
    entries = [*PRECISE["v0.10.0"], {"type": "token-load-scorer"}]
    chosen = {"prefix-cache-scorer": 1.0, "token-load-scorer": 1.0}
    result = adapted("v0.10.0", entries, chosen)
    assert result.prompt_form is PromptForm.REAL_IDS
    assert (
        plugin(result, "precise-prefix-cache-producer")["parameters"]["tokenProcessorConfig"]["blockSizeTokens"] == 16
    )


def test_token_counters_count_in_router_blocks_where_those_are_larger() -> None:
    measured = {"prefixMatchInfoProducerName": "precise-prefix-cache-producer"}
    entries = [
        *PRECISE["v0.10.0"],
        {"type": "token-load-scorer"},
        {"type": "prefix-cache-affinity-filter", "parameters": measured | {"peakPrefillThroughput": 21184}},
        {"type": "prefix-cache-scorer", "name": "long", "parameters": measured | {"matchLengthWeight": 0.5}},
    ]
    chosen = {"prefix-cache-scorer": 1.0, "token-load-scorer": 1.0}
    result = adapted("v0.10.0", entries, chosen, coupling={"router_block_tokens": 64})
    assert result.prompt_form is PromptForm.BLOCK_IDS
    assert plugin(result, "token-load-scorer")["parameters"] == {"queueThresholdTokens": 65536}
    assert plugin(result, "prefix-cache-affinity-filter")["parameters"]["peakPrefillThroughput"] == 331
    assert plugin(result, "long")["parameters"]["matchLengthScaleTokens"] == 128
    assert sum("in whole router blocks of 64 tokens" in line for line in result.added) == 3
    ranges = {"type": "context-length-aware", "parameters": {"label": "x"}}
    with pytest.raises(InputError, match="count tokens"):
        adapted("v0.10.0", [*entries, ranges], chosen, coupling={"router_block_tokens": 64})


def test_what_the_run_is_made_to_wait_for() -> None:
    filtered = [{"type": "prefix-cache-affinity-filter"}, {"type": "token-load-scorer"}]
    chosen = {"prefix-cache-affinity-filter": 1.0, "token-load-scorer": 1.0}
    result = adapted("v0.10.0", filtered, chosen)
    assert (result.prefix, result.prefix_scorer) == ("approximate", None)
    assert result.gives_tokens_back and result.order_matters and result.one_approximate and not result.cold_start
    output = {"type": "inflight-load-producer", "parameters": {"addEstimatedOutputTokens": True}}
    assert not adapted("v0.10.0", [*filtered, output], chosen).gives_tokens_back, "given back at the end"
    scored = adapted("v0.10.0", [*filtered, {"type": "prefix-cache-scorer"}], chosen | {"prefix-cache-scorer": 1.0})
    assert not scored.order_matters and any("drawn at every start" in note for note in scored.notes)
    for release in config.RELEASES:
        cold = adapted(release, [{"type": "no-hit-lru-scorer"}], {"no-hit-lru-scorer": 1.0})
        assert cold.cold_start and any("one cold request to every endpoint" in line for line in cold.added)


def test_v071_approximate_prefix_in_eight_characters_per_block() -> None:
    own = {"type": "prefix-cache-scorer", "parameters": {"maxPrefixBlocksToMatch": 100}}
    result = adapted("v0.7.1", [own], {"prefix-cache-scorer": 1})
    assert plugin(result, "prefix-cache-scorer")["parameters"] == {
        "maxPrefixBlocksToMatch": 100,
        "autoTune": False,
        "blockSizeTokens": 2,
        "lruCapacityPerServer": 5000,
    }
    assert (result.prompt_form, result.text_bytes_per_block, result.max_prompt_blocks) == (
        PromptForm.BLOCK_TEXT,
        8,
        100,
    )
    assert result.match_block_tokens == 16


@pytest.mark.parametrize(
    ("own_block", "engine_block", "form", "tokens", "bytes_per_block", "reach"),
    [
        (64, 16, PromptForm.BLOCK_TEXT, 8, 8, 1024),
        (16, 64, PromptForm.BLOCK_TEXT, 2, 32, 64),
        (24, 16, PromptForm.REAL_TEXT, 24, 0, None),
    ],
)
def test_v071_approximate_prefix_with_own_block_size(
    own_block: int, engine_block: int, form: PromptForm, tokens: int, bytes_per_block: int, reach: int | None
) -> None:
    parameters = {"autoTune": False, "blockSizeTokens": own_block, "lruCapacityPerServer": 77}
    own = {"type": "prefix-cache-scorer", "parameters": parameters}
    result = adapted(
        "v0.7.1",
        [own],
        {"prefix-cache-scorer": 1},
        coupling={"block_tokens": engine_block, "router_block_tokens": engine_block},
    )
    now = plugin(result, "prefix-cache-scorer")["parameters"]
    assert (now["blockSizeTokens"], now["lruCapacityPerServer"]) == (tokens, 77)
    assert (result.prompt_form, result.text_bytes_per_block, result.max_prompt_blocks) == (
        form,
        bytes_per_block,
        reach,
    )


def test_v0100_approximate_prefix_is_real_sized_as_far_as_it_looks() -> None:
    implied = adapted("v0.10.0", [{"type": "prefix-cache-scorer"}], {"prefix-cache-scorer": 1})
    assert (implied.prompt_form, implied.max_prompt_tokens) == (PromptForm.REAL_TEXT, 131072)
    assert implied.match_block_tokens == 64
    own = {
        "type": "approx-prefix-cache-producer",
        "parameters": {"autoTune": False, "blockSizeTokens": 100, "maxPrefixTokensToMatch": 1050},
    }
    declared = adapted("v0.10.0", [own, {"type": "prefix-cache-scorer"}], {"prefix-cache-scorer": 1})
    assert (declared.match_block_tokens, declared.max_prompt_tokens) == (100, 1000)
    assert plugin(declared, "approx-prefix-cache-producer") == own


def test_wall_clock_timers_are_out_of_reach() -> None:
    v071 = adapted(
        "v0.7.1",
        [{"type": "active-request-scorer", "parameters": {"idleThreshold": 2}}],
        {"active-request-scorer": 1},
    )
    assert plugin(v071, "active-request-scorer")["parameters"] == {
        "idleThreshold": 2,
        "requestTimeout": config.FOREVER,
    }
    assert v071.document["saturationDetector"]["metricsStalenessThreshold"] == config.FOREVER
    session = {"type": "session-affinity-scorer", "parameters": {"strategy": "session_id"}}
    v0100 = adapted("v0.10.0", [session, {"type": "queue-scorer"}], {"queue-scorer": 1}, featureGates=["flowControl"])
    assert plugin(v0100, "session-affinity-scorer")["parameters"]["sessionIdConfig"]["evictionTtlSeconds"] > 1e9
    assert v0100.document["flowControl"]["defaultRequestTTL"] == config.FOREVER
    assert plugin(v0100, "utilization-detector")["parameters"] == {"metricsStalenessThreshold": config.FOREVER}
    speculative = copy.deepcopy(PRECISE["v0.10.0"])
    speculative[0]["parameters"]["speculativeIndexing"] = True
    result = adapted("v0.10.0", speculative, {"prefix-cache-scorer": 1})
    kept = plugin(result, "precise-prefix-cache-producer")["parameters"]
    assert not {"speculativeIndexing", "speculativeTTL"} & kept.keys()
    assert any("speculativeIndexing" in line for line in result.not_simulated)


@pytest.mark.parametrize("release", config.RELEASES)
def test_what_cannot_be_simulated_is_said(release: str) -> None:
    result = adapted(
        release,
        [{"type": "queue-scorer"}, {"type": "random-picker"}],
        {"queue-scorer": 1, "random-picker": 1},
    )
    assert len(result.not_simulated) == 1 and "random-picker" in result.not_simulated[0]


def test_v071_tie_break_does_not_take_a_gauge_that_is_scored() -> None:
    free = adapted("v0.7.1", [{"type": "queue-scorer"}], {"queue-scorer": 1})
    engine = plugin(free, "model-server-protocol-metrics")["parameters"]["engineConfigs"][0]
    assert (engine["runningRequestsSpec"], engine["kvUsageSpec"]) == (
        "sim:tiebreak",
        "vllm:kv_cache_usage_perc",
    )
    both = [{"type": "running-requests-size-scorer"}, {"type": "kv-cache-utilization-scorer"}]
    used = adapted("v0.7.1", both, {"running-requests-size-scorer": 1, "kv-cache-utilization-scorer": 1})
    engine = plugin(used, "model-server-protocol-metrics")["parameters"]["engineConfigs"][0]
    assert (engine["runningRequestsSpec"], engine["kvUsageSpec"]) == (
        "vllm:num_requests_running",
        "sim:kv_usage_tiebreak",
    )
    assert list(weights(used)) == ["running-requests-size-scorer", "kv-cache-utilization-scorer"]


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("a: [1", "c.yaml", "YAML error at line 1"),
        ("- 1", "c.yaml", "is not an EndpointPickerConfig"),
        ("kind: Pod", "c.yaml", "is not an EndpointPickerConfig"),
        ("kind: EndpointPickerConfig", "c.yaml: plugins", "missing"),
        ("kind: EndpointPickerConfig\nplugins: [{name: x}]", "c.yaml: plugins[0]", "has no type"),
        ("kind: EndpointPickerConfig\nplugins: [{type: x}]", "c.yaml: schedulingProfiles", "missing"),
        (
            "kind: EndpointPickerConfig\nplugins: [{type: x}]\nschedulingProfiles: [{name: a}]",
            "c.yaml: schedulingProfiles[0].plugins",
            "is not a list",
        ),
    ],
)
def test_bad_files_are_told_where_and_what(tmp_path: Path, text: str, where: str, what: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        config.load(path)
    assert caught.value.where.endswith(where) and what in caught.value.what and caught.value.remedy


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.yaml: no such file"):
        config.load(tmp_path / "none.yaml")


def test_parameters_that_are_no_mapping() -> None:
    broken = [{"type": "precise-prefix-cache-producer", "parameters": [1]}, {"type": "prefix-cache-scorer"}]
    with pytest.raises(InputError, match="parameters"):
        adapted("v0.10.0", broken, {"prefix-cache-scorer": 1})


@pytest.mark.parametrize("block, threshold, noted", [(64, 8, False), (256, 2, False), (192, 3, True)])
def test_the_pd_decider_counts_in_router_blocks_where_the_prompt_does(block: int, threshold: int, noted: bool) -> None:
    path = CONFIGS / "v0.10.0" / "pd-prefix.yaml"
    _, document = config.load(path)
    coupled = coupling("v0.10.0")
    coupled.router_block_tokens = block
    result = config.adapt(document, str(path), coupled)
    assert plugin(result, "prefix-based-pd-decider")["parameters"] == {"nonCachedTokens": threshold}
    assert result.prompt_form is config.PromptForm.BLOCK_IDS
    assert any("rounded up" in note for note in result.notes) == noted
    assert any("stands for 512 tokens" in line for line in result.added)
