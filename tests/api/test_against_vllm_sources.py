"""The API against vLLM 0.32's own sources: routes and fields of its objects, read as text, nothing imported."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from tests.api.live_server import MODEL, serving, spec


@pytest.fixture(scope="module")
def entrypoints() -> Path:
    from fake_workers.vllm_engine.install import interpreter

    python = interpreter()
    found = list(Path(python).parents[1].glob("lib/python*/site-packages/vllm/entrypoints")) if python else []
    if not found:
        pytest.skip("vLLM's Python sources are not installed: python -m fake_workers.vllm_engine.install")
    return found[0]


LEFT_OUT = {
    # pooling, speech, other vendors' protocols: other kinds of models
    "/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
    "/v2/embed", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/realtime", "/generative_scoring",
    "/v1/systemone",
    # batches, the way back from ids to objects
    "/v1/chat/completions/batch", "/v1/completions/derender", "/v1/chat/completions/derender",
    # what a simulated GPU has not: weights, collectives, profilers, elastic and fault-tolerant groups
    "/collective_rpc", "/start_profile", "/stop_profile", "/scale_elastic_ep", "/is_scaling_elastic_ep",
    "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update",
    "/start_draft_weight_update", "/update_weights", "/update_weight_version",
    "/weight_checker", "/weight_info", "/finish_weight_update", "/get_world_size",
    "/release_kv_cache_memory", "/invocations", "/tokenizer_info",
}  # fmt: skip


def paths(folder: Path) -> set[str]:
    """Paths of the routes that vLLM's sources declare."""
    found: set[str] = set()
    for file in folder.rglob("*.py"):
        if any(
            part in ("pooling", "speech_to_text", "cohere", "fault_tolerance", "dp_supervisor.py")
            for part in file.parts
        ):
            continue
        found.update(re.findall(r'@router\.(?:get|post)\(\s*"(/[^"]*)"', file.read_text()))
    return found


def test_routes(entrypoints: Path) -> None:
    with serving(spec()) as live, live.client() as http:
        ours = set(http.get("/openapi.json").json()["paths"])
    wanted = paths(entrypoints)
    assert len(wanted) > 25
    assert sorted(wanted - ours - LEFT_OUT - {"/"}) == []


def fields(file: Path, name: str) -> set[str]:
    """Field names of a model, read from its class statement and those of its bases in the same file."""
    tree = ast.parse(file.read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    node = classes[name]
    found = {
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and not item.target.id.startswith("_")
        and "ClassVar" not in ast.unparse(item.annotation)
        and "exclude_if" not in ast.unparse(item)
    }
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            found |= fields(file, base.id)
    return found


def test_objects(entrypoints: Path) -> None:
    completion = entrypoints / "openai/completion/protocol.py"
    chat = entrypoints / "openai/chat_completion/protocol.py"
    engine = entrypoints / "serve/engine/protocol.py"
    with serving(spec(speed=20.0)) as live, live.client() as http:
        body: dict[str, Any] = {"max_tokens": 2, "ignore_eos": True, "model": MODEL}
        found = http.post("/v1/completions", json={**body, "prompt": "x"}).json()
        assert set(found) == fields(completion, "CompletionResponse")
        assert set(found["choices"][0]) == fields(completion, "CompletionResponseChoice")
        assert set(found["usage"]) == fields(engine, "UsageInfo")
        messages = [{"role": "user", "content": "x"}]
        found = http.post("/v1/chat/completions", json={**body, "messages": messages}).json()
        assert set(found) == fields(chat, "ChatCompletionResponse")
        assert set(found["choices"][0]) == fields(chat, "ChatCompletionResponseChoice")
        assert set(found["choices"][0]["message"]) == fields(chat, "ChatMessage") - {"tool_calls"}
        cards = http.get("/v1/models").json()["data"]
        assert set(cards[0]) == fields(engine, "ModelCard")
        assert set(cards[0]["permission"][0]) == fields(engine, "ModelPermission")
        error = http.post("/v1/completions", json={}).json()["error"]
        assert set(error) == fields(engine, "ErrorInfo")
        tokens = http.post("/tokenize", json={"prompt": "x"}).json()
        assert set(tokens) == fields(entrypoints / "serve/tokenize/protocol.py", "TokenizeResponse")
        messages_body = {"model": MODEL, "max_tokens": 2, "messages": messages}
        found = http.post("/v1/messages", json=messages_body).json()
        assert set(found) <= fields(entrypoints / "anthropic/protocol.py", "AnthropicMessagesResponse")
        found = http.post("/v1/responses", json={"input": "x", "max_output_tokens": 2}).json()
        assert set(found) <= fields(entrypoints / "openai/responses/protocol.py", "ResponsesResponse")


def test_a_lock_step_group_behind_two_addresses() -> None:
    """Ranks that step together are endpoints of their own, with metrics of their own."""
    one = spec(2)
    group = one.model_copy(update={"groups": [[one.groups[0][0], one.groups[1][0]]]})
    with serving(group) as live, live.client(0) as first, live.client(1) as second:
        body = {"prompt": "which rank? " * 20, "max_tokens": 6, "ignore_eos": True}
        for client, count in ((first, 1), (second, 2)):
            for _ in range(count):
                assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 6
        pages = [client.get("/metrics").text for client in (first, second)]
        totals = [re.search(r"^vllm:generation_tokens_total\{[^}]*\} (\S+)", page, re.M) for page in pages]
        assert [float(t[1]) for t in totals if t] == [6.0, 12.0]
