"""Gauges pushed into a router that polls: every worker's /metrics answers by long-poll.

A scrape is held until there is news (or for `HOLD_S`: the router gives up after 1 s), so one is always
pending and answering it is a push. The router scrapes one endpoint strictly in sequence (request, parse, take
over, next request): the arrival of the *next* scrape from a worker therefore proves that the previous answer
has been taken over.

Who waits for the router serves it: handing every scrape to a thread that then wakes the waiting one cost as much as
the scrape. While nobody waits, a thread looks now and then, so that no scrape is held for too long.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fake_workers.api.metrics import CONTENT_TYPE
from harness.errors import ComponentError, InputError
from harness.router.base import Endpoint
from harness.router.process import GIVE_UP_S

HOLD_S = 0.7
_LOOK_S = 0.1
"""How often a push that waits looks whether the router is still there."""
_STOOD_STILL_S = 1.0
"""Of a look that took longer no more than this is time of the router's: the harness itself stood still (Ctrl-Z)."""
_TICK_S = 0.05
"""How often scrapes are looked after while nobody waits, so that one is held for `HOLD_S` and twice this at most."""
_HEAD = "HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n"


@dataclass(slots=True)
class _Worker:
    index: int
    response: bytes
    version: int = 1
    served: int = 0
    acked: int = 0
    waiting: socket.socket | None = None
    answered: socket.socket | None = None
    since_s: float = 0.0


@dataclass(slots=True)
class _Connection:
    sock: socket.socket
    worker: _Worker
    buffer: bytearray = field(default_factory=bytearray)


