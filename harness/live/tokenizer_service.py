"""The tokenizer that release v0.7.1 asks over gRPC, answering with the workers' own tokenizer."""

from __future__ import annotations

from pathlib import Path

import grpc
import numpy as np
from numpy.typing import NDArray

from fake_workers.api.tokenizer import Message, Tokenizer
from harness.router.tokenizer import TokenizerService, bool_field, fields, packed_field, strings


class LiveTokenizerService(TokenizerService):
    """RenderCompletion, RenderChatCompletion and Tokenize of any text."""

    def __init__(self, socket_path: Path, tokenizer: Tokenizer) -> None:
        self._words = tokenizer
        super().__init__(socket_path)

    def _handlers(self) -> grpc.GenericRpcHandler:
        methods = {
            "InitializeTokenizer": lambda request, context: bool_field(1),
            "RenderChatCompletion": self._render_chat,
            "RenderCompletion": self._render,
            "Tokenize": self._tokenize,
        }
        handlers = {name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()}
        return grpc.method_handlers_generic_handler("tokenization.TokenizationService", handlers)

    def _look_up(self, prompt: bytes) -> NDArray[np.uint64]:
        return np.asarray(self._words.encode(prompt.decode(errors="replace")), np.uint64)

    def _render_chat(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        messages: list[Message] = []
        for number, value in fields(request):
            if number == 2:
                found = strings(value)
                content = found.get(2)
                if content is None:
                    parts = [strings(part).get(2, b"") for key, part in fields(value) if key == 3]
                    content = b"".join(parts)
                role = found.get(1, b"user").decode(errors="replace")
                messages.append({"role": role, "content": content.decode(errors="replace")})
        ids = np.asarray(self._words.encode(self._words.chat(messages)), np.uint64)
        return packed_field(2, ids) + bool_field(4)
