"""Reading the router's metrics port."""

from __future__ import annotations

import socket
import threading

import pytest

from harness.errors import ComponentError
from harness.router.http_get import HttpGet

PAGE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def test_silence_is_not_waited_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.router.http_get.GIVE_UP_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises(ComponentError, match="metrics port does not answer: timed out"):
            HttpGet(server.getsockname()[1]).read("/metrics")
        server.settimeout(0.2)
        server.accept()[0].close()
        with pytest.raises(TimeoutError):
            server.accept()


def test_a_connection_that_was_closed_meanwhile_is_made_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for _ in range(2):
                connection = server.accept()[0]
                connection.recv(65536)
                connection.sendall(PAGE)
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        pages = HttpGet(server.getsockname()[1])
        assert [pages.read("/metrics"), pages.read("/metrics")] == [b"ok", b"ok"]
        pages.close()
        thread.join()