class MetricsPush:
    """HTTP servers of all workers, served by whoever waits in `wait`, and else by a thread of their own."""

    def __init__(
        self, endpoints: Sequence[Endpoint], bodies: Sequence[bytes], alive: Callable[[], bool] = lambda: True
    ) -> None:
        self._alive = alive
        self._epoll = select.epoll()
        self._listeners: dict[int, tuple[socket.socket, _Worker]] = {}
        self._connections: dict[int, _Connection] = {}
        self._workers = [_Worker(e.index, _response(body)) for e, body in zip(endpoints, bodies, strict=True)]
        self._lock = threading.Lock()
        self._pending: set[int] = set()
        self._closed = threading.Event()
        self._swept_s = time.monotonic()
        self.scrapes = 0
        try:
            for endpoint, worker in zip(endpoints, self._workers, strict=True):
                self._listen(endpoint, worker)
        except BaseException:
            self.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="metrics-push", daemon=True)
        self._thread.start()

    def push(self, bodies: dict[int, bytes], timeout_s: float = GIVE_UP_S) -> None:
        """New pages by endpoint index; returns once the router has taken all of them over."""
        self.begin(bodies)
        self.wait(timeout_s)

    def begin(self, bodies: dict[int, bytes]) -> None:
        """New pages by endpoint index, on their way to the router."""
        if not bodies:
            return
        with self._lock:
            for index, body in bodies.items():
                worker = self._workers[index]
                worker.response = _response(body)
                worker.version += 1
                if worker.waiting is not None:
                    self._answer(worker)
            self._pending.update(bodies)

    def wait(self, timeout_s: float = GIVE_UP_S) -> None:
        """Until the router has taken over all pages that are on their way."""
        with self._lock:
            self._wait(timeout_s)

    def wait_all(self, timeout_s: float) -> None:
        """Until the router has taken over every worker's present page (at start-up: its first)."""
        with self._lock:
            self._pending.update(w.index for w in self._workers if w.acked < w.version)
            self._wait(timeout_s)

    def close(self) -> None:
        """Stops serving and frees the addresses."""
        if self._closed.is_set():
            return
        self._closed.set()
        thread = getattr(self, "_thread", None)
        if thread is not None:
            thread.join(2.0)
        for sock, _ in self._listeners.values():
            sock.close()
        for connection in self._connections.values():
            connection.sock.close()
        self._epoll.close()

    def _wait(self, timeout_s: float) -> None:
        left_s, seen_s = timeout_s, time.monotonic()
        while self._pending:
            if self._closed.is_set():
                raise ComponentError("router", "the metrics servers were closed while values were on their way")
            self._turn(max(0.0, min(left_s, _LOOK_S)))
            now_s = time.monotonic()
            left_s, seen_s = left_s - min(now_s - seen_s, _STOOD_STILL_S), now_s
            if self._pending and (left_s <= 0 or not self._alive()):
                missing = sorted(self._pending)
                raise ComponentError(
                    "router", f"did not read the metrics of endpoints {missing} within {timeout_s:g} s"
                )

    def _listen(self, endpoint: Endpoint, worker: _Worker) -> None:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listeners[sock.fileno()] = (sock, worker)
        try:
            sock.bind((endpoint.address, endpoint.port))
            sock.listen(64)
        except OSError as error:
            raise InputError(
                f"endpoint {endpoint.name}",
                f"cannot listen on {endpoint.address}:{endpoint.port} ({error.strerror})",
                "free the address, or choose another worker port or subnet",
            ) from error
        sock.setblocking(False)
        self._epoll.register(sock, select.EPOLLIN)

    def _serve(self) -> None:
        while not self._closed.wait(_TICK_S):
            with self._lock:
                self._turn(0.0)

    def _turn(self, wait_s: float) -> None:
        """Takes in what has come, waiting for it if need be, and lets go of scrapes held for too long."""
        for fd, _ in self._epoll.poll(wait_s):
            if fd in self._listeners:
                self._accept(*self._listeners[fd])
            elif fd in self._connections:
                self._read(fd)
        now_s = time.monotonic()
        if now_s - self._swept_s > _TICK_S:
            self._swept_s = now_s
            for worker in self._workers:
                if worker.waiting is not None and now_s - worker.since_s > HOLD_S:
                    self._answer(worker)

    def _accept(self, listener: socket.socket, worker: _Worker) -> None:
        with contextlib.suppress(BlockingIOError):
            sock, _ = listener.accept()
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections[sock.fileno()] = _Connection(sock, worker)
            self._epoll.register(sock, select.EPOLLIN)

    def _read(self, fd: int) -> None:
        connection = self._connections[fd]
        try:
            data = connection.sock.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(fd)
            return
        connection.buffer += data
        while (end := connection.buffer.find(b"\r\n\r\n")) >= 0:
            target = bytes(connection.buffer[:end]).split(b" ", 2)[1:2]
            del connection.buffer[: end + 4]
            if target == [b"/metrics"]:
                self._scraped(connection)
            else:
                _send(connection.sock, b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    def _scraped(self, connection: _Connection) -> None:
        worker = connection.worker
        self.scrapes += 1
        if worker.answered is not None:
            if _hung_up(worker.answered):
                worker.served = worker.acked
            else:
                worker.acked = worker.served
            worker.answered = None
        if worker.acked == worker.version and worker.index in self._pending:
            self._pending.discard(worker.index)
        worker.waiting, worker.since_s = connection.sock, time.monotonic()
        if worker.served < worker.version:
            self._answer(worker)

    def _answer(self, worker: _Worker) -> None:
        sock, worker.waiting = worker.waiting, None
        assert sock is not None
        if _send(sock, worker.response):
            worker.served, worker.answered = worker.version, sock

    def _drop(self, fd: int) -> None:
        connection = self._connections.pop(fd)
        worker = connection.worker
        if worker.waiting is connection.sock:
            worker.waiting = None
        if worker.answered is connection.sock:
            worker.answered, worker.served = None, worker.acked
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)
        connection.sock.close()


def _response(body: bytes) -> bytes:
    return (_HEAD % (CONTENT_TYPE, len(body))).encode() + body


def _hung_up(sock: socket.socket) -> bool:
    """Whether the router gave up on this connection (its scrape timed out): then the last answer went
    nowhere.
    """
    try:
        return sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _send(sock: socket.socket, data: bytes) -> bool:
    """Pages are a kilobyte: they fit into the socket's buffer unless the peer is gone."""
    try:
        sock.sendall(data)
    except OSError:
        return False
    return True
