"""Envoy's side of ext_proc (FULL_DUPLEX_STREAMED): one gRPC stream per request, open from arrival to last
token.

-> request headers, request body                      <- request headers (destination), request body (echo)
... in flight ... -> response headers                                   <- response headers (mutations) ->
response body: first token                         <- response body -> response body: usage, end of stream
<- response body, end of stream;  both sides close

The end of an RPC is the router's acknowledgement that it has let go of the request: its handler runs all
completion hooks before it returns. The event loop only runs inside the calls of this class, in the caller's
thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeVar

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from harness.errors import ComponentError
from harness.router.process import GIVE_UP_S

T = TypeVar("T")

DESTINATION = "x-gateway-destination-endpoint"
_METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
_CHUNK_BYTES = 1 << 20
_END_WITHIN_S = 2.0
"""Streams that are dropped end without the router; this only bounds what is done in vain."""
_STREAM_HEADERS = {":status": "200", "content-type": "text/event-stream"}


@dataclass(slots=True)
class Answer:
    """What the router answered to a request: a destination, or an immediate refusal."""

    status: int
    destinations: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    message: str = ""


class ExtProcClient:
    """All open requests at one router."""

    def __init__(self, port: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._target = f"127.0.0.1:{port}"
        self._calls: dict[str, Any] = {}
        self._channel: Any = None
        self._process: Any = None
        self._told: dict[str, tuple[Any, list[tuple[bool, bytes]]]] = {}
        """Answers that are not passed through yet: (stream, chunks in order, each with whether it is the last)."""
        self._asking: asyncio.Task[Any] | None = None
        """What the loop was last run for; an interrupt leaves it behind."""
        self._run(self._connect())

    @property
    def open_requests(self) -> int:
        """Streams that are neither finished nor aborted."""
        return len(self._calls)

    def ready(self, timeout_s: float) -> bool:
        """Whether the router accepts connections within the time given."""
        try:
            self._run(asyncio.wait_for(self._channel.channel_ready(), timeout_s))
        except TimeoutError:
            return False
        return True

    def decide(
        self, request_id: str, path: str, headers: dict[str, str], body: bytes, only: str | None = None
    ) -> Answer:
        """Opens a stream, sends the request and reads the decision; the stream stays open if there is a
        destination. `only`: the address (ip:port) of the one endpoint that the router may choose.
        """
        return self._guard(self._decide(request_id, path, headers, body, only))

    def first_token(self, request_id: str, chunk: bytes) -> dict[str, str]:
        """Passes response headers and the first chunk through; returns the headers that the client sees."""
        return self._guard(self._first_token(self._calls[request_id], chunk))

    def finish(self, request_id: str, chunk: bytes) -> None:
        """Passes the last chunk through and waits for the end of the RPC."""
        self._guard(self._finish(self._calls.pop(request_id), chunk))

    def tell_first_token(self, request_id: str, chunk: bytes) -> None:
        """As `first_token`, done with the next `catch_up`."""
        call = self._calls[request_id]
        self._told.setdefault(request_id, (call, []))[1].append((False, chunk))

    def tell_end(self, request_id: str, chunk: bytes) -> None:
        """As `finish`, done with the next `catch_up`."""
        call = self._calls.pop(request_id)
        self._told.setdefault(request_id, (call, []))[1].append((True, chunk))

    def catch_up(self) -> dict[str, dict[str, str]]:
        """Passes through what was told, all streams at once; the headers that clients see with their first tokens.

        A router works on streams side by side anyway, so nothing is known about the order among them; within each
        stream it is that of the telling.
        """
        if not self._told:
            return {}
        told, self._told = self._told, {}
        answers = [self._pass_through(call, chunks) for call, chunks in told.values()]
        headers = self._guard(_all(answers)) if len(answers) > 1 else [self._guard(answers[0])]
        return dict(zip(told, headers, strict=True))

    def abort(self, request_id: str) -> None:
        """The client is gone: closes our side without a response and waits for the end of the RPC."""
        self._guard(self._close(self._calls.pop(request_id)))

    def close(self) -> None:
        """Drops all streams and the channel."""
        if self._loop.is_closed():
            return
        calls = [*self._calls.values(), *(call for call, _ in self._told.values())]
        self._calls.clear()
        self._told.clear()
        self._run(self._drop(calls))
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(coroutine)

    def _guard(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            with _interrupts_wait():
                task = self._loop.create_task(asyncio.wait_for(coroutine, GIVE_UP_S))
                self._asking = task
                return self._loop.run_until_complete(task)
        except TimeoutError as error:
            raise ComponentError("router", f"no answer within {GIVE_UP_S:g} s") from error
        except grpc.aio.AioRpcError as error:
            raise ComponentError("router", f"ext_proc stream ended: {error.code().name} {error.details()}") from error
        except (asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            raise ComponentError("router", f"ext_proc stream ended: {error}") from error

    async def _connect(self) -> None:
        self._channel = grpc.aio.insecure_channel(
            self._target,
            options=[
                ("grpc.max_send_message_length", -1),
                ("grpc.max_receive_message_length", -1),
                ("grpc.use_local_subchannel_pool", 1),
            ],
        )
        self._process = self._channel.stream_stream(
            _METHOD,
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )

    async def _drop(self, calls: list[Any]) -> None:
        """Ends the streams and waits until gRPC has heard the end of each.

        All loops of a process share gRPC's one queue of completions: what comes out of it for a closed loop ends in the
        next router's loop, as "Event loop is closed". So gRPC's own tasks are waited for, not cancelled.
        """
        for call in calls:
            call.cancel()
        if self._asking is not None:
            self._asking.cancel()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:
            await asyncio.wait(left, timeout=_END_WITHIN_S)
        await self._channel.close()

    async def _decide(
        self, request_id: str, path: str, headers: dict[str, str], body: bytes, only: str | None
    ) -> Answer:
        call = self._process()
        all_headers = {
            ":method": "POST",
            ":path": path,
            ":authority": "gateway",
            ":scheme": "http",
            "content-type": "application/json",
            "x-request-id": request_id,
            **headers,
        }
        await call.write(pb.ProcessingRequest(request_headers=pb.HttpHeaders(headers=_header_map(all_headers))))
        for start in range(0, max(len(body), 1), _CHUNK_BYTES):
            end = start + _CHUNK_BYTES
            part = pb.HttpBody(body=body[start:end], end_of_stream=end >= len(body))
            await call.write(pb.ProcessingRequest(request_body=part, metadata_context=_only(only)))
        answer = Answer(status=0)
        while True:
            reply = await _read(call)
            kind = reply.WhichOneof("response")
            if kind == "immediate_response":
                immediate = reply.immediate_response
                answer.status = immediate.status.code
                answer.message = immediate.body.decode(errors="replace")
                await self._close(call)
                return answer
            if kind == "request_headers":
                _read_decision(reply, answer)
            elif kind == "request_body" and _is_last(reply.request_body):
                break
        self._calls[request_id] = call
        return answer

    async def _first_token(self, call: Any, chunk: bytes) -> dict[str, str]:
        await call.write(pb.ProcessingRequest(response_headers=pb.HttpHeaders(headers=_header_map(_STREAM_HEADERS))))
        await call.write(pb.ProcessingRequest(response_body=pb.HttpBody(body=chunk)))
        headers: dict[str, str] = {}
        while True:
            reply = await _read(call)
            kind = reply.WhichOneof("response")
            if kind == "response_headers":
                headers = _set_headers(reply.response_headers.response.header_mutation)
            elif kind == "response_body":
                return headers

    async def _pass_through(self, call: Any, chunks: list[tuple[bool, bytes]]) -> dict[str, str]:
        headers: dict[str, str] = {}
        for last, chunk in chunks:
            if last:
                await self._finish(call, chunk)
            else:
                headers = await self._first_token(call, chunk)
        return headers

    async def _finish(self, call: Any, chunk: bytes) -> None:
        await call.write(pb.ProcessingRequest(response_body=pb.HttpBody(body=chunk, end_of_stream=True)))
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
        await _check_status(call)

    async def _close(self, call: Any) -> None:
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
        await _check_status(call)


async def _all(coroutines: list[Coroutine[Any, Any, T]]) -> list[T]:
    return list(await asyncio.gather(*coroutines))


def _only(address: str | None) -> base_pb2.Metadata | None:
    """The hint by which a gateway names the endpoints of a subset."""
    if address is None:
        return None
    metadata = base_pb2.Metadata()
    metadata.filter_metadata["envoy.lb.subset_hint"].update({f"{DESTINATION}-subset": [address]})
    return metadata


def _is_last(body: Any) -> bool:
    """Whether this is the end of an echoed body."""
    return bool(body.response.body_mutation.streamed_response.end_of_stream)


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Holds Ctrl-C back until the loop has returned: inside gRPC's callbacks it would be swallowed with the answer.

    A second one is let through, for the case that the router does not answer at all.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if caught and callable(before):
            before(number, frame)
        caught.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if caught and callable(before):
            before(signal.SIGINT, None)


async def _read(call: Any) -> Any:
    reply = await call.read()
    if reply is grpc.aio.EOF:
        await _check_status(call)
        raise ComponentError("router", "closed an ext_proc stream before it had answered")
    return reply


async def _check_status(call: Any) -> None:
    code = await call.code()
    if code is not grpc.StatusCode.OK:
        raise ComponentError("router", f"ext_proc stream ended: {code.name} {await call.details()}")


def _header_map(headers: dict[str, str]) -> base_pb2.HeaderMap:
    return base_pb2.HeaderMap(headers=[base_pb2.HeaderValue(key=k, raw_value=v.encode()) for k, v in headers.items()])


def _set_headers(mutation: Any) -> dict[str, str]:
    return {
        option.header.key: (option.header.raw_value or option.header.value.encode()).decode(errors="replace")
        for option in mutation.set_headers
    }


def _read_decision(reply: Any, answer: Answer) -> None:
    answer.headers = _set_headers(reply.request_headers.response.header_mutation)
    answer.destinations = [d for d in answer.headers.get(DESTINATION, "").split(",") if d]
    answer.status = 200
    if reply.HasField("dynamic_metadata"):
        answer.scores = _scores(reply.dynamic_metadata)


def _scores(metadata: Any) -> dict[str, float]:
    """Weighted total score by endpoint address, from the router's Struct; empty where it gives none."""
    for name in ("envoy.lb", DESTINATION + "-scores"):
        if name not in metadata.fields:
            return {}
        metadata = metadata.fields[name].struct_value
    return {address: value.number_value for address, value in metadata.fields.items()}


def usage_chunk(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> bytes:
    """The last server-sent event of a streamed answer, with the usage that vLLM reports."""
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    body = {"object": "text_completion", "choices": [], "usage": usage}
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\ndata: [DONE]\n\n"
