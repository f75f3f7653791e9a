"""One page in a driven browser."""

from __future__ import annotations

import json
import time
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
