"""The user's EndpointPickerConfig: read, checked as far as the coupling needs it, kept as it is.

The router itself validates the configuration; here only its outline is checked. What the coupling changes is
done by `adapt_v071` and `adapt_v0100`, each change recorded in words.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from harness import yaml_text
from harness.errors import InputError
from harness.router import plugins

RELEASES = ("v0.7.1", "v0.10.0")
FOREVER = "876000h"
"""A hundred years: "never" for a timer of the router that runs on the wall clock."""

Json = dict[str, Any]


class PromptForm(Enum):
    """In which form a request carries its prompt (the cheapest one that the configured plugins cannot tell
    apart).
    """

    TINY = "tiny"
    """Nothing looks at the prompt."""
    BLOCK_IDS = "block-ids"
    """One token id per engine block."""
    BLOCK_KEY = "block-key"
    """A short key; the tokenizer service answers it with one token id per engine block."""
    BLOCK_TEXT = "block-text"
    """A few characters per engine block."""
    REAL_TEXT = "real-text"
    """Four characters per token, the router's own estimate."""
    REAL_IDS = "real-ids"
    """Real-sized token ids."""


@dataclass(slots=True)
class Scorer:
    """A scorer of the deciding profile."""

    name: str
    type: str
    weight: float
    parameters: Json


@dataclass(slots=True)
class Coupling:
    """Where the router meets the harness, and the numbers that the adaption depends on."""

    release: str
    discovery: str
    endpoints_file: Path
    endpoints: int
    model: str
    block_tokens: int
    router_block_tokens: int
    """Block size in which precise prefix scoring counts: `block_tokens`, or a multiple of it."""
    num_gpu_blocks: int
    kv_events_url: str
    tokenizer_socket: Path
    metrics_sources: int = 64
    entries_per_endpoint: int = 1
    """Tiers in which an endpoint may say that it holds a block."""


@dataclass(slots=True)
class Adapted:
    """The configuration as the router gets it, and what the harness must know about it."""

    document: Json
    added: list[str] = field(default_factory=list)
    not_simulated: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    scorers: list[Scorer] = field(default_factory=list)
    reads_gauges: bool = False
    reads_kv_events: bool = False
    needs_tokenizer: bool = False
    prefix: str | None = None
    """Kind of the deciding profile's prefix scorer: "precise", "approximate" or None."""
    prefix_scorer: str | None = None
    approximate: bool = False
    """Whether any plugin keeps an approximate prefix index, scored by the deciding profile or not."""
    one_approximate: bool = False
    """Whether exactly one does, so that the router's hit ratio is its."""
    prompt_form: PromptForm = PromptForm.TINY
    text_bytes_per_block: int = 0
    max_prompt_blocks: int | None = None
    max_prompt_tokens: int | None = None
    tier_weights: dict[str, float] | None = None
    """Weight of a block by the tier that holds it (kvCacheBackendConfigs); None: the router's own."""
    match_block_tokens: int = 0
    """Tokens per block in which the prefix scorer counts."""
    session_header: str | None = None
    gives_tokens_back: bool = False
    """Whether a plugin reads the prompt tokens in flight, which the router gives back at the first token in its own
    time: decisions wait for it.
    """
    order_matters: bool = False
    """Whether a decision depends on the order of the router's producers, which v0.10.0 draws at its start: the count of
    tokens in flight takes what is cached off a prompt, for the score, only if it comes after the prefix producer. The
    router is started until it does.
    """
    cold_start: bool = False
    """Whether every endpoint must have had one cold request, in a seeded order, before the first call comes."""
    phase_header: str | None = None
    """Header that names the profile to run, where the config has one decision per phase."""
    flow_control: bool = False

    @property
    def text(self) -> str:
        """The configuration as YAML."""
        return yaml.safe_dump(self.document, sort_keys=False, width=110)


