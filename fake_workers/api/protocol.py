"""Request bodies, under vLLM 0.32's names. Fields that cannot show in a simulated answer are taken and ignored."""

from __future__ import annotations

import uuid
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fake_workers.api.errors import ApiError

TokenId = Annotated[int, Field(ge=0)]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
_SALT_FORBIDDEN = frozenset("@/\\\x00")
_LONGEST_SALT = 128
_MOST_PROMPTS = 1024
MOST_STOP_STRINGS = 4


def random_id() -> str:
    """What vLLM's random_uuid gives."""
    return uuid.uuid4().hex


class Body(BaseModel):
    """Unknown fields are allowed, as in the OpenAI API of vLLM."""

    model_config = ConfigDict(extra="allow")


class StreamOptions(Body):
    """What a stream says about usage."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Common(Body):
    """What completions and chat have in common."""

    model: str | None = None
    n: int | None = 1
    seed: Int64 | None = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOP_STRINGS)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    use_beam_search: bool = False
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**63 - 1)] | None = None
    priority: Int64 = 0
    request_id: str = Field(default_factory=random_id)
    session_id: str | None = None
    return_token_ids: bool | None = None
    return_token_offsets: bool | None = False
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _before(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        check_salt(data.get("cache_salt"))
        if data.get("stream_options") and not data.get("stream"):
            raise ApiError("Stream options can only be defined when `stream=True`.", where="stream_options")
        return data


class CompletionRequest(Common):
    """POST /v1/completions."""

    prompt: list[TokenId] | list[list[TokenId]] | str | list[str] | None = None
    max_tokens: int | None = 16
    echo: bool | None = False
    logprobs: int | None = None
    suffix: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _prompt(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("max_tokens") is None:
            data = {**data, "max_tokens": 16}
        prompt = data.get("prompt")
        if prompt is None or prompt == "":
            raise ApiError("Either prompt or prompt_embeds must be provided and non-empty.", where="prompt")
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) and len(prompt) > _MOST_PROMPTS:
            raise ApiError(
                f"prompt list length {len(prompt)} exceeds the maximum allowed count of {_MOST_PROMPTS}. To increase "
                "this limit, set the VLLM_MAX_COMPLETION_PROMPTS environment variable.",
                where="prompt",
            )
        logprobs = data.get("logprobs")
        if logprobs is not None and (not isinstance(logprobs, (int, float)) or logprobs < -1):
            raise ApiError("`logprobs` must be a positive value or -1.", where="logprobs", value=logprobs)
        return data


class ChatRequest(Common):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    echo: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_prompt_text: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _chat(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("continue_final_message") and data.get("add_generation_prompt"):
            raise ApiError("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
        if data.get("tool_choice") not in (None, "none", "auto") and not data.get("tools"):
            raise ApiError("When using `tool_choice`, `tools` must be set.", where="tool_choice")
        if data.get("tools") == []:
            raise ApiError(
                "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.",
                where="tools",
            )
        return data


class ResponsesRequest(Body):
    """POST /v1/responses."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    background: bool | None = False
    store: bool | None = True
    previous_response_id: str | None = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Any = "auto"
    truncation: str | None = "disabled"
    user: str | None = None
    request_id: str = Field(default_factory=lambda: f"resp_{random_id()}")
    priority: Int64 = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _salt(cls, data: Any) -> Any:
        if isinstance(data, dict):
            check_salt(data.get("cache_salt"))
        return data


class MessagesRequest(BaseModel):
    """POST /v1/messages (Anthropic's)."""

    model: str
    messages: list[dict[str, Any]]
    max_tokens: int
    stream: bool | None = False
    stop_sequences: Annotated[list[str], Field(max_length=MOST_STOP_STRINGS)] | None = None
    system: str | list[dict[str, Any]] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _positive(self) -> MessagesRequest:
        if self.max_tokens <= 0:
            raise ValueError("max_tokens must be positive")
        return self


class CountTokensRequest(BaseModel):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None


class SamplingParams(Body):
    """sampling_params of /inference/v1/generate."""

    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    n: int = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False


class GenerateRequest(Body):
    """POST /inference/v1/generate: token ids in, token ids out."""

    token_ids: Annotated[list[TokenId], Field(min_length=1)]
    sampling_params: SamplingParams
    request_id: str = Field(default_factory=random_id)
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    output_mode: str = "tokens"
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Int64 = 0
    kv_transfer_params: dict[str, Any] | None = None
    return_token_ids: bool | None = None


class TokenizeRequest(Body):
    """POST /tokenize, of a prompt or of messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


class LoadLora(BaseModel):
    """POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadLora(BaseModel):
    """POST /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None


def check_salt(salt: Any) -> None:
    """vLLM's rules for cache salts."""
    if salt is None:
        return
    if not isinstance(salt, str) or not salt:
        raise ApiError("Parameter 'cache_salt' must be a non-empty string if provided.", where="cache_salt")
    if len(salt) > _LONGEST_SALT or any(c in _SALT_FORBIDDEN for c in salt):
        raise ApiError(
            "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', '\\\\', or NUL.",
            where="cache_salt",
        )
