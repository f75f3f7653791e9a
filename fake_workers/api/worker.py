"""One worker as its clients see it: a served model on one rank of an engine. Routes end in `Worker.begin`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fake_workers.api.errors import ApiError, not_found, overloaded
from fake_workers.api.generation import Answer, Sampling, plan
from fake_workers.api.live_engine import LiveEngine, Stream
from fake_workers.api.server_metrics import ServerMetrics
from fake_workers.api.tokenizer import Message, Tokenizer
from fake_workers.engine.request import EngineRequest

VERSION = "0.32.0"
"""The vLLM release whose API this is."""
_MOST_TOKEN_ID = 2**32 - 1


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What vLLM's command line would say. `name` is the pod's."""

    name: str
    model: str
    host: str
    port: int
    rank: int = 0
    mean_output_tokens: int = 256
    """Answers that nothing else ends are half to one and a half times as long."""
    enable_prompt_tokens_details: bool = True
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    dev_mode: bool = True
    """VLLM_SERVER_DEV_MODE and VLLM_ALLOW_RUNTIME_LORA_UPDATING."""
    max_loras: int = 8
    kv_port: int = 5600
    """remote_port of kv_transfer_params."""
    tp_size: int = 1
    events_endpoint: str = ""
    replay_endpoint: str = ""


@dataclass(slots=True)
class Adapter:
    """A LoRA adapter that is loaded."""

    name: str
    path: str
    number: int


@dataclass(slots=True)
class Call:
    """A request's sequences, in order of prompt and choice; `changed` is set whenever one of them moves on."""

    request_id: str
    model: str
    prompts: list[list[int]]
    streams: list[Stream]
    changed: asyncio.Event
    choices: int
    created: int = field(default_factory=lambda: int(time.time()))
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def prompt_tokens(self) -> int:
        """Over all prompts."""
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def output_tokens(self) -> int:
        """Over all sequences, so far."""
        return sum(stream.ready for stream in self.streams)


@dataclass(slots=True)
class Extras:
    """What vLLM adds to the OpenAI API and an engine heeds."""

    priority: int = 0
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