class Document:
    """An EndpointPickerConfig under adaption: `plugins` by name, and helpers that keep the user's order."""

    def __init__(self, document: Json, where: str) -> None:
        self.document = document
        self.where = where
        self.plugins: list[Json] = document["plugins"]

    def by_type(self, *types: str) -> list[Json]:
        """Plugin entries of these types, in the file's order."""
        return [p for p in self.plugins if p["type"] in types]

    def named(self, name: str) -> Json | None:
        """The plugin entry with this name."""
        return next((p for p in self.plugins if plugin_name(p) == name), None)

    def has(self, *types: str) -> bool:
        """Whether a plugin of one of these types is declared."""
        return bool(self.by_type(*types))

    def parameters(self, plugin: Json) -> Json:
        """The plugin's parameters, to be changed in place."""
        parameters = plugin.get("parameters")
        if parameters is None:
            parameters = plugin["parameters"] = {}
        if not isinstance(parameters, dict):
            raise InputError(
                f"{self.where}: plugins[{plugin_name(plugin)}].parameters",
                "is not a mapping",
                "write `key: value` pairs",
            )
        return parameters

    def section(self, *path: str, of: Json | None = None) -> Json:
        """A nested mapping, made where it is missing."""
        node = self.document if of is None else of
        for key in path:
            child = node.get(key)
            if child is None:
                child = node[key] = {}
            if not isinstance(child, dict):
                raise InputError(f"{self.where}: {key}", "is not a mapping", "write `key: value` pairs")
            node = child
        return node

    def profiles(self) -> list[Json]:
        """The scheduling profiles."""
        found = self.document.get("schedulingProfiles") or []
        return [p for p in found if isinstance(p, dict)]

    def refs(self, profile: Json) -> list[Json]:
        """Plugin references of a profile, to be changed in place."""
        return [r for r in profile.get("plugins") or [] if isinstance(r, dict)]

    def deciding_profile(self) -> Json | None:
        """The profile whose pick is the destination: "decode" of a disaggregated setup, else the first."""
        profiles = self.profiles()
        return next((p for p in profiles if p.get("name") == "decode"), profiles[0] if profiles else None)

    def scorers(self) -> list[Scorer]:
        """Scorers of the deciding profile with their weights."""
        profile = self.deciding_profile()
        found = []
        for ref in self.refs(profile) if profile else []:
            plugin = self.named(str(ref.get("pluginRef")))
            if plugin is not None and plugin["type"] in plugins.SCORERS:
                weight = ref.get("weight")
                found.append(
                    Scorer(
                        plugin_name(plugin),
                        plugin["type"],
                        1.0 if weight is None else float(weight),
                        copy.deepcopy(plugin.get("parameters") or {}),
                    )
                )
        return found

    def add_to_profiles(self, plugin: str, weight: float) -> None:
        """References a scorer from every profile, before the picker as the convention has it."""
        for profile in self.profiles():
            refs = profile.setdefault("plugins", [])
            at = len(refs)
            while at and isinstance(refs[at - 1], dict) and self._is_picker(refs[at - 1]):
                at -= 1
            refs.insert(at, {"pluginRef": plugin, "weight": weight})

    def _is_picker(self, ref: Json) -> bool:
        plugin = self.named(str(ref.get("pluginRef")))
        return plugin is not None and plugin["type"].endswith("-picker")


def plugin_name(plugin: Json) -> str:
    """A plugin entry's name: its type where none is given, as in the router."""
    return str(plugin.get("name") or plugin["type"])


def load(path: Path) -> tuple[str, Json]:
    """The user's file as text and as YAML; InputError if it is not an EndpointPickerConfig."""
    where = str(path)
    remedy = "give the path of an EndpointPickerConfig YAML file"
    try:
        text, document = yaml_text.read_with_text(path, remedy)
    except FileNotFoundError:
        raise InputError(where, "no such file", remedy) from None
    if not isinstance(document, dict) or document.get("kind") != "EndpointPickerConfig":
        raise InputError(where, "is not an EndpointPickerConfig", "start it with `kind: EndpointPickerConfig`")
    entries = document.get("plugins")
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{where}: plugins", "is missing or empty", "list the router's plugins")
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
            raise InputError(f"{where}: plugins[{i}]", "has no type", "write `- type: <plugin type>`")
    profiles = document.get("schedulingProfiles")
    if not isinstance(profiles, list) or not profiles:
        raise InputError(
            f"{where}: schedulingProfiles", "is missing or empty", "name at least one profile and its plugins"
        )
    for i, profile in enumerate(profiles):
        if not isinstance(profile, dict) or not isinstance(profile.get("plugins"), list):
            raise InputError(f"{where}: schedulingProfiles[{i}].plugins", "is not a list", "list plugin references")
    return text, document


def adapt(document: Json, where: str, coupling: Coupling) -> Adapted:
    """The configuration with what the coupling needs added; the input is not changed."""
    from harness.router import adapt_v0100, adapt_v071

    doc = Document(copy.deepcopy(document), where)
    adapted = Adapted(doc.document, scorers=doc.scorers())
    adapted.not_simulated = [
        f"{plugin_name(p)}: {plugins.NOT_SIMULATED[p['type']]}"
        for p in doc.plugins
        if p["type"] in plugins.NOT_SIMULATED
    ]
    adapted.flow_control = "flowControl" in (doc.document.get("featureGates") or [])
    if adapted.flow_control:
        adapted.not_simulated.append(
            "flowControl: a request that the router holds back would wait for virtual time, which stands still"
        )
    handler = next(iter(doc.by_type(plugins.HEADER_HANDLER)), None)
    if handler is not None:
        adapted.phase_header = str((handler.get("parameters") or {}).get("headerName") or "EPP-Profile").strip()
    cold = doc.by_type(plugins.NO_HIT_LRU)
    adapted.cold_start = bool(cold) and len(doc.profiles()) == 1
    if adapted.cold_start:
        adapted.added.append(
            f"{plugin_name(cold[0])}: one cold request to every endpoint before the run, in a seeded order, as "
            "the router ranks endpoints without one in the order of a map"
        )
    elif cold:
        adapted.not_simulated.append(
            f"{plugin_name(cold[0])}: ranks endpoints that had no cold request in the order of a map, two runs differ"
        )
    adapted.reads_gauges = adapted.flow_control or doc.has(*plugins.GAUGE_READERS)
    if coupling.release == "v0.7.1":
        adapt_v071.adapt(doc, coupling, adapted)
    else:
        adapt_v0100.adapt(doc, coupling, adapted)
    return adapted
