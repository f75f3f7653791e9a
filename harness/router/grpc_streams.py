"""gRPC streams over one HTTP/2 connection, driven by the caller: nothing runs between its calls.

grpc.aio passes every message through a thread of its own and wakes an event loop for it, which was most of what a
decision cost the harness (docs/performance.md). HTTP/2 itself is h2's; here is gRPC's part of it
(github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md): messages with their five bytes of length, the status in the
trailers, and sending no more than the server's windows take.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
import urllib.parse
from collections import deque
from dataclasses import dataclass, field

import grpc
import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings

_LARGEST_WINDOW_BYTES = 2**31 - 1
_READ_BYTES = 1 << 18
_CONNECT_AGAIN_S = 0.02
_FAREWELL_S = 1.0
"""How long a server that reads nothing may hold up the end."""
_HEAD = struct.Struct(">BI")
"""Compressed or not, and the length of the message in bytes."""
_CODES = {str(code.value[0]): code.name for code in grpc.StatusCode}


class RpcError(Exception):
    """A stream that did not end well. `code` is gRPC's name (UNAVAILABLE); `details` the server's words."""

    def __init__(self, code: str, details: str) -> None:
        super().__init__(f"{code} {details}".rstrip())
        self.code, self.details = code, details


@dataclass(slots=True)
class Stream:
    """One open call of a streaming method."""

    id: int
    messages: deque[bytes] = field(default_factory=deque)
    """Received and not taken yet."""
    ended: bool = False
    """Whether the server has ended it; `status` is its verdict."""
    status: RpcError | None = None
    _inbox: bytearray = field(default_factory=bytearray)
    _outbox: bytearray = field(default_factory=bytearray)
    _last: bool = False


class GrpcStreams:
    """All streams of one method at one server, `host` and `port`. Not for several threads."""

    def __init__(self, host: str, port: int, method: str) -> None:
        self._address = (host, port)
        self._headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", method),
            (":authority", f"{host}:{port}"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        ]
        self._socket: socket.socket | None = None
        self._http = h2.connection.H2Connection(
            h2.config.H2Configuration(
                client_side=True,
                header_encoding="utf-8",
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
                validate_inbound_headers=False,
            )
        )
        self._streams: dict[int, Stream] = {}
        self._blocked: set[int] = set()
        """Streams with more to send than the server's windows took."""
        self._settled = False

    def connect(self, timeout_s: float) -> bool:
        """Whether the server speaks HTTP/2 within the time given; it may still be starting."""
        deadline_s = time.monotonic() + timeout_s
        while self._socket is None:
            left_s = deadline_s - time.monotonic()
            try:
                self._socket = socket.create_connection(self._address, max(left_s, 0.001))
            except OSError:
                if left_s <= _CONNECT_AGAIN_S:
                    return False
                time.sleep(_CONNECT_AGAIN_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._http.local_settings = h2.settings.Settings(
            client=True,
            initial_values={
                h2.settings.SettingCodes.ENABLE_PUSH: 0,
                h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: _LARGEST_WINDOW_BYTES,
            },
        )
        self._http.initiate_connection()
        self._http.increment_flow_control_window(_LARGEST_WINDOW_BYTES - 65_535)
        try:
            while not self._settled:
                self.turn(deadline_s)
        except (TimeoutError, RpcError):
            return False
        return True

    def open(self) -> Stream:
        """A new stream; the server hears of it with the next `turn`."""
        if self._socket is None:
            raise RpcError("UNAVAILABLE", f"nobody accepts connections at {self._address[0]}:{self._address[1]}")
        stream = Stream(self._http.get_next_available_stream_id())
        self._http.send_headers(stream.id, self._headers)
        self._streams[stream.id] = stream
        return stream

    def send(self, stream: Stream, message: bytes, last: bool = False) -> None:
        """A message, on its way with the next `turn`; `last`: our side is closed behind it."""
        stream._outbox += _HEAD.pack(0, len(message))
        stream._outbox += message
        self._send(stream, last)

    def end(self, stream: Stream) -> None:
        """Closes our side; at once if that has happened already or the server has ended the stream."""
        self._send(stream, last=True)

    def drop(self, stream: Stream) -> None:
        """Cancels the stream."""
        if not stream.ended:
            self._over(stream, RpcError("CANCELLED", ""))
            self._reset(stream)

    def turn(self, deadline_s: float) -> None:
        """Sends what there is to send and takes in what comes next. TimeoutError at `deadline_s` (monotonic)."""
        connected = self._socket
        if connected is None:
            raise RpcError("UNAVAILABLE", "not connected")
        try:
            if data := self._http.data_to_send():
                _wait_until(connected, deadline_s)
                connected.sendall(data)
            _wait_until(connected, deadline_s)
            data = connected.recv(_READ_BYTES)
            if not data:
                return self._lost("the server closed the connection")
            events = self._http.receive_data(data)
        except TimeoutError:
            raise
        except (OSError, h2.exceptions.ProtocolError) as error:
            return self._lost(str(error))
        for event in events:
            self._take(event)
        for number in list(self._blocked):
            self._push(self._streams[number])

    def close(self) -> None:
        """Cancels all streams and closes the connection; safe to call twice."""
        for stream in list(self._streams.values()):
            self.drop(stream)
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.settimeout(_FAREWELL_S)
                self._socket.sendall(self._http.data_to_send())
            self._socket.close()
            self._socket = None

    def _send(self, stream: Stream, last: bool) -> None:
        if not stream.ended and not stream._last:
            stream._last = last
            self._push(stream)

    def _push(self, stream: Stream) -> None:
        """As much as the server's windows take."""
        outbox = stream._outbox
        self._blocked.discard(stream.id)
        if stream._last and not outbox:
            return self._http.end_stream(stream.id)
        while outbox:
            size = min(len(outbox), self._http.local_flow_control_window(stream.id), self._http.max_outbound_frame_size)
            if size <= 0:
                self._blocked.add(stream.id)
                return
            part = bytes(outbox[:size])
            del outbox[:size]
            self._http.send_data(stream.id, part, end_stream=stream._last and not outbox)

    def _take(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RemoteSettingsChanged):
            self._settled = True
        elif isinstance(event, h2.events.ConnectionTerminated):
            self._lost("the server ended the connection")
        if not isinstance(
            event,
            h2.events.DataReceived
            | h2.events.ResponseReceived
            | h2.events.TrailersReceived
            | h2.events.StreamEnded
            | h2.events.StreamReset,
        ):
            return
        stream = self._streams.get(event.stream_id)
        if isinstance(event, h2.events.DataReceived):
            self._http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            if stream is not None:
                _unpack(stream, event.data)
        elif stream is None:
            return
        elif isinstance(event, h2.events.StreamReset):
            self._over(stream, stream.status or RpcError("UNAVAILABLE", "the server reset the stream"))
        elif isinstance(event, h2.events.StreamEnded):
            self._over(stream, stream.status)
            if not stream._last or stream._outbox:
                self._reset(stream)
        else:
            headers = {str(name): str(value) for name, value in event.headers}
            stream.status = _verdict(headers, isinstance(event, h2.events.TrailersReceived))

    def _reset(self, stream: Stream) -> None:
        with contextlib.suppress(h2.exceptions.StreamClosedError):  # the server was first
            self._http.reset_stream(stream.id, h2.errors.ErrorCodes.CANCEL)

    def _over(self, stream: Stream, status: RpcError | None) -> None:
        stream.ended, stream.status = True, status
        self._streams.pop(stream.id, None)
        self._blocked.discard(stream.id)

    def _lost(self, reason: str) -> None:
        """The connection is gone, and all streams with it."""
        for stream in list(self._streams.values()):
            self._over(stream, RpcError("UNAVAILABLE", reason))
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _wait_until(connected: socket.socket, deadline_s: float) -> None:
    """The socket's next operation raises TimeoutError at this time."""
    connected.settimeout(max(deadline_s - time.monotonic(), 1e-6))


def _unpack(stream: Stream, data: bytes) -> None:
    """Whole messages out of what has come."""
    inbox = stream._inbox
    inbox += data
    start = 0
    while len(inbox) - start >= _HEAD.size:
        _, size = _HEAD.unpack_from(inbox, start)
        end = start + _HEAD.size + size
        if len(inbox) < end:
            break
        stream.messages.append(bytes(inbox[start + _HEAD.size : end]))
        start = end
    del inbox[:start]


def _verdict(headers: dict[str, str], trailing: bool) -> RpcError | None:
    """What the headers or trailers of an answer say of the call; None: nothing is wrong."""
    code = headers.get("grpc-status")
    if code is None:
        if trailing or headers.get(":status", "200") != "200":
            return RpcError("UNKNOWN", f"no gRPC answer (HTTP status {headers.get(':status', 'missing')})")
        return None
    if code == "0":
        return None
    return RpcError(_CODES.get(code, code), urllib.parse.unquote(headers.get("grpc-message", "")))
