"""The experiment file: one strict schema. Unknown keys are errors; every field says what it is and in which unit."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from harness import yaml_text
from harness.cache.config import CacheConfig, FabricConfig, OffloadingConfig
from harness.disagg.config import KvTransferConfig, Role, parse_notation
from harness.errors import InputError
from harness.front_end import FrontEndConfig
from harness.live.config import LiveConfig

Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=1e-6, le=1e9, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=2**40)]
ARM_NAME = r"[\w.+-]+"
"""Names that are also folders."""


class Strict(BaseModel):
    """Unknown keys are refused, values are not coerced across types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Trace(Strict):
    """What is replayed."""

    path: str = Field(description="trace file or folder; relative paths are relative to the experiment file")
    sessions: Count | None = Field(None, description="replay only the first N sessions of the trace")
    max_call_tokens: Count | None = Field(
        None,
        description="leave out calls whose prompt plus output is longer (as the 256k edition of the public agentic "
        "corpus does); null: send them all, and let the engine refuse what exceeds max_model_len",
    )
    blocks: Literal["strict", "repair"] = Field(
        "strict", description="repair: make block counts fit the recorded input tokens (sources with broken block ids)"
    )


class Load(Strict):
    """When sessions arrive and what their clients do."""

    arrivals: Literal["poisson", "uniform", "at_once", "recorded"] = Field(
        "poisson",
        description="session arrivals: open-loop Poisson or evenly spaced at the given rate, all at time 0, or as the "
        "trace recorded",
    )
    sessions_per_hour_per_node: Rate | None = Field(
        4.75, description="arrival rate of new sessions, per hour and node (poisson and uniform)"
    )
    order: Literal["trace", "shuffled"] = Field(
        "trace", description="order in which sessions arrive; shuffled by the seed"
    )
    client_timeout_s: Positive | None = Field(
        300.0,
        description="a call not finished this long after its arrival is cancelled and counts as failed; null: never",
    )
    gap_cap_s: NonNegative | None = Field(
        None,
        description="longest gap between calls, seconds; null keeps the recorded gaps (a cap is shown in the report)",
    )
    history_s: NonNegative = Field(
        0.0,
        description="sessions have been arriving for this long when the run begins (poisson and uniform): of those "
        "that came before, the calls are sent that the trace has from then on (by their recorded times, `t`), and no "
        "cache holds anything of them; a load in its steady state, where a run that begins with nobody has young "
        "sessions alone. Measure after a warm-up (warmup_s) as long as caches retain",
    )
    warmup_s: NonNegative = Field(0.0, description="calls that end before this virtual time are not measured, seconds")
    until_s: Positive | None = Field(
        None, description="end the run at this virtual time, seconds; open calls stay in flight; null: run to the end"
    )

    @model_validator(mode="after")
    def _rate(self) -> Load:
        if self.arrivals in ("poisson", "uniform") and self.sessions_per_hour_per_node is None:
            raise ValueError(f"sessions_per_hour_per_node is needed with arrivals: {self.arrivals}")
        if self.history_s and self.arrivals not in ("poisson", "uniform"):
            raise ValueError(f"history_s needs arrivals at a rate (poisson or uniform), not {self.arrivals}")
        if self.history_s and self.gap_cap_s is not None:
            raise ValueError("history_s goes by recorded times, which do not hold with gap_cap_s; leave one out")
        return self


