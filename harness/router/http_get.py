"""A GET over one kept-open connection to the router's metrics port (loopback, no TLS)."""

from __future__ import annotations

import http.client

from harness.errors import ComponentError
from harness.router.process import GIVE_UP_S


class HttpGet:
    """Reads pages of the router's metrics server."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection: http.client.HTTPConnection | None = None

    def read(self, path: str, patience_s: float | None = None) -> bytes:
        """The page's body; one retry on a connection that the server has closed meanwhile, none on silence.

        `patience_s`: how long a silence may be; None: `GIVE_UP_S`.
        """
        timeout_s = GIVE_UP_S if patience_s is None else patience_s
        for attempt in (0, 1):
            connection = self._connection
            if connection is None:
                connection = self._connection = http.client.HTTPConnection("127.0.0.1", self._port)
            connection.timeout = timeout_s
            if connection.sock is not None:
                connection.sock.settimeout(timeout_s)
            try:
                connection.request("GET", path, headers={"Accept-Encoding": "identity"})
                response = connection.getresponse()
                body = response.read()
            except (OSError, http.client.HTTPException) as error:
                self.close()
                if attempt or isinstance(error, TimeoutError):
                    raise ComponentError("router", f"its metrics port does not answer: {error}") from error
                continue
            if response.status != 200:
                raise ComponentError("router", f"GET {path} on its metrics port: {response.status}")
            return body
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Drops the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def sample(page: bytes, name: bytes) -> float | None:
    """The value of an unlabelled sample of a Prometheus text page."""
    start = page.find(b"\n" + name + b" ")
    if start < 0:
        return None
    start += len(name) + 2
    return float(page[start : page.index(b"\n", start)])


def samples(page: bytes, name: bytes) -> dict[bytes, float]:
    """All samples of a name by their label text."""
    found: dict[bytes, float] = {}
    at = 0
    while (at := page.find(b"\n" + name, at)) >= 0:
        end = page.find(b"\n", at + 1)
        line = page[at + 1 : end]
        rest = line[len(name) :]
        if rest[:1] in (b"{", b" "):
            labels, _, value = rest.rpartition(b" ")
            found[labels] = float(value)
        at = end
    return found
