"""One page in a driven browser."""

from __future__ import annotations

import base64
import json
import time
import zlib
from pathlib import Path
from typing import Any


class Page:
    """One open page: its size, its theme, its console."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path, width: int, height: int = 900, dark: bool = False) -> None:
        """Load a local file at the given size and wait until its plots are drawn."""
        self.visit(path.as_uri(), width, height, dark)

    def visit(self, url: str, width: int, height: int = 900, dark: bool = False) -> None:
        """The same with an address."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get(url)
        self.wait("document.documentElement.dataset.ready === '1'")

    def wait(self, condition: str, limit_s: float = 30.0) -> None:
        """Until the JavaScript condition holds."""
        end = time.monotonic() + limit_s
        while not self.js(f"return {condition}"):
            if time.monotonic() > end:
                raise AssertionError(f"not within {limit_s} s: {condition}; console: {self.console()}")
            time.sleep(0.05)

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def console(self) -> list[str]:
        """What the page complained about since it was opened."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses that the page asked for since it was opened."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]

    def pixel(self, x: float, y: float) -> int:
        """Red, green and blue together (0 to 765) of one point of the page, as it is drawn."""
        clip = {"x": x, "y": y, "width": 1, "height": 1, "scale": 1}
        wanted = {"format": "png", "clip": clip, "captureBeyondViewport": True}
        png = base64.b64decode(self.driver.execute_cdp_cmd("Page.captureScreenshot", wanted)["data"])
        data, at = b"", 8
        while at < len(png):
            size, kind = int.from_bytes(png[at : at + 4]), png[at + 4 : at + 8]
            data += png[at + 8 : at + 8 + size] if kind == b"IDAT" else b""
            at += size + 12
        return sum(zlib.decompress(data)[1:4])  # after the line's filter, which leaves a first point as it is
