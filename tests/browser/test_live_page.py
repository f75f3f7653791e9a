"""The live page in a real browser, desktop and phone: it shows the cluster, it fits, it complains of nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("fastapi")

from harness.live.run import make_page
from harness.live.tiers import LiveTiers
from harness.live.watch import Watch
from harness.router.base import Endpoint
from tests.api.live_server import Live, serving, spec
from tests.browser.page import Page
from tests.live.running import experiment

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Live, Watch, list[tuple[str, str]]]]:
    import socket

    import uvicorn

    flipped: list[tuple[str, str]] = []
    wanted = experiment(3, cache={"kind": "offloading", "offloading": {"cpu_bytes_to_use": 8 << 30}})
    with serving(spec(3), lambda clock: LiveTiers(clock, wanted, [0, 1, 2], "sim/model")) as live:
        endpoints = [
            Endpoint(i, group[0].name, group[0].host, group[0].port, 0) for i, group in enumerate(live.spec.groups)
        ]
        facts = {
            "model": "sim/model",
            "profile": "p",
            "speed": 1.0,
            "gateway": "http://gateway",
            "router": "",
            "curl": "curl",
        }
        watch = Watch(endpoints, facts=facts, router_metrics=None, results=tmp_path_factory.mktemp("results"))
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        app = make_page(watch, None, lambda component, action: flipped.append((component, action)))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))

        async def main() -> None:
            scraping = asyncio.create_task(watch.run())
            await server.serve(sockets=[listener])
            scraping.cancel()

        thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", live, watch, flipped
        server.should_exit = True
        thread.join(10)


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False)])
def test_the_page(
    page: Page, site: tuple[str, Live, Watch, list[tuple[str, str]]], width: int, dark: bool, tmp_path: Path
) -> None:
    url, live, watch, _ = site
    body = {"prompt": "hello " * 60, "max_tokens": 20, "ignore_eos": True}
    for target in live.urls:
        httpx.post(f"{target}/v1/completions", json=body)
    first = live.spec.groups[0][0]
    watch.access(
        {"access": 1, "start": str(time.time()), "id": "r1", "path": "/v1/completions", "status": 200,
         "picked": f"{first.host}:{first.port}",
         "scores": {"10.0.0.1:1": 1.5, f"{first.host}:{first.port}": 1.5, "10.0.0.1:2": 2},
         "first_byte_ms": 12, "duration_ms": 340}
    )  # fmt: skip
    page.visit(url, width, dark=dark)
    page.wait("[...document.querySelectorAll('.worker p')].some((p) => p.textContent.includes(' done'))")
    assert page.js("return document.querySelectorAll('.worker').length") == 3
    assert page.js("return document.querySelector('#recent tbody td:nth-child(4)').textContent") == first.name
    page.wait("document.querySelectorAll('#links tbody tr').length > 0")
    assert page.js("return document.querySelector('#tiers tbody td').textContent") == "dram of node 0"
    assert page.js("return document.querySelector('#links tbody td').textContent").startswith("gpu>host")
    scores = page.js("return [...document.querySelectorAll('.scores span')].map((s) => [s.textContent, s.className])")
    assert scores[:3] == [["10.0.0.1:2 2.00", ""], [f"{first.name} 1.50", "picked"], ["10.0.0.1:1 1.50", ""]]
    assert page.js("return document.getElementById('legend').textContent").startswith("Bold: the worker that was taken")
    assert page.js("return document.documentElement.scrollWidth <= window.innerWidth"), (
        "the page is wider than the screen"
    )
    assert not page.console()
    assert all(r.startswith(url) or r.startswith("data:") for r in page.requests())
    picture = tmp_path / "live.png"
    page.driver.save_screenshot(str(picture))
    assert picture.stat().st_size > 10_000


def test_switches_and_hostile_names(page: Page, site: tuple[str, Live, Watch, list[tuple[str, str]]]) -> None:
    url, _, watch, flipped = site
    watch.access({"access": 1, "start": "1", "path": "<img src=x onerror=alert(1)>", "status": 503, "flags": "UF"})
    page.visit(url, 1280)
    assert page.js("return document.querySelectorAll('td img').length") == 0
    assert "no connection" in page.js("return document.querySelector('#recent abbr').title")
    assert "UF: no connection" in page.js("return document.getElementById('legend').textContent")
    page.js("document.querySelector('.worker button').click()")
    end = time.monotonic() + 5
    while not flipped and time.monotonic() < end:
        time.sleep(0.05)
    assert flipped == [("w0", "kill")]
    assert httpx.post(f"{url}/switch/w0/kill").status_code == 403
    assert httpx.get(f"{url}/results/..%2f..%2fetc/report.html").status_code == 404
