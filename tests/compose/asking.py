"""How the compose tests ask gateways and pages; the standard library alone, as it runs in bare namespaces."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

MODEL = "Qwen/Qwen3-32B"


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as response:
        return str(response.read().decode())


def complete(gateway: str, prompt: str | list[int], **more: Any) -> tuple[int, Any]:
    """Status and answer of a completion of four tokens."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "ignore_eos": True, **more}
    request = urllib.request.Request(
        f"{gateway}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