class Worker:
    """State behind one address."""

    def __init__(
        self, settings: WorkerSettings, engine: LiveEngine, metrics: ServerMetrics, tokenizer: Tokenizer
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.metrics = metrics
        self.tokenizer = tokenizer
        self.started = int(time.time())
        self.load = 0
        """Requests being served (GET /load)."""
        self.sleep_level: int | None = None
        self.draining = False
        self.adapters: dict[str, Adapter] = {}
        self.responses: dict[str, dict[str, Any]] = {}
        self.running: dict[str, list[Stream]] = {}
        """Streams by the client's request id."""
        self.remote_prefills: dict[str, int] = {}
        """Tokens whose KV a prefill worker holds, by engine request id: read by the connector."""
        self.more_metrics: Callable[[], bytes] = bytes
        """What a scrape shows beside vLLM's metrics."""
        self.tiers_account: Callable[[], dict[str, Any]] | None = None
        """What the cache tiers below have done, where there are any."""
        self._adapters_made = 0
        self._requests = 0

    # ------------------------------------------------------------------ models

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output."""
        return self.engine.config.max_model_len

    def check_model(self, model: str | None) -> str:
        """The served name; 404 where it is none."""
        if not model or model == self.settings.model:
            return self.settings.model
        if model in self.adapters:
            return model
        raise not_found(f"The model `{model}` does not exist. Valid aliases: {self.settings.model}.")

    def load_adapter(self, name: str, path: str, in_place: bool) -> str:
        """POST /v1/load_lora_adapter."""
        if not name or not path:
            raise ApiError("Both 'lora_name' and 'lora_path' must be provided.", kind="InvalidUserInput")
        if name == self.settings.model:
            raise ApiError(f"The lora adapter '{name}' conflicts with a served base model.", kind="InvalidUserInput")
        old = self.adapters.get(name)
        if old and not in_place:
            raise ApiError(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True.",
                kind="InvalidUserInput",
            )
        if not old:
            self._adapters_made += 1
        self.adapters[name] = Adapter(name, path, old.number if old else self._adapters_made)
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload_adapter(self, name: str) -> str:
        """POST /v1/unload_lora_adapter."""
        if not name:
            raise ApiError("'lora_name' needs to be provided to unload a LoRA adapter.", kind="InvalidUserInput")
        if name not in self.adapters:
            raise not_found(f"The lora adapter '{name}' cannot be found.", None)
        del self.adapters[name]
        return f"Success: LoRA adapter '{name}' removed successfully."

    # ------------------------------------------------------------------ prompts

    def encode(self, text: str) -> list[int]:
        """A prompt's ids."""
        return self.tokenizer.encode(text)

    def encode_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """A conversation's ids."""
        return self.tokenizer.encode(self.chat_text(messages, add_generation_prompt))

    def chat_text(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """A conversation's prompt."""
        try:
            return self.tokenizer.chat(messages, add_generation_prompt)
        except Exception as error:  # a template's own complaint
            raise ApiError(str(error)) from None

    def check_prompt(self, prompt: list[int], truncate: int | None = None) -> list[int]:
        """Refuse what vLLM refuses: nothing, ids that no vocabulary has, more than the context."""
        if truncate is not None:
            keep = self.max_model_len - 1 if truncate == -1 else truncate
            prompt = prompt[-keep:] if keep else []
        if not prompt:
            raise ApiError("The decoder prompt cannot be empty", where="prompt")
        for token_id in (min(prompt), max(prompt)):
            if not 0 <= token_id <= _MOST_TOKEN_ID:
                raise ApiError(f"Token id {token_id} is out of vocabulary")
        if len(prompt) > self.max_model_len:
            raise ApiError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, your prompt contains "
                f"{len(prompt)} input tokens, which exceeds this limit even without any output tokens. Please reduce "
                "the length of the input prompt.",
                where="input_tokens",
                value=len(prompt),
            )
        return prompt

    def output_limit(self, prompt: list[int], wanted: int | None, name: str = "max_tokens") -> int:
        """Most tokens of an answer: what was asked for, and what the context leaves room for."""
        if wanted is not None and wanted < 1:
            raise ApiError(f"max_tokens must be at least 1, got {wanted}.", where="max_tokens", value=wanted)
        if wanted is not None and wanted > self.max_model_len:
            raise ApiError(
                f"{name}={wanted} cannot be greater than max_model_len={self.max_model_len}. Please request fewer "
                "output tokens.",
                where=name,
                value=wanted,
            )
        room = self.max_model_len - len(prompt)
        if room < 1:
            raise ApiError(f"max_tokens must be at least 1, got {room}.", where="max_tokens", value=room)
        return room if wanted is None else min(wanted, room)

    # ------------------------------------------------------------------ requests

    def admit(self, sequences: int) -> None:
        """The queue limits of the API server (503)."""
        if self.draining:
            raise overloaded("The server is shutting down.")
        limit = self.settings.max_num_queued_reqs
        if limit is not None and self.engine.unfinished(self.settings.rank) + sequences > limit:
            self.metrics.rejections["max_num_queued_reqs"].inc()
            raise overloaded(
                "The engine is currently busy and cannot accept new requests. Please try again later or on a "
                "different instance."
            )
        most = self.settings.max_num_queued_tokens
        if most is not None and self.engine.queued_tokens(self.settings.rank) >= most:
            self.metrics.rejections["max_num_queued_tokens"].inc()
            raise overloaded(
                "The engine has reached its prefill token backlog limit. Please try again later or on a different "
                "instance."
            )

    def begin(
        self,
        request_id: str,
        model: str | None,
        prompts: list[list[int]],
        samplings: list[Sampling],
        extras: Extras,
        max_tokens: int | None,
    ) -> Call:
        """Hand all sequences of a request to the engine. Raises ApiError, EngineDeadError."""
        served = self.check_model(model)
        choices = samplings[0].n
        self.admit(len(prompts) * choices)
        adapter = self.adapters.get(served)
        changed = asyncio.Event()
        streams = []
        for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            for choice in range(choices):
                answer = plan(self.tokenizer, prompt, sampling, choice, self.settings.mean_output_tokens)
                streams.append(self._stream(f"{request_id}-{number}", choice, prompt, answer, extras, adapter))
                streams[-1].changed = changed
                streams[-1].max_tokens = max_tokens
                self.engine.submit(streams[-1])
            self.metrics.h_n.observe(choices)
        call = Call(request_id, served, prompts, streams, changed, choices)
        if (extras.kv_transfer_params or {}).get("do_remote_decode"):
            call.kv_transfer_params = self._prefilled(call)
        self.running[request_id] = streams
        return call

    def end(self, call: Call) -> None:
        """The client has its answer, or has gone away: what still runs is aborted."""
        self.running.pop(call.request_id, None)
        for stream in call.streams:
            self.engine.abort(stream)
            self.remote_prefills.pop(stream.request.request_id, None)
        longest: dict[int, int] = {}
        for i, stream in enumerate(call.streams):
            longest[i // call.choices] = max(longest.get(i // call.choices, 0), stream.ready)
        for tokens in longest.values():
            self.metrics.h_max_generation.observe(tokens)

    def abort(self, request_ids: Sequence[str]) -> int:
        """Abort by the client's request ids, with or without the API's prefix; returns how many were found."""
        found = 0
        for wanted in request_ids:
            for known in list(self.running):
                if known == wanted or known.partition("-")[2] == wanted:
                    found += 1
                    for stream in self.running[known]:
                        self.engine.abort(stream)
        return found

    def _stream(
        self, request_id: str, choice: int, prompt: list[int], answer: Answer, extras: Extras, adapter: Adapter | None
    ) -> Stream:
        names = self.engine.names[self.settings.rank]
        named = names.name(
            prompt, answer.token_ids, extras.cache_salt, (adapter.name, adapter.path) if adapter else None
        )
        self._requests += 1
        request = EngineRequest(
            request_id=f"{choice}_{request_id}-{self._requests}",
            origin=named.origin,
            runs=named.runs,
            prompt_tokens=len(prompt),
            output_tokens=len(answer.token_ids),
            arrival_ns=0,
            priority=extras.priority,
        )
        if (extras.kv_transfer_params or {}).get("do_remote_prefill"):
            self.remote_prefills[request.request_id] = len(prompt)
        return Stream(
            self.settings.rank,
            request,
            answer,
            None,
            lora=adapter.name if adapter else None,
            prompt=prompt,
            salt=extras.cache_salt or "",
        )

    def _prefilled(self, call: Call) -> dict[str, Any]:
        """Where a decode worker finds the KV of this prefill (NIXL connector's answer)."""
        block = self.engine.config.block_tokens
        blocks = -(-call.prompt_tokens // block)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": list(range(1, blocks + 1)),
            "remote_engine_id": f"{self.settings.name}-{self.settings.rank}",
            "remote_request_id": call.request_id,
            "remote_host": self.settings.host,
            "remote_port": self.settings.kv_port,
            "tp_size": self.settings.tp_size,
        }