class Engine(Strict):
    """vLLM's engine arguments, under vLLM's names; null takes the profile's or vLLM's own value."""

    kind: Literal["builtin", "vllm"] = Field(
        "builtin",
        description="whose scheduler and block pool decide: the simulator's own (proved equal to vLLM's), or "
        "vLLM's own code in a process beside it (`harness engine install`): for short runs that check a finding",
    )

    num_gpu_blocks: Annotated[int, Field(ge=2)] | None = Field(
        None, description="KV blocks per endpoint, as vLLM logs it; null: derived from the profile's memory account"
    )
    block_size: Count | None = Field(
        None, description="tokens per KV block; null: what vLLM uses for the profile's model"
    )
    max_num_batched_tokens: Count = Field(8192, description="token budget of a step")
    max_num_seqs: Count = Field(256, description="most running requests per endpoint")
    max_model_len: Count | None = Field(None, description="longest prompt plus output, tokens; null: the model's own")
    async_scheduling: bool = Field(True, description="vLLM's asynchronous scheduling (its default on GPUs)")
    enable_prefix_caching: bool = Field(True, description="vLLM's automatic prefix caching")
    scheduling_policy: Literal["fcfs", "priority"] = Field("fcfs", description="waiting queue policy")
    watermark: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="share of blocks kept free on admission")
    long_prefill_token_threshold: Annotated[int, Field(ge=0)] = Field(
        0, description="most prompt tokens of one request in a step while others wait; 0: no limit"
    )
    num_speculative_tokens: Annotated[int, Field(ge=0, le=16)] = Field(
        0, description="draft tokens per step by the model's own module (MTP); 0: no speculative decoding"
    )
    draft_acceptance_share: Annotated[float, Field(ge=0, le=1)] = Field(
        0.65, description="share of all drafted tokens that is accepted (drawn by content, one chance for each in turn)"
    )
    leaping: bool = Field(
        True, description="take runs of equal decode steps at once (same result, less work); kind: vllm cannot"
    )

    @model_validator(mode="before")
    @classmethod
    def _steps(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("kind") == "vllm":
            if data.get("leaping"):
                raise ValueError(
                    "leaping: true and kind: vllm do not go together (vLLM takes every step): set leaping: false"
                )
            return {**data, "leaping": False}
        return data


class Pool(Strict):
    """Workers of one role; a pool has nodes of its own."""

    role: Role = Field(description="prefill, decode or both; becomes the label llm-d.ai/role (docs/disaggregation.md)")
    replicas: Count | None = Field(
        None, description="model replicas (lock-step groups) of this pool; null: as cluster.disaggregation says"
    )
    profile: str | None = Field(None, description="step-time profile of this pool; null: model.profile")
    gpus_per_node: Annotated[int, Field(ge=1, le=10_000)] | None = Field(
        None, description="GPUs per node of this pool; null: cluster.gpus_per_node"
    )
    engine: Engine | None = Field(None, description="engine arguments that differ from cluster.engine; null: none")
    cache: bool = Field(True, description="whether the cache tiers, if there are any, lie below this pool's workers")


class Cluster(Strict):
    """The machines."""

    nodes: Annotated[int, Field(ge=1, le=10_000)] = Field(8, description="nodes in the cluster")
    gpus_per_node: Annotated[int, Field(ge=1, le=10_000)] = Field(
        8, description="GPUs per node; a node holds as many model replicas as fit"
    )
    scrape_interval_ms: Annotated[float, Field(ge=0.001, le=1e9, allow_inf_nan=False)] = Field(
        50.0, description="the router sees gauges as of each worker's last scrape tick, milliseconds of virtual time"
    )
    kv_events: Literal["map", "array"] = Field("map", description="layout of KV events on the wire (vLLM 0.32: map)")
    engine: Engine = Field(default_factory=lambda: Engine())
    pools: list[Pool] = Field(
        default_factory=list,
        description="workers by role, for prefill/decode disaggregation; then `nodes` follows from them. Empty: all "
        "workers do both",
    )
    disaggregation: str | None = Field(
        None,
        description="8P2D: 8 prefill and 2 decode replicas; 3:1: so many parts of `nodes` prefill and decode; null: as "
        "the pools say",
    )

    @model_validator(mode="after")
    def _pools(self) -> Cluster:
        if self.disaggregation is None:
            missing = next((pool.role for pool in self.pools if pool.replicas is None), None)
            if missing is not None:
                raise ValueError(f"pool {missing} needs replicas (or say cluster.disaggregation)")
            return self
        parse_notation(self.disaggregation)
        if self.pools and sorted(pool.role for pool in self.pools) != ["decode", "prefill"]:
            raise ValueError("disaggregation goes with no pools, or with one of prefill and one of decode")
        if any(pool.replicas is not None for pool in self.pools):
            raise ValueError("disaggregation and pools.replicas both say how many: leave one out")
        return self


class Calibration(Strict):
    """Visible corrections of the profile's step times; the default leaves the tables as they are."""

    scale_prefill: Positive = Field(1.0, description="factor on steps that carry prompt tokens")
    scale_decode: Positive = Field(1.0, description="factor on pure decode steps")
    per_step_ms: NonNegative = Field(0.0, description="added to every step, milliseconds")
    per_seq_ms: NonNegative = Field(0.0, description="added per request in the batch, milliseconds")


class Model(Strict):
    """What the workers serve."""

    profile: str = Field(description="step-time profile: a name from `harness profile list` or a path")
    name: str | None = Field(None, description="served model name; null: the profile's model")
    calibration: Calibration | None = Field(None, description="corrections of step times; null: none")
    kv_bytes_per_token: Count | None = Field(
        None,
        description="bytes of a token's KV that tiers store and links carry, all ranks together; null: the profile's, "
        "which counts every layer in full (a model with window layers keeps less)",
    )


class Router(Strict):
    """Who places calls."""

    kind: Literal["llm-d", "round_robin", "random", "least_loaded", "session_sticky"] = Field(
        "llm-d", description="the real llm-d router, or one of the harness's own baselines"
    )
    release: str = Field("v0.7.1", description="llm-d router release (see `harness router list`)")
    binary: str | None = Field(None, description="path of a router binary of that release")
    image: str | None = Field(None, description="image reference with digest to take the binary from")
    config: str = Field(
        "load", description="EndpointPickerConfig: a file, or the name of one in deploy/router/configs/<release>"
    )
    discovery: Literal["auto", "file", "kubernetes"] = Field(
        "auto", description="how the router learns its endpoints; auto: by file where the release can"
    )
    block_tokens: Count | None = Field(
        256,
        description="tokens per block towards the router, a multiple of the engine's block size (see docs/router.md); "
        "null: the engine's own block size",
    )
    latency_ms: NonNegative = Field(0.0, description="virtual time that a decision takes, milliseconds")


_CACHE_KINDS = ("lmcache", "offloading")


class Cache(Strict):
    """Cache tiers below the GPU (see docs/cache.md)."""

    kind: Literal["none", "lmcache", "offloading"] = Field(
        "none",
        description="none: only the engines' own GPU cache; lmcache: the real LMCache below every node; offloading: "
        "vLLM's own CPU tier below every engine (OffloadingConnector)",
    )
    lmcache: CacheConfig | None = Field(None, description="LMCache's settings; needed with kind: lmcache")
    offloading: OffloadingConfig | None = Field(
        None, description="the OffloadingConnector's settings; needed with kind: offloading"
    )

    @model_validator(mode="before")
    @classmethod
    def _chosen(cls, data: Any) -> Any:
        """A kind that is named puts the other kinds' sections aside, so that `cache.kind=none` is enough to compare."""
        if not isinstance(data, dict) or data.get("kind") not in ("none", "lmcache", "offloading"):
            return data
        return {key: value for key, value in data.items() if key in ("kind", data["kind"]) or key not in _CACHE_KINDS}

    @model_validator(mode="after")
    def _complete(self) -> Cache:
        for name in _CACHE_KINDS:
            if (self.kind == name) != (getattr(self, name) is not None):
                raise ValueError(f"kind: {name} and a section {name} go together: give both (or cache: {{kind: none}})")
        return self

    @property
    def publishes_events(self) -> bool:
        """Whether KV events of the tiers go to a router that reads KV events."""
        section = self.offloading or self.lmcache
        return section is not None and section.kv_events

    def hash_tokens(self, block_tokens: int) -> int:
        """Tokens that one hash in the tiers' KV events stands for; `block_tokens`: the engine's block size."""
        if self.offloading is not None:
            return self.offloading.chunk_blocks(block_tokens) * block_tokens
        return block_tokens if self.lmcache is None else self.lmcache.chunk_size


class Slo(Strict):
    """Service level that the report judges by."""

    e2e_p90_s: Positive | None = Field(None, description="p90 of end-to-end latency, seconds")
    ttft_p90_s: Positive | None = Field(None, description="p90 of time to first token, seconds")


class Prices(Strict):
    """Prices per million tokens."""

    name: str = Field(description="whose prices these are")
    input_uncached: NonNegative
    input_cached: NonNegative
    output: NonNegative
    currency: str = "USD"


class Output(Strict):
    """Where results go."""

    dir: str = Field("runs", description="folder for results; each run gets its own folder inside")
    report: bool = Field(True, description="write report.html")


class ArmSpec(Strict):
    """One arm of a comparison: the experiment with some fields set otherwise."""

    name: str = Field(description="name of the arm in tables and plots, and of its folder", pattern=f"^{ARM_NAME}$")
    set: dict[str, Any] = Field(
        default_factory=dict,
        description="fields and their values, `a.b: value`; a section as value replaces the whole section",
    )

    @field_validator("name")
    @classmethod
    def _no_dots_only(cls, name: str) -> str:
        return _not_dots(name)


class Experiment(Strict):
    """One experiment."""

    name: str = Field(description="name of the experiment; part of the output folder's name", pattern=f"^{ARM_NAME}$")
    seed: int = Field(1, ge=0, description="seed of everything random in the run")
    trace: Trace
    load: Load = Field(default_factory=lambda: Load())
    cluster: Cluster = Field(default_factory=lambda: Cluster())
    model: Model
    router: Router = Field(default_factory=lambda: Router())
    cache: Cache = Field(default_factory=lambda: Cache())
    fabric: FabricConfig = Field(default_factory=lambda: FabricConfig())
    front_end: FrontEndConfig = Field(default_factory=lambda: FrontEndConfig())
    kv_transfer: KvTransferConfig = Field(default_factory=lambda: KvTransferConfig())
    live: LiveConfig | None = Field(None, description="what `harness live` adds; a replay does not read it")
    slo: Slo | None = None
    prices: Prices | None = None
    output: Output = Field(default_factory=lambda: Output())
    arms: list[ArmSpec] | None = Field(
        None,
        description="variants that `harness compare` runs over the same load: same `trace`, `load` and `seed`",
    )

    @field_validator("name")
    @classmethod
    def _no_dots_only(cls, name: str) -> str:
        return _not_dots(name)

    @field_validator("arms")
    @classmethod
    def _names_apart(cls, arms: list[ArmSpec] | None) -> list[ArmSpec] | None:
        names = [arm.name for arm in arms or []]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two arms are called {name}")
        return arms


def _not_dots(name: str) -> str:
    if not name.strip("."):
        raise ValueError("must hold more than dots")
    return name


def load_experiment(
    path: Path, overrides: Sequence[str] | None = None, trace: str | None = None, over: Sequence[str] = ()
) -> Experiment:
    """Read, override (`a.b=value`, value in YAML) and validate an experiment file.

    `overrides` are the texts of --set, `over` those of a sweep's --over, which come after: a fault in a field that one
    of them gives is called by it. Relative paths in the file are relative to the file; those given on the command line
    to the working directory.
    """
    document = _read_yaml(path)
    base = path.resolve().parent
    resolve_paths(document, base)
    for arm in document["arms"] if isinstance(document.get("arms"), list) else []:
        if isinstance(arm, dict) and isinstance(arm.get("set"), dict):
            arm["set"] = {
                name: resolved_setting(name, value, base, f"{path}: arm {arm.get('name')}")
                for name, value in arm["set"].items()
            }
    given: dict[str, str] = {}
    for option, texts in (("--set", overrides or ()), ("--over", over)):
        for text in texts:
            name = _override(document, text, option)
            given.pop(name, None)  # the last one counts, and stands last
            given[name] = f"{option} {text}"
    if trace is not None:
        section = document.setdefault("trace", {})
        if not isinstance(section, dict):
            raise InputError(str(path), "field trace is not a mapping", "write `trace: {path: FILE}`")
        section["path"] = str(Path(trace).resolve())
    return validated(document, str(path), given)


def validated(document: dict[str, Any], where: str, given: dict[str, str] | None = None) -> Experiment:
    """The experiment that a document describes; InputError names `where` and the first field that is wrong.

    `given`: what names a fault instead of `where`, for fields (`a.b`) that did not come from there. Paths that are
    still relative here were given on the command line: they are made absolute by the working directory, since the
    experiment may be written into a folder and be run from there.
    """
    document = copy.deepcopy(document)
    resolve_paths(document, Path.cwd())
    try:
        return Experiment.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "(the whole file)"
        giver = _giver(field, given or {})
        where = giver or where + _arm_of(document, first["loc"])
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise InputError(
            where, f"field {field}: {_reason(first)}{more}", "see docs/experiment.md or `harness schema`"
        ) from None


def _giver(field: str, given: dict[str, str]) -> str | None:
    """Who gave the field, or a section that it is in, last."""
    return next((text for name, text in reversed(given.items()) if f"{field}.".startswith(f"{name}.")), None)


def _arm_of(document: dict[str, Any], place: Sequence[Any]) -> str:
    """The name of the arm in which something is wrong, for a message."""
    if len(place) < 2 or place[0] != "arms" or not isinstance(place[1], int):
        return ""
    arm = document["arms"][place[1]]
    return f": arm {arm['name']}" if isinstance(arm, dict) and arm.get("name") else ""


def resolved_yaml(experiment: Experiment) -> str:
    """The experiment with every default written out; running it again repeats the run."""
    return yaml.safe_dump(experiment.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)


def json_schema() -> str:
    """JSON Schema of the experiment file."""
    return json.dumps(Experiment.model_json_schema(), indent=2)


def _reason(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return "unknown key"
    message = str(error["msg"])
    if error["type"] in ("float_type", "int_type") and _is_number(error["input"]):
        message += f" (to YAML {error['input']} is text; a number is written like 1.0e-9, without quotes)"
    return message[0].lower() + message[1:]


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, str) and float(value) is not None
    except ValueError:
        return False


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        document = yaml_text.read(path, "give a readable UTF-8 YAML file")
    except FileNotFoundError:
        raise InputError(
            str(path), "no such experiment file", "give the path of a YAML file such as examples/"
        ) from None
    if not isinstance(document, dict):
        raise InputError(str(path), "holds no mapping", "see docs/experiment.md for the fields")
    return document


def resolve_paths(document: dict[str, Any], base: Path) -> None:
    """Makes the paths in an experiment's document relative to `base`; names of what ships stay names."""
    for section, key, is_path in (
        ("trace", "path", _any_text),
        ("router", "binary", names_file),
        ("router", "config", names_file),
        ("model", "profile", names_file),
        ("fabric", "topology", names_file),
    ):
        values = document.get(section)
        if isinstance(values, dict) and isinstance(values.get(key), str) and is_path(values[key]):
            values[key] = str((base / values[key]).resolve())
    cluster = document.get("cluster")
    pools = cluster.get("pools") if isinstance(cluster, dict) else None
    for pool in pools if isinstance(pools, list) else []:
        if isinstance(pool, dict) and isinstance(pool.get("profile"), str) and names_file(pool["profile"]):
            pool["profile"] = str((base / pool["profile"]).resolve())
    _resolve_costs(document.get("cache"), base)


def _resolve_costs(section: Any, base: Path) -> None:
    """Paths of cost tables, wherever in the cache section they stand."""
    for value in section if isinstance(section, list) else section.values() if isinstance(section, dict) else ():
        _resolve_costs(value, base)
    if isinstance(section, dict) and isinstance(section.get("cost"), str) and names_file(section["cost"]):
        section["cost"] = str((base / section["cost"]).resolve())


def _any_text(text: str) -> bool:
    return True


def names_file(text: str) -> bool:
    return "/" in text or text.endswith((".yaml", ".yml", ".npz", ".json"))


def resolved_setting(name: Any, value: Any, base: Path, where: str) -> Any:
    """The value that an arm gives a field or section, with its paths relative to `base`."""
    document: dict[str, Any] = {}
    keys = put_field(document, str(name), value, where)
    resolve_paths(document, base)
    for key in keys:
        document = document[key]
    return document


def _override(document: dict[str, Any], text: str, option: str) -> str:
    """Sets the field of `a.b=value`, the text of a command's `option`, and returns its name."""
    name, sep, raw = text.partition("=")
    if not sep or not name.strip():
        raise InputError(f"{option} {text}", "not of the form a.b=value", "write for example --set cluster.nodes=4")
    try:
        value = yaml_text.parse(raw)
    except yaml.YAMLError:
        raise InputError(f"{option} {text}", "the value is not YAML", "quote it") from None
    put_field(document, name, value, f"{option} {text}")
    return name.strip()


def put_field(document: dict[str, Any], name: str, value: Any, where: str) -> list[str]:
    """Sets `a.b.c` in an experiment's document, making sections that are not there; in a list `0` is the first entry.

    Returns the field's keys. Raises InputError that names `where` if something on the way is no section.
    """
    keys = name.strip().split(".")
    section: Any = document
    for number, key in enumerate(keys):
        last = number == len(keys) - 1
        if isinstance(section, list):
            if not key.isdecimal() or int(key) >= len(section):
                raise InputError(
                    where, f"field {name}: the list has no entry {key}", "give a number from 0, or the whole list"
                )
            place: Any = int(key)
        elif isinstance(section, dict):
            place = key
        else:
            what = f"field {name}: {keys[number - 1]} is not a section"
            raise InputError(where, what, "see docs/experiment.md for the fields")
        if last:
            section[place] = value
        else:
            if isinstance(section, dict) and section.get(place) is None:
                section[place] = {}
            section = section[place]
    return keys
