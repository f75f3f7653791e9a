"""Envoy's side of ext_proc (FULL_DUPLEX_STREAMED): one gRPC stream per request, open from arrival to last
token.

-> request headers, request body                      <- request headers (destination), request body (echo)
... in flight ... -> response headers                                   <- response headers (mutations) ->
response body: first token                         <- response body -> response body: usage, end of stream
<- response body, end of stream;  both sides close

The end of an RPC is the router's acknowledgement that it has let go of the request: its handler runs all
completion hooks before it returns. Everything happens inside the calls of this class, in the caller's thread.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeVar

from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from harness.errors import ComponentError
from harness.router.grpc_streams import GrpcStreams, RpcError, Stream
from harness.router.process import GIVE_UP_S

T = TypeVar("T")
Talk = Generator[None, "pb.ProcessingResponse | None", T]
"""What is said on one stream: yields when it waits for the router's next message, None is the end of the RPC."""

DESTINATION = "x-gateway-destination-endpoint"
_METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
_CHUNK_BYTES = 1 << 20
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
        self._streams = GrpcStreams("127.0.0.1", port, _METHOD)
        self._calls: dict[str, Stream] = {}
        self._told: dict[str, tuple[Stream, list[tuple[bool, bytes]]]] = {}
        """Answers that are not passed through yet: (stream, chunks in order, each with whether it is the last)."""

    @property
    def open_requests(self) -> int:
        """Streams that are neither finished nor aborted."""
        return len(self._calls)

    def ready(self, timeout_s: float) -> bool:
        """Whether the router accepts connections within the time given."""
        return self._streams.connect(timeout_s)

    def decide(
        self, request_id: str, path: str, headers: dict[str, str], body: bytes, only: str | None = None
    ) -> Answer:
        """Opens a stream, sends the request and reads the decision; the stream stays open if there is a
        destination. `only`: the address (ip:port) of the one endpoint that the router may choose.
        """
        try:
            stream = self._streams.open()
        except RpcError as error:
            raise _ended(error) from error
        try:
            return self._one(stream, self._decide(stream, request_id, path, headers, body, only))
        except BaseException:
            self._streams.drop(stream)
            raise

    def first_token(self, request_id: str, chunk: bytes) -> dict[str, str]:
        """Passes response headers and the first chunk through; returns the headers that the client sees."""
        stream = self._calls[request_id]
        return self._one(stream, self._first_token(stream, chunk))

    def finish(self, request_id: str, chunk: bytes) -> None:
        """Passes the last chunk through and waits for the end of the RPC."""
        stream = self._calls.pop(request_id)
        self._one(stream, self._finish(stream, chunk))

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
        headers = self._all([(stream, self._pass_through(stream, chunks)) for stream, chunks in told.values()])
        return dict(zip(told, headers, strict=True))

    def abort(self, request_id: str) -> None:
        """The client is gone: closes our side without a response and waits for the end of the RPC."""
        stream = self._calls.pop(request_id)
        self._one(stream, self._close(stream))

    def close(self) -> None:
        """Drops all streams and the connection; safe to call twice."""
        self._calls.clear()
        self._told.clear()
        self._streams.close()

    def _one(self, stream: Stream, talk: Talk[T]) -> T:
        return self._all([(stream, talk)])[0]

    def _all(self, talks: Sequence[tuple[Stream, Talk[T]]]) -> list[T]:
        """What the talks come to, held side by side."""
        deadline_s = time.monotonic() + GIVE_UP_S
        results: dict[int, T] = {}
        open_: dict[int, tuple[Stream, Talk[T]]] = dict(enumerate(talks))
        try:
            with _interrupts_wait():
                for _, talk in talks:
                    next(talk)  # none is over before the router has said anything
                while True:
                    for number, (stream, talk) in list(open_.items()):
                        try:
                            _listen(stream, talk)
                        except StopIteration as end:
                            results[number] = end.value
                            del open_[number]
                    if not open_:
                        break
                    self._streams.turn(deadline_s)
        except TimeoutError as error:
            raise ComponentError("router", f"no answer within {GIVE_UP_S:g} s") from error
        except RpcError as error:
            raise _ended(error) from error
        return [results[number] for number in range(len(talks))]

    def _decide(
        self, stream: Stream, request_id: str, path: str, headers: dict[str, str], body: bytes, only: str | None
    ) -> Talk[Answer]:
        all_headers = {
            ":method": "POST",
            ":path": path,
            ":authority": "gateway",
            ":scheme": "http",
            "content-type": "application/json",
            "x-request-id": request_id,
            **headers,
        }
        self._say(stream, request_headers=pb.HttpHeaders(headers=_header_map(all_headers)))
        for start in range(0, max(len(body), 1), _CHUNK_BYTES):
            end = start + _CHUNK_BYTES
            part = pb.HttpBody(body=body[start:end], end_of_stream=end >= len(body))
            self._say(stream, request_body=part, metadata_context=_only(only))
        answer = Answer(status=0)
        while True:
            reply = _still_there((yield))
            kind = reply.WhichOneof("response")
            if kind == "immediate_response":
                immediate = reply.immediate_response
                answer.status = immediate.status.code
                answer.message = immediate.body.decode(errors="replace")
                yield from self._close(stream)
                return answer
            if kind == "request_headers":
                _read_decision(reply, answer)
            elif kind == "request_body" and _is_last(reply.request_body):
                self._calls[request_id] = stream
                return answer

    def _first_token(self, stream: Stream, chunk: bytes) -> Talk[dict[str, str]]:
        self._say(stream, response_headers=pb.HttpHeaders(headers=_header_map(_STREAM_HEADERS)))
        self._say(stream, response_body=pb.HttpBody(body=chunk))
        headers: dict[str, str] = {}
        while True:
            reply = _still_there((yield))
            kind = reply.WhichOneof("response")
            if kind == "response_headers":
                headers = _set_headers(reply.response_headers.response.header_mutation)
            elif kind == "response_body":
                return headers

    def _pass_through(self, stream: Stream, chunks: list[tuple[bool, bytes]]) -> Talk[dict[str, str]]:
        headers: dict[str, str] = {}
        for last, chunk in chunks:
            if last:
                yield from self._finish(stream, chunk)
            else:
                headers = yield from self._first_token(stream, chunk)
        return headers

    def _finish(self, stream: Stream, chunk: bytes) -> Talk[None]:
        self._say(stream, last=True, response_body=pb.HttpBody(body=chunk, end_of_stream=True))
        yield from _to_the_end()

    def _close(self, stream: Stream) -> Talk[None]:
        self._streams.end(stream)
        yield from _to_the_end()

    def _say(self, stream: Stream, last: bool = False, **parts: Any) -> None:
        self._streams.send(stream, pb.ProcessingRequest(**parts).SerializeToString(), last)


def _listen(stream: Stream, talk: Talk[Any]) -> None:
    """Hands over what the router has said. StopIteration: the talk is over. RpcError: the RPC ended badly."""
    while stream.messages:
        talk.send(pb.ProcessingResponse.FromString(stream.messages.popleft()))
    if stream.ended:
        if stream.status is not None:
            raise stream.status
        talk.send(None)


def _to_the_end() -> Talk[None]:
    while (yield) is not None:
        pass


def _still_there(reply: pb.ProcessingResponse | None) -> Any:
    if reply is None:
        raise ComponentError("router", "closed an ext_proc stream before it had answered")
    return reply


def _ended(error: RpcError) -> ComponentError:
    return ComponentError("router", f"ext_proc stream ended: {error}")


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
