"""Text as a stream of tokens of equal width, so that blocks can be hashed and counted.

Without a tokenizer a token is four bytes of UTF-8 (about what a token of English or source code has); counts are then
estimates, while what prompts have in common is exact to a block. With a tokenizer.json counts are those of the model.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.errors import InputError
from harness.trace.hashes import block_ids
from harness.trace.importers.options import BYTE_TOKENIZER, ImportOptions

TOKEN_BYTES = 4
"""Width of a token of a real tokenizer in the stream."""


class TokenStream:
    """Turns texts into bytes of which `width` make a token."""

    def __init__(self, options: ImportOptions) -> None:
        self._tokenizer = None if options.tokenizer == BYTE_TOKENIZER else _load(options.tokenizer)
        self.width = options.bytes_per_token if self._tokenizer is None else TOKEN_BYTES
        self.block_tokens = options.block()

    def encode(self, text: str) -> bytes:
        """The stream of a text. Text that is appended later must be encoded together with what it is appended to."""
        if self._tokenizer is None:
            return text.encode("utf-8", "surrogatepass")
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.array(ids, dtype="<u4").tobytes()

    def count(self, data: bytes) -> int:
        """Tokens of a stream; a text that is not empty has at least one."""
        return max(len(data) // self.width, 1 if data and self.block_tokens > 1 else 0)

    def ids(self, data: bytes) -> NDArray[np.int64]:
        """Block ids of a prompt."""
        return block_ids(data, self.width * self.block_tokens)


@lru_cache(maxsize=2)
def _load(name: str) -> Any:
    where = f"--tokenizer {name}"
    if not Path(name).is_file():
        remedy = f"give the path of a tokenizer.json, or {BYTE_TOKENIZER!r} for the built-in one"
        raise InputError(where, "is not a file", remedy)
    try:
        library = import_module("tokenizers")
    except ImportError:
        raise InputError(where, "needs the package `tokenizers`", "install it, or leave the option out") from None
    try:
        return library.Tokenizer.from_file(name)
    except Exception as error:  # the library raises plain Exception for every fault of the file
        raise InputError(where, f"is not a tokenizer ({error})", "give the tokenizer.json of a model") from None
