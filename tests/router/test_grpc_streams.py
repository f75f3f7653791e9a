"""gRPC streams of our own against gRPC's own server."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.router.grpc_streams import GrpcStreams, RpcError, Stream

SERVICE, METHOD = "test.Service", "Talk"
PATH = f"/{SERVICE}/{METHOD}"
REFUSED, HUNG_UP = b"refuse me", b"hang up"


class Server:
    """Sends every message back; refuses or ends on request. `ended` counts handlers that are over."""

    def __init__(self) -> None:
        self.ended = 0
        self._lock = threading.Lock()
        self.server = grpc.server(
            ThreadPoolExecutor(64),
            options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)],
        )
        handler = grpc.stream_stream_rpc_method_handler(self._talk, None, None)
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def _talk(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        def over() -> None:
            with self._lock:
                self.ended += 1

        context.add_callback(over)
        for message in messages:
            if message == REFUSED:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too much: 100 % ü")
            if message == HUNG_UP:
                return
            yield message


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    served = Server()
    yield served
    served.server.stop(0).wait()


@pytest.fixture
def streams(server: Server) -> Iterator[GrpcStreams]:
    client = _client(server.port)
    yield client
    client.close()


def _client(port: int) -> GrpcStreams:
    client = GrpcStreams("127.0.0.1", port, PATH)
    assert client.connect(10)
    return client


def _until_ended(client: GrpcStreams, *streams: Stream) -> None:
    while not all(stream.ended for stream in streams):
        client.turn(time.monotonic() + 10)


SIZES = st.lists(st.sampled_from([0, 1, 5, 16_379, 16_384, 70_000, 1_500_000]) | st.integers(0, 5_000), max_size=5)


@settings(max_examples=25, deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=5), st.booleans())
def test_what_comes_back_is_what_was_sent(server: Server, sizes: list[list[int]], end_apart: bool) -> None:
    """Of any sizes, beyond frames and windows too, on several streams at once."""
    client = _client(server.port)
    open_ = []
    for number, own in enumerate(sizes):
        stream = client.open()
        sent = [bytes([65 + number]) * size for size in own]
        for place, message in enumerate(sent):
            client.send(stream, message, last=not end_apart and place == len(sent) - 1)
        if end_apart or not sent:
            client.end(stream)
        open_.append((stream, sent))
    _until_ended(client, *(stream for stream, _ in open_))
    for stream, sent in open_:
        assert stream.status is None
        assert list(stream.messages) == sent
    client.close()


def test_many_streams_one_after_the_other(streams: GrpcStreams) -> None:
    for number in range(300):
        stream = streams.open()
        streams.send(stream, b"%d" % number)
        while not stream.messages:
            streams.turn(time.monotonic() + 10)
        assert stream.messages.popleft() == b"%d" % number
        streams.end(stream)
        _until_ended(streams, stream)
        assert stream.status is None


def test_a_refusal_carries_the_servers_words(streams: GrpcStreams) -> None:
    stream, other = streams.open(), streams.open()
    streams.send(stream, REFUSED)
    streams.send(other, b"goes on", last=True)
    _until_ended(streams, stream, other)
    assert str(stream.status) == "RESOURCE_EXHAUSTED too much: 100 % ü"
    assert (other.status, list(other.messages)) == (None, [b"goes on"])


def test_a_stream_that_the_server_ends_takes_no_more(streams: GrpcStreams) -> None:
    stream = streams.open()
    streams.send(stream, HUNG_UP)
    _until_ended(streams, stream)
    assert stream.status is None
    streams.send(stream, b"into the void")
    streams.end(stream)
    streams.drop(stream)
    after = streams.open()
    streams.send(after, b"works", last=True)
    _until_ended(streams, after)
    assert list(after.messages) == [b"works"]


def test_an_unknown_method_is_an_error(server: Server) -> None:
    client = GrpcStreams("127.0.0.1", server.port, "/test.Service/Other")
    assert client.connect(10)
    stream = client.open()
    client.send(stream, b"", last=True)
    _until_ended(client, stream)
    assert stream.status is not None
    assert stream.status.code == "UNIMPLEMENTED"
    client.close()


def test_dropped_streams_end_at_the_server(server: Server) -> None:
    before = server.ended
    client = _client(server.port)
    streams = [client.open() for _ in range(20)]
    for stream in streams:
        client.send(stream, b"x")
    while not all(stream.messages for stream in streams):
        client.turn(time.monotonic() + 10)
    client.drop(streams[0])
    assert streams[0].ended
    client.close()
    client.close()
    assert all(stream.ended for stream in streams)
    deadline_s = time.monotonic() + 10
    while server.ended < before + 20 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert server.ended == before + 20


def test_silence_is_a_time_out(streams: GrpcStreams) -> None:
    streams.open()
    with pytest.raises(TimeoutError):
        for _ in range(100):
            streams.turn(time.monotonic() + 0.05)


def test_a_server_that_goes_away() -> None:
    server = Server()
    client = _client(server.port)
    stream = client.open()
    client.send(stream, b"x")
    while not stream.messages:
        client.turn(time.monotonic() + 10)
    server.server.stop(0).wait()
    _until_ended(client, stream)
    assert stream.status is not None
    assert stream.status.code in ("UNAVAILABLE", "CANCELLED")
    with pytest.raises(RpcError, match="UNAVAILABLE"):
        for _ in range(100):
            client.turn(time.monotonic() + 10)
            client.open()
    client.close()


def test_what_does_not_speak_http2_is_not_taken_for_a_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert not GrpcStreams("127.0.0.1", port, PATH).connect(0.2)  # says nothing

        def answer() -> None:
            for _ in range(2):  # the connection of before, and the next
                listener.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert not GrpcStreams("127.0.0.1", port, PATH).connect(2)
        thread.join(5)


def test_a_server_that_still_starts_is_waited_for() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    client = GrpcStreams("127.0.0.1", port, PATH)
    assert not client.connect(0.1)
    with pytest.raises(RpcError, match=f"UNAVAILABLE nobody accepts connections at 127.0.0.1:{port}"):
        client.open()
