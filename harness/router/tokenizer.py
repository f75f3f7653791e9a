"""The tokenizer service that release v0.7.1 insists on: the harness answers, so nothing large crosses the
wire.

The service is gRPC over a unix socket (`tokenization.TokenizationService`). Its few messages are written by
hand: a reply is a success flag and, where asked, token ids as a packed field.
"""

from __future__ import annotations

import itertools
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import grpc
import numpy as np
from numpy.typing import NDArray

_SERVICE = "tokenization.TokenizationService"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


_sockets = itertools.count()
_LONGEST_TEMPORARY_FOLDER = 60


def tokenizer_socket_path() -> Path:
    """A path of its own for the service's socket. A run's folder may be too deep for it: the kernel takes 107 bytes."""
    base = tempfile.gettempdir()
    if len(base) > _LONGEST_TEMPORARY_FOLDER:
        base = "/tmp"
    return Path(base) / f"harness-{os.getpid()}-{next(_sockets)}-{secrets.token_hex(4)}" / "tokenizer.sock"


class TokenizerService:
    """Answers RenderCompletion from a table of prompts that are about to be asked for."""

    def __init__(self, socket_path: Path) -> None:
        self._prompts: dict[str, NDArray[np.uint64]] = {}
        self._server = grpc.server(futures.ThreadPoolExecutor(4, thread_name_prefix="tokenizer"))
        self._server.add_generic_rpc_handlers((self._handlers(),))
        self._server.add_insecure_port(f"unix://{socket_path}")
        self._server.start()
        self.unknown_prompts = 0

    def expect(self, prompt: str, ids: NDArray[np.uint64]) -> None:
        """The router will ask for the tokens of this text."""
        self._prompts[prompt] = ids

    def forget(self, prompt: str) -> None:
        """The prompt has been routed."""
        self._prompts.pop(prompt, None)

    def close(self) -> None:
        """Ends the service."""
        self._server.stop(0).wait()

    def _handlers(self) -> grpc.GenericRpcHandler:
        methods: dict[str, Callable[[bytes, grpc.ServicerContext], bytes]] = {
            "InitializeTokenizer": lambda request, context: bool_field(1),
            "RenderChatCompletion": lambda request, context: packed_field(2, np.ones(1, np.uint64)) + bool_field(4),
            "RenderCompletion": self._render,
            "Tokenize": self._tokenize,
        }
        return grpc.method_handlers_generic_handler(
            _SERVICE, {name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()}
        )

    def _render(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        return packed_field(2, self._look_up(strings(request).get(2, b""))) + bool_field(3)

    def _tokenize(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        return packed_field(1, self._look_up(strings(request).get(1, b""))) + bool_field(2)

    def _look_up(self, prompt: bytes) -> NDArray[np.uint64]:
        ids = self._prompts.get(prompt.decode(errors="replace"))
        if ids is None:
            self.unknown_prompts += 1
            return np.ones(1, np.uint64)
        return ids


def bool_field(number: int) -> bytes:
    """A protobuf field that is true (field numbers below 16)."""
    return bytes((number << 3 | _VARINT, 1))


def packed_field(number: int, values: NDArray[np.uint64]) -> bytes:
    """A packed `repeated uint32` field; every value takes five bytes, which is legal and needs no branches."""
    out = np.empty((len(values), 5), dtype=np.uint8)
    for i in range(5):
        out[:, i] = (values >> np.uint64(7 * i)) & np.uint64(0x7F)
    out[:, :4] |= 0x80
    return bytes((number << 3 | _BYTES,)) + varint(out.size) + out.tobytes()


def varint(value: int) -> bytes:
    """A protobuf varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def strings(message: bytes) -> dict[int, bytes]:
    """The length-delimited fields of a protobuf message (the last one of each number)."""
    return dict(fields(message))


def fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """All length-delimited fields of a protobuf message with their numbers, repeated ones too."""
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        kind = key & 7
        if kind == _BYTES:
            length, at = _read_varint(message, at)
            yield key >> 3, message[at : at + length]
            at += length
        elif kind == _VARINT:
            _, at = _read_varint(message, at)
        elif kind == _FIXED64:
            at += 8
        elif kind == _FIXED32:
            at += 4
        else:
            raise ValueError(f"protobuf wire type {kind} is not in use")


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
