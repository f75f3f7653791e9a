"""The tokenizer service, asked by a client that uses protobuf's own implementation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from harness.router import tokenizer

FIELD = descriptor_pb2.FieldDescriptorProto


def message(name: str, fields: list[tuple[str, int, Any, Any]]) -> Any:
    """A protobuf message class: (field, number, type, label)."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{name}.proto", package="test", syntax="proto3")
    made = file.message_type.add(name=name)
    for field, number, kind, label in fields:
        made.field.add(name=field, number=number, type=kind, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"test.{name}"))


REQUEST = message(
    "Request",
    [
        ("model_name", 1, FIELD.TYPE_STRING, FIELD.LABEL_OPTIONAL),
        ("prompt", 2, FIELD.TYPE_STRING, FIELD.LABEL_OPTIONAL),
    ],
)
RESPONSE = message(
    "Response",
    [
        ("request_id", 1, FIELD.TYPE_STRING, FIELD.LABEL_OPTIONAL),
        ("token_ids", 2, FIELD.TYPE_UINT32, FIELD.LABEL_REPEATED),
        ("success", 3, FIELD.TYPE_BOOL, FIELD.LABEL_OPTIONAL),
    ],
)
READY = message("Ready", [("success", 1, FIELD.TYPE_BOOL, FIELD.LABEL_OPTIONAL)])


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple[tokenizer.TokenizerService, grpc.Channel]]:
    served = tokenizer.TokenizerService(tmp_path / "t.sock")
    with grpc.insecure_channel(f"unix://{tmp_path / 't.sock'}") as channel:
        yield served, channel
    served.close()


def call(channel: grpc.Channel, method: str, request: bytes) -> bytes:
    answer: bytes = channel.unary_unary(f"/tokenization.TokenizationService/{method}")(request, timeout=5)
    return answer


def test_expected_prompt_gets_its_tokens(service: tuple[tokenizer.TokenizerService, grpc.Channel]) -> None:
    served, channel = service
    ids = np.array([0, 1, 127, 128, (1 << 31) - 1, (1 << 32) - 1], dtype=np.uint64)
    served.expect("prompt 7", ids)
    request = REQUEST(model_name="m", prompt="prompt 7").SerializeToString()
    response = RESPONSE.FromString(call(channel, "RenderCompletion", request))
    assert response.success and list(response.token_ids) == ids.tolist()
    served.forget("prompt 7")
    assert list(RESPONSE.FromString(call(channel, "RenderCompletion", request)).token_ids) == [1]
    assert served.unknown_prompts == 1


def test_initialises(service: tuple[tokenizer.TokenizerService, grpc.Channel]) -> None:
    assert READY.FromString(call(service[1], "InitializeTokenizer", b"")).success


@given(st.lists(st.integers(0, (1 << 32) - 1)))
def test_packed_field_is_protobuf(values: list[int]) -> None:
    encoded = tokenizer.packed_field(2, np.array(values, dtype=np.uint64)) + tokenizer.bool_field(3)
    assert list(RESPONSE.FromString(encoded).token_ids) == values


@given(st.text(), st.text())
def test_strings_reads_protobuf(model: str, prompt: str) -> None:
    found = tokenizer.strings(REQUEST(model_name=model, prompt=prompt).SerializeToString())
    assert (found.get(1, b"").decode(), found.get(2, b"").decode()) == (model, prompt)


def test_the_sockets_path_fits_the_kernel_and_is_new_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's own folder may be deeper than the 107 bytes that a unix socket's path may have."""
    monkeypatch.setattr("tempfile.tempdir", "/" + "x" * 100)
    paths = {tokenizer.tokenizer_socket_path() for _ in range(3)}
    assert len(paths) == 3 and all(len(str(path)) < 107 for path in paths)
