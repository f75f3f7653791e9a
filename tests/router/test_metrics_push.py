"""Long-poll push against a client that scrapes as the router does: one endpoint, strictly in sequence."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from harness.errors import ComponentError, InputError
from harness.router.base import Endpoint
from harness.router.endpoints import loopback_endpoints
from harness.router.metrics_push import HOLD_S, MetricsPush


class Scraper(threading.Thread):
    """Scrapes an endpoint again and again over one connection, keeping what it has taken over."""

    def __init__(self, endpoint: Endpoint, delay_s: float = 0.0) -> None:
        super().__init__(daemon=True)
        self.endpoint, self.delay_s = endpoint, delay_s
        self.seen: list[bytes] = []
        self.ended = False
        self.start()

    def run(self) -> None:
        connection = http.client.HTTPConnection(self.endpoint.address, self.endpoint.port, timeout=5)
        while not self.ended:
            try:
                connection.request("GET", "/metrics")
                body = connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                return
            time.sleep(self.delay_s)  # parsing
            self.seen.append(body)


@pytest.fixture
def endpoints() -> list[Endpoint]:
    return loopback_endpoints(3, port=18777)


@pytest.fixture
def push(endpoints: list[Endpoint]) -> Iterator[MetricsPush]:
    served = MetricsPush(endpoints, [b"0"] * 3)
    yield served
    served.close()


def test_push_returns_only_after_take_over(push: MetricsPush, endpoints: list[Endpoint]) -> None:
    scrapers = [Scraper(e, delay_s=0.02) for e in endpoints]
    push.wait_all(5)
    assert all(s.seen[0] == b"0" for s in scrapers)
    for k in range(1, 10):
        push.push({0: b"a%d" % k, 2: b"c%d" % k})
        assert scrapers[0].seen[-1] == b"a%d" % k
        assert scrapers[2].seen[-1] == b"c%d" % k
    assert set(scrapers[1].seen) == {b"0"}


def test_pages_on_their_way_are_waited_for(push: MetricsPush, endpoints: list[Endpoint]) -> None:
    """Several begun pushes, some to the same worker, end with one wait; it sees the last page of each."""
    scrapers = [Scraper(e, delay_s=0.02) for e in endpoints]
    push.wait_all(5)
    for k in range(1, 6):
        push.begin({0: b"a%d" % k, 1: b"b%d" % k})
        push.begin({1: b"B%d" % k, 2: b"c%d" % k})
        push.begin({})
        push.wait()
        assert [s.seen[-1] for s in scrapers] == [b"a%d" % k, b"B%d" % k, b"c%d" % k]
    push.wait()


def test_scrapes_are_held_but_not_too_long(push: MetricsPush, endpoints: list[Endpoint]) -> None:
    scraper = Scraper(endpoints[0])
    time.sleep(HOLD_S * 2.5)
    assert 2 <= len(scraper.seen) <= 4
    assert HOLD_S < 0.9, "the router gives up after a second"


def test_answer_into_a_closed_connection_is_no_acknowledgement(push: MetricsPush, endpoints: list[Endpoint]) -> None:
    """The router's scrape times out just before the push: only the next connection's scrape takes the value
    over.
    """
    connection = http.client.HTTPConnection(endpoints[0].address, endpoints[0].port)
    connection.request("GET", "/metrics")
    connection.getresponse().read()
    connection.request("GET", "/metrics")
    time.sleep(0.1)
    connection.close()
    late: list[Scraper] = []
    threading.Timer(0.2, lambda: late.append(Scraper(endpoints[0]))).start()
    push.push({0: b"new"})
    assert late and b"new" in late[0].seen


def test_time_in_which_we_stood_still_is_not_the_routers(
    push: MetricsPush, endpoints: list[Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Ctrl-Z for longer than the router may take, it has to scrape anew first."""
    push.begin({0: b"new"})
    late: list[Scraper] = []
    threading.Timer(0.3, lambda: late.append(Scraper(endpoints[0]))).start()
    asleep = iter([0.0, 0.0])  # the wait's own first look, and one of the sweep
    monkeypatch.setattr(
        "harness.router.metrics_push.time",
        SimpleNamespace(monotonic=lambda: time.monotonic() + next(asleep, 100.0)),
    )
    push.wait(30)
    assert b"new" in late[0].seen


def test_nobody_reads(push: MetricsPush) -> None:
    with pytest.raises(ComponentError, match=r"endpoints \[1\]"):
        push.push({1: b"x"}, timeout_s=0.1)


def test_address_in_use(endpoints: list[Endpoint], push: MetricsPush) -> None:
    with pytest.raises(InputError, match="w0"):
        MetricsPush(endpoints, [b"0"] * 3)


def test_two_runs_get_different_subnets(push: MetricsPush) -> None:
    other = loopback_endpoints(3, port=18777)
    MetricsPush(other, [b"0"] * 3).close()


def test_more_endpoints_than_a_subnet_holds() -> None:
    addresses = [e.address for e in loopback_endpoints(600, port=18778, ranks_per_node=8)]
    assert len(set(addresses)) == 600
    assert all(1 <= int(part) <= 254 for a in addresses for part in a.split(".")[3:])
