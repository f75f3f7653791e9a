"""A worker's HTTP API over real sockets: vLLM's routes, objects, errors; what the metrics say of it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.api.live_server import JSON, MODEL, Live, samples, serving, spec

openai = pytest.importorskip("openai")


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(spec()) as found:
        yield found


@pytest.fixture
def http(live: Live) -> Iterator[httpx.Client]:
    with live.client() as client:
        yield client


@pytest.fixture
def sdk(live: Live) -> Any:
    return openai.OpenAI(base_url=f"{live.urls[0]}/v1", api_key="none", max_retries=0)


def events(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


# ---------------------------------------------------------------------- completions and chat


@pytest.mark.parametrize("prompt", ["some text to go on with", [1001, 1002, 1003], ["one", "two"], [[5, 6], [7, 8, 9]]])
def test_completions(sdk: Any, prompt: Any) -> None:
    found = sdk.completions.create(model=MODEL, prompt=prompt, max_tokens=7, extra_body={"ignore_eos": True})
    many = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    assert [c.finish_reason for c in found.choices] == ["length"] * many
    assert found.usage.completion_tokens == 7 * many
    assert found.usage.total_tokens == found.usage.prompt_tokens + 7 * many
    assert found.id.startswith("cmpl-") and found.model == MODEL


def test_a_stream_carries_one_token_per_chunk(http: httpx.Client) -> None:
    body = {"prompt": "hello", "max_tokens": 9, "ignore_eos": True, "stream": True, "return_token_ids": True}
    chunks = events(http.post("/v1/completions", json=body).text)
    assert len(chunks) == 9
    ids = [c["choices"][0]["token_ids"] for c in chunks]
    assert all(len(i) == 1 for i in ids)
    text = "".join(c["choices"][0]["text"] for c in chunks)
    assert http.post("/tokenize", json={"prompt": text}).json()["tokens"] == [i[0] for i in ids]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 8 + ["length"]
    whole = http.post("/v1/completions", json={**body, "stream": False}).json()
    assert whole["choices"][0]["text"] == text


def test_stream_and_usage_options(sdk: Any) -> None:
    kwargs = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 5}
    stream = sdk.chat.completions.create(
        **kwargs,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        extra_body={"ignore_eos": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.usage.completion_tokens for c in chunks] == [0, 1, 2, 3, 4, 5, 5]
    assert chunks[-1].choices == [] and chunks[-1].usage.prompt_tokens > 0
    plain = list(sdk.chat.completions.create(**kwargs, stream=True))
    assert all(c.usage is None for c in plain)


def test_cached_tokens(sdk: Any) -> None:
    prompt = "a long enough prompt to fill several blocks of the cache " * 20
    first = sdk.completions.create(model=MODEL, prompt=prompt, max_tokens=3)
    second = sdk.completions.create(model=MODEL, prompt=prompt + " and more", max_tokens=3)
    salted = sdk.completions.create(model=MODEL, prompt=prompt, max_tokens=3, extra_body={"cache_salt": "mine"})
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert first.usage.prompt_tokens - 16 <= cached <= first.usage.prompt_tokens and cached % 16 == 0
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_the_answer_is_cached_for_the_next_turn(sdk: Any) -> None:
    messages = [{"role": "user", "content": "tell me a long story"}]
    first = sdk.chat.completions.create(model=MODEL, messages=messages, max_tokens=100, extra_body={"ignore_eos": True})
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "go on"},
    ]
    second = sdk.chat.completions.create(model=MODEL, messages=messages, max_tokens=5)
    assert second.usage.prompt_tokens_details.cached_tokens >= (first.usage.total_tokens // 16 - 1) * 16


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_max_tokens(http: httpx.Client, name: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], name: 6, "ignore_eos": True}
    assert http.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] == 6


def test_n_choices(sdk: Any) -> None:
    found = sdk.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "x"}], n=3, max_tokens=8, extra_body={"ignore_eos": True}
    )
    texts = [c.message.content for c in found.choices]
    assert len(set(texts)) == 3 and found.usage.completion_tokens == 24
    assert [c.index for c in found.choices] == [0, 1, 2]


def test_stop_and_stop_reason(http: httpx.Client) -> None:
    body = {"prompt": "stop me", "max_tokens": 40, "ignore_eos": True}
    text = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    word = text.split()[9]
    found = http.post("/v1/completions", json={**body, "stop": [word]}).json()["choices"][0]
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", word)
    assert text.startswith(found["text"]) and word not in found["text"]
    streamed = events(http.post("/v1/completions", json={**body, "stop": word, "stream": True}).text)
    assert "".join(c["choices"][0]["text"] for c in streamed) == found["text"]


def test_min_tokens(http: httpx.Client) -> None:
    body = {"prompt": "short", "max_tokens": 2000, "min_tokens": 600}
    found = http.post("/v1/completions", json=body).json()
    assert found["usage"]["completion_tokens"] >= 600 and found["choices"][0]["finish_reason"] == "stop"


def test_echo_and_logprobs(http: httpx.Client) -> None:
    body = {"prompt": "echo this", "max_tokens": 3, "echo": True, "logprobs": 2, "ignore_eos": True}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"].startswith("echo this")
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert all(len(top) == 2 for top in choice["logprobs"]["top_logprobs"])


def test_chunked_body_and_request_id(http: httpx.Client) -> None:
    data = json.dumps({"prompt": "chunked", "max_tokens": 2}).encode()
    pieces = (data[i : i + 5] for i in range(0, len(data), 5))
    found = http.post("/v1/completions", content=pieces, headers={**JSON, "x-request-id": "abc"})
    assert found.status_code == 200 and found.json()["id"] == "cmpl-abc"


# ---------------------------------------------------------------------- the other APIs


def test_responses(sdk: Any) -> None:
    first = sdk.responses.create(model=MODEL, input="hello", max_output_tokens=2000)
    assert first.status == "completed" and first.output_text
    follow = sdk.responses.create(model=MODEL, input="more", previous_response_id=first.id, max_output_tokens=4)
    assert follow.usage.input_tokens > first.usage.total_tokens and follow.status == "incomplete"
    assert sdk.responses.retrieve(first.id).output_text == first.output_text
    kinds = []
    text = ""
    for event in sdk.responses.create(model=MODEL, input="hello", max_output_tokens=2000, stream=True):
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            text += event.delta
    assert text == first.output_text
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"


def test_messages(http: httpx.Client) -> None:
    body = {"model": MODEL, "max_tokens": 2000, "system": "be brief", "messages": [{"role": "user", "content": "hi"}]}
    found = http.post("/v1/messages", json=body).json()
    assert found["stop_reason"] == "end_turn" and found["content"][0]["type"] == "text"
    tokens = http.post("/v1/messages/count_tokens", json={k: body[k] for k in ("model", "messages", "system")}).json()
    usage = found["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == tokens["input_tokens"]
    streamed = events(http.post("/v1/messages", json={**body, "stream": True}).text)
    assert [e["type"] for e in streamed[:2]] == ["message_start", "content_block_start"]
    assert streamed[-1]["type"] == "message_stop"
    text = "".join(e["delta"]["text"] for e in streamed if e["type"] == "content_block_delta")
    assert text == found["content"][0]["text"]
    bad = http.post("/v1/messages", json={**body, "model": "other"})
    assert bad.status_code == 404 and bad.json()["type"] == "error"


def test_generate_takes_and_gives_token_ids(http: httpx.Client) -> None:
    body = {"token_ids": [11, 12, 13], "sampling_params": {"max_tokens": 4, "ignore_eos": True}}
    found = http.post("/inference/v1/generate", json=body).json()
    assert len(found["choices"][0]["token_ids"]) == 4 and found["usage"]["prompt_tokens"] == 3
    streamed = events(http.post("/inference/v1/generate", json={**body, "stream": True}).text)
    assert [t for c in streamed for t in c["choices"][0]["token_ids"]] == found["choices"][0]["token_ids"]


def test_tokens_there_and_back(http: httpx.Client) -> None:
    found = http.post("/tokenize", json={"prompt": "so much text", "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) and "".join(found["token_strs"]) == "so much text"
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "so much text"}
    messages = [{"role": "user", "content": "hi"}]
    chat = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert http.post("/v1/chat/completions/render", json={"messages": messages}).json()["token_ids"] == chat
    rendered = http.post("/v1/completions/render", json={"prompt": ["so much text", "x"]}).json()
    assert [len(r["token_ids"]) for r in rendered] == [found["count"], 1]
    assert http.post("/v1/completions/render", json={"prompt": [4, 5]}).json()[0]["token_ids"] == [4, 5]
    message = {"model": MODEL, "max_tokens": 5, "messages": messages}
    assert http.post("/v1/messages/render", json=message).json()["token_ids"] == chat
    assert http.post("/v1/responses/render", json={"input": "hi"}).json()["token_ids"] == chat


def test_small_routes(http: httpx.Client) -> None:
    assert http.get("/health").status_code == http.get("/ping").status_code == 200
    assert http.get("/load").json() == {"server_load": 0}
    assert http.get("/version").json() == {"version": "0.32.0"}
    assert http.get("/v1/models").json()["data"][0]["id"] == MODEL
    assert http.get("/kv_event_sources").json() == {}


def test_adapters(http: httpx.Client) -> None:
    body = {"lora_name": "fine", "lora_path": "/adapters/fine"}
    assert "added successfully" in http.post("/v1/load_lora_adapter", json=body).text
    twice = http.post("/v1/load_lora_adapter", json=body)
    assert twice.status_code == 400 and twice.json()["error"]["type"] == "InvalidUserInput"
    assert [m["id"] for m in http.get("/v1/models").json()["data"]] == [MODEL, "fine"]
    found = http.post("/v1/completions", json={"model": "fine", "prompt": "x", "max_tokens": 1}).json()
    assert found["model"] == "fine"
    assert "removed successfully" in http.post("/v1/unload_lora_adapter", json={"lora_name": "fine"}).text
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "fine"}).status_code == 404
    assert http.post("/v1/completions", json={"model": "fine", "prompt": "x"}).status_code == 404


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("body", "status", "kind", "param"),
    [
        ({"prompt": "x", "model": "nope"}, 404, "NotFoundError", "model"),
        ({"prompt": ""}, 400, "BadRequestError", "prompt"),
        ({}, 400, "BadRequestError", "prompt"),
        ({"prompt": []}, 400, "BadRequestError", "prompt"),
        ({"prompt": "x", "max_tokens": 0}, 400, "BadRequestError", "max_tokens"),
        ({"prompt": "x", "max_tokens": 10**7}, 400, "BadRequestError", "max_tokens"),
        ({"prompt": "x", "max_tokens": "many"}, 400, "Bad Request", "body.max_tokens"),
        ({"prompt": [1] * 41000}, 400, "BadRequestError", "input_tokens"),
        ({"prompt": "x", "temperature": -1}, 400, "BadRequestError", "temperature"),
        ({"prompt": "x", "n": 0}, 400, "BadRequestError", None),
        ({"prompt": "x", "stream_options": {}, "stream": False}, 200, None, None),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, 400, "BadRequestError", "stream_options"),
        ({"prompt": "x", "min_tokens": 20}, 400, "BadRequestError", None),
        ({"prompt": "x", "stop": ["a", "b", "c", "d", "e"]}, 400, "Bad Request", "body.stop"),
        ({"prompt": "x", "cache_salt": "a/b"}, 400, "BadRequestError", "cache_salt"),
        ({"prompt": [-1]}, 400, "Bad Request", "body.prompt.0"),
        ({"prompt": [2**40]}, 400, "BadRequestError", None),
    ],
)
def test_error_objects(http: httpx.Client, body: Any, status: int, kind: str | None, param: str | None) -> None:
    found = http.post("/v1/completions", json=body)
    assert found.status_code == status, found.text
    if kind is not None:
        error = found.json()["error"]
        assert (error["type"], error["code"]) == (kind, status), error
        assert error["param"] == param or (param and str(error["param"]).startswith(param)), error
        assert error["message"]


def test_malformed_requests(http: httpx.Client) -> None:
    bad = http.post("/v1/completions", content=b'{"prompt": ', headers=JSON)
    assert bad.status_code == 400 and "JSON" in bad.json()["error"]["message"]
    media = http.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert media.status_code == 400 and "application/json" in media.json()["error"]["message"]
    assert http.get("/v1/nothing").json()["error"] == {
        "message": "Not Found",
        "type": "Not Found",
        "param": None,
        "code": 404,
    }
    assert http.get("/v1/completions").status_code == 405
    many = http.post("/v1/completions", json={"prompt": ["x", 1] * 500})
    assert many.status_code == 400 and len(many.text) < 20_000


def test_large_headers(http: httpx.Client) -> None:
    assert http.get("/health", headers={"x-large": "a" * 10_000}).status_code == 200
    assert http.get("/health", headers={"x-large": "a" * 200_000}).status_code in (200, 400, 431)
    assert http.get("/health").status_code == 200


# ---------------------------------------------------------------------- lifecycle


def test_a_client_that_goes_away_is_aborted(live: Live, http: httpx.Client) -> None:
    body = json.dumps({"prompt": "never ends", "max_tokens": 30000, "ignore_eos": True, "stream": True}).encode()
    before = samples(http.get("/metrics").text)["vllm:request_success_total{finished_reason=abort}"]
    for stream in (True, False):
        data = body if stream else body.replace(b'"stream": true', b'"stream": false')
        host, port = live.urls[0].removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as s:
            s.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%s" % (len(data), data)
            )
            until(lambda: samples(http.get("/metrics").text)["vllm:num_requests_running"] == 1)
            assert http.get("/load").json() == {"server_load": 1}
        until(lambda: samples(http.get("/metrics").text)["vllm:num_requests_running"] == 0)
    until(lambda: http.get("/load").json() == {"server_load": 0})
    after = samples(http.get("/metrics").text)
    assert after["vllm:request_success_total{finished_reason=abort}"] == before + 2
    assert after["vllm:kv_cache_usage_perc"] == 0


def test_sleep_wake_pause(http: httpx.Client) -> None:
    body = {"prompt": "sleepy " * 50, "max_tokens": 3}
    http.post("/v1/completions", json=body)
    assert http.post("/sleep", params={"level": 1}).json() == {"status": "sleeping", "level": 1}
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    page = samples(http.get("/metrics").text)
    assert page["vllm:engine_sleep_state{sleep_state=awake}"] == 0
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(httpx.post(f"{http.base_url}/v1/completions", json=body)))
    thread.start()
    thread.join(0.3)
    assert not answers
    assert http.post("/wake_up").json()["status"] == "awake"
    thread.join(10)
    assert answers[0].json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # asleep, the cache is lost
    assert http.post("/pause", params={"mode": "keep"}).json() == {"status": "paused"}
    assert http.get("/is_paused").json() == {"is_paused": True}
    assert http.post("/resume").json() == {"status": "resumed"}
    assert http.post("/sleep", params={"level": 7}).status_code == 400


def test_abort_from_the_servers_side(http: httpx.Client) -> None:
    answers: list[Any] = []
    body = {"prompt": "x", "max_tokens": 30000, "ignore_eos": True, "request_id": "mine"}
    thread = threading.Thread(target=lambda: answers.append(httpx.post(f"{http.base_url}/v1/completions", json=body)))
    thread.start()
    until(lambda: samples(http.get("/metrics").text)["vllm:num_requests_running"] == 1)
    assert http.post("/inference/v1/abort_requests", json={"request_ids": ["mine"]}).status_code == 200
    thread.join(10)
    choice = answers[0].json()["choices"][0]
    assert choice["finish_reason"] == "abort"
    assert http.post("/abort_requests", json={}).json()["aborted"] == 0
    assert http.post("/inference/v1/abort_requests", content=b"x", headers=JSON).status_code == 400


def test_reset_prefix_cache(http: httpx.Client) -> None:
    body = {"prompt": "remember " * 60, "max_tokens": 1}

    def cached() -> int:
        return int(http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() > 0
    assert http.post("/reset_prefix_cache").json() == {"success": True}
    assert cached() == 0


def test_queue_limits() -> None:
    with serving(spec(max_num_queued_reqs=2, max_num_queued_tokens=10_000)) as live, live.client() as http:
        http.post("/pause", params={"mode": "keep"})
        threads = [
            threading.Thread(target=httpx.post, args=(f"{live.urls[0]}/v1/completions",), kwargs={"json": body})
            for body in ({"prompt": [5] * 12_000, "max_tokens": 1}, {"prompt": "x", "max_tokens": 1})
        ]
        threads[0].start()
        time.sleep(0.3)
        tokens = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert tokens.status_code == 503 and "prefill token backlog" in tokens.json()["error"]["message"]
        two = http.post("/v1/completions", json={"prompt": "x", "n": 2})
        assert two.status_code == 503 and two.json()["error"]["type"] == "Service Unavailable"
        page = samples(http.get("/metrics").text)
        assert page["vllm:admission_rejections_total{reason=max_num_queued_reqs}"] == 1
        assert page["vllm:admission_rejections_total{reason=max_num_queued_tokens}"] == 1
        http.post("/resume")
        threads[0].join(10)


def test_kv_transfer_params() -> None:
    with serving(spec(2, kv_link={"gbytes_per_s": 50})) as live, live.client(0) as prefill, live.client(1) as decode:
        body = {"prompt": "disaggregated " * 100, "max_tokens": 5, "ignore_eos": True}
        ask = {"do_remote_decode": True, "do_remote_prefill": False}
        first = prefill.post("/v1/completions", json={**body, "max_tokens": 1, "kv_transfer_params": ask}).json()
        handed = first["kv_transfer_params"]
        assert handed["do_remote_prefill"] and handed["remote_block_ids"] and handed["tp_size"] == 2
        found = decode.post("/v1/completions", json={**body, "kv_transfer_params": handed}).json()
        assert found["usage"]["completion_tokens"] == 5
        page = samples(decode.get("/metrics").text)
        tokens = found["usage"]["prompt_tokens"]
        assert page["vllm:prompt_tokens_by_source_total{source=external_kv_transfer}"] >= tokens - 1
        assert page["vllm:prompt_tokens_by_source_total{source=local_compute}"] <= 1


def until(condition: Any, limit_s: float = 10.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", {"prompt": "a", "logprobs": 10**9}, "Requested sample logprobs of 1000000000, which is"),
        ("/v1/completions", {"prompt": "a", "logprobs": -1}, "which is greater than max allowed: 20"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 21},
            "Requested sample logprobs of 21, which is greater than max allowed: 20",
        ),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"n": 0}}, "n must be at least 1"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"n": 10**9}}, "n must be at most 16384"),
    ],
)
def test_what_would_keep_the_worker_busy_for_ever_is_refused(
    http: httpx.Client, path: str, body: dict[str, Any], message: str
) -> None:
    found = http.post(path, json=body)
    assert found.status_code == 400 and message in found.json()["error"]["message"]


def test_a_lone_surrogate_gets_an_error_object(http: httpx.Client) -> None:
    content = b'{"prompt": "a", "max_tokens": 1, "request_id": "\\ud800"}'
    assert http.post("/v1/completions", content=content, headers=JSON).json()["id"] == "cmpl-\\ud800"
    found = http.post("/v1/completions", content=b'{"model": "\\ud800", "prompt": "a"}', headers=JSON)
    assert found.status_code == 404 and "\\ud800" in found.json()["error"]["message"]


def test_a_negative_token_id_is_out_of_vocabulary(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "kv_transfer_params": {"prompt_token_ids": [-5]}}
    found = http.post("/v1/chat/completions", json=body)
    assert found.status_code == 400 and "-5 is out of vocabulary" in found.json()["error"]["message"]
