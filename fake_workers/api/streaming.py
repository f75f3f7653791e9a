"""Server-sent events straight to the socket, and what happens when a client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fake_workers.api.errors import error_body
from fake_workers.api.worker import Call, Worker

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed its connection before it had its answer."""


@dataclass(slots=True)
class Token:
    """One token of one sequence: `index` counts sequences over prompts and choices."""

    index: int
    token_id: int
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    count: int
    """Tokens of the sequence so far, this one included."""


class GenerationFailedError(Exception):
    """A sequence ended in an error (finish_reason error)."""


async def follow(call: Call) -> AsyncIterator[list[Token]]:
    """Tokens as they come, all that are there at once; ends when every sequence has ended."""
    sent = [0] * len(call.streams)
    closed = [False] * len(call.streams)
    while not all(closed):
        await call.changed.wait()
        call.changed.clear()
        news: list[Token] = []
        for index, stream in enumerate(call.streams):
            if closed[index]:
                continue
            answer = stream.answer
            last = len(answer.token_ids)
            for at in range(sent[index], stream.ready):
                end = at == last - 1
                news.append(
                    Token(
                        index,
                        answer.token_ids[at],
                        answer.deltas[at],
                        answer.finish_reason if end else None,
                        answer.stop_reason if end else None,
                        at + 1,
                    )
                )
            sent[index] = stream.ready
            if stream.done:
                closed[index] = True
                if stream.reason == "error":
                    raise GenerationFailedError("Internal server error")
                if stream.ready < last:  # aborted from the server's side
                    news.append(Token(index, -1, "", "abort", None, stream.ready))
        if news:
            yield news


async def finish(worker: Worker, request: Request, call: Call) -> None:
    """Wait for every sequence; abort them if the client goes away first."""

    async def drain() -> None:
        async for _ in follow(call):
            pass

    try:
        await until_gone(request, drain())
    finally:
        worker.end(call)


async def until_gone(request: Request, work: Awaitable[T]) -> T:
    """The work's result; ClientGoneError if the client disconnects first."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request.receive))
    try:
        done, _ = await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            return task.result()
        raise ClientGoneError
    finally:
        for pending in (task, watch):
            if not pending.done():
                pending.cancel()
                with suppress(asyncio.CancelledError):
                    await pending


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


Chunks = Callable[[Call], AsyncIterator[bytes]]


class EventStream(Response):
    """A call's answer as server-sent events. A client that goes away aborts the call."""

    media_type = "text/event-stream"

    def __init__(
        self, worker: Worker, call: Call, chunks: AsyncIterator[bytes], done: bytes = b"data: [DONE]\n\n"
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.raw_headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        self._worker, self._call, self._chunks, self._done = worker, call, chunks, done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._worker.load += 1
        watch = asyncio.ensure_future(_disconnected(receive))
        watch.add_done_callback(self._gone)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for chunk in self._chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    if watch.done():
                        return
            except GenerationFailedError as error:
                failed = sse(error_body(str(error), "InternalServerError", 500))
                await send({"type": "http.response.body", "body": failed, "more_body": True})
            await send({"type": "http.response.body", "body": self._done, "more_body": False})
        except OSError:
            pass  # the client went away while we wrote
        finally:
            self._worker.load -= 1
            watch.cancel()
            self._worker.end(self._call)

    def _gone(self, watch: asyncio.Future[None]) -> None:
        if watch.cancelled():
            return
        for stream in self._call.streams:
            self._worker.engine.abort(stream)


def sse(value: Any, event: str | None = None) -> bytes:
    """One event."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(value, separators=(',', ':'), ensure_ascii=False)}\n\n".encode()


def text_of(call: Call, index: int) -> str:
    """The visible text of a sequence that has ended, possibly early."""
    stream = call.streams[index]
    return "".join(stream.answer.deltas[: stream.ready])


def ids_of(call: Call, index: int) -> list[int]:
    """The token ids of a sequence that has ended."""
    stream = call.streams[index]
    return stream.answer.token_ids[: stream.ready]


def ending(call: Call, index: int) -> tuple[str, int | str | None]:
    """finish_reason and stop_reason of a sequence that has ended."""
    stream = call.streams[index]
    if stream.reason == "abort":
        return "abort", None
    return stream.answer.finish_reason, stream.answer.stop_reason


def sequences(call: Call) -> Iterator[int]:
    """Indexes over prompts and choices."""
    return iter(range(len(call.streams)))


def usage(worker: Worker, call: Call) -> dict[str, Any]:
    """OpenAI's usage object, with the cached tokens of the first sequence as vLLM reports them."""
    prompt, output = call.prompt_tokens, call.output_tokens
    details = None
    if worker.settings.enable_prompt_tokens_details:
        details = {"cached_tokens": call.streams[0].cached_tokens}
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + output,
        "completion_tokens": output,
        "prompt_tokens_details": details,
    }
