"""Block ids out of content: chained hashes of a prompt's bytes, as prefix caches compute them from tokens."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

DIGEST_BYTES = 8


def block_ids(data: bytes, block_bytes: int) -> NDArray[np.int64]:
    """Id of every full block of `block_bytes` bytes: equal ids mean an equal prefix up to and including the block.

    64 bits of BLAKE2b: in a session of a million blocks two would clash by chance once in 37 million times.
    """
    digest = b""
    digests = bytearray()
    view = memoryview(data)
    for start in range(0, len(data) - block_bytes + 1, block_bytes):
        state = blake2b(digest, digest_size=DIGEST_BYTES)
        state.update(view[start : start + block_bytes])
        digest = state.digest()
        digests += digest
    return np.frombuffer(bytes(digests), dtype="<i8").astype(np.int64)
