"""The request protocol of LMCache's server process (lmcache 0.5.6, `lmcache server --transport zmq`), client side.

A request is the frames [number, operation, payload ...], an answer [number, operation] and the result where there is
one, all msgpack (lmcache.v1.multiprocess.transport.zmq_impl). A request whose handler fails is never answered.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec
import zmq
import zmq.asyncio

_OPERATIONS = {
    "lookup": 8,
    "query_prefetch_status": 9,
    "free_lookup_locks": 12,
    "end_session": 13,
    "register_kv_cache_engine_driven_context": 14,
    "unregister_kv_cache_engine_driven_context": 15,
    "prepare_store": 16,
    "commit_store": 17,
    "prepare_retrieve": 18,
    "commit_retrieve": 19,
    "get_chunk_size": 21,
    "ping": 22,
}
"""LEGACY_OPERATION_IDS of the package, those that are used here."""


class LmcacheClient:
    """One connection. Made and used inside the event loop."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url = url
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(url)
        self._reader = asyncio.create_task(self._read())

    async def call(self, operation: str, *payloads: Any) -> Any:
        """The answer; None for an operation without one. Raises TimeoutError."""
        number = next(self._numbers)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        frames = [msgspec.msgpack.encode(part) for part in (number, _OPERATIONS[operation], *payloads)]
        try:
            await self._socket.send_multipart(frames)
            async with asyncio.timeout(self._timeout_s):
                return await answer
        finally:
            self._open.pop(number, None)

    async def close(self) -> None:
        """Drop the connection; what is open is cancelled."""
        self._reader.cancel()
        for answer in self._open.values():
            answer.cancel()
        self._socket.close(0)
        self._context.term()

    async def _read(self) -> None:
        while True:
            number, _, *result = await self._socket.recv_multipart()
            answer = self._open.get(msgspec.msgpack.decode(number))
            if answer is not None and not answer.done():
                answer.set_result(msgspec.msgpack.decode(result[0]) if result else None)
