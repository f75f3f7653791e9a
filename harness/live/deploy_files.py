"""The files below deploy/ that follow from others: `python -m harness.live.deploy_files` writes them anew.

Endpoints, Envoy and the router's configuration of the compose stack, with the same code that writes them for `harness
live`; Prometheus' targets; the Grafana dashboard. A test says when they are out of date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from harness.live import envoy
from harness.live.dashboard import dashboard
from harness.live.router import Facts, fill
from harness.placement import ROLE_LABEL
from harness.router import config
from harness.router.base import Endpoint
from harness.router.select import CONFIGS

ROOT = Path(__file__).parents[2] / "deploy"
MODEL = "Qwen/Qwen3-32B"
BLOCK_TOKENS = 16
"""Of the profile qwen3-32b-bf16-tp2-h100."""
EVENTS_PORT = 5557
SUBNET = "10.77.0"
WORKERS = 4
ROUTER, ENVOY, PAGE = f"{SUBNET}.40", f"{SUBNET}.50", f"{SUBNET}.60"
PD_ROUTER, PD_ENVOY = f"{SUBNET}.41", f"{SUBNET}.51"
LMCACHE_ROUTER, LMCACHE_ENVOY, LMCACHE_PAGE = f"{SUBNET}.43", f"{SUBNET}.53", f"{SUBNET}.63"
KUBE_API = f"{SUBNET}.70"
OLD_ROUTER, OLD_ENVOY = f"{SUBNET}.42", f"{SUBNET}.52"
GATEWAY_PORT, RENDER_PORT, ADMIN_PORT, LOG_PORT = 8080, 8001, 19000, 9011
_HEAD = "# Written by `python -m harness.live.deploy_files`; change it there.\n"


def workers() -> list[Endpoint]:
    """The compose stack's workers."""
    return [Endpoint(i, f"worker-{i}", f"{SUBNET}.{11 + i}", 8000, i) for i in range(WORKERS)]


def pd_workers() -> list[Endpoint]:
    """Those of the profile pd; a decode worker's address is its sidecar's."""
    prefill = [Endpoint(i, f"prefill-{i}", f"{SUBNET}.{21 + i}", 8000, i, {ROLE_LABEL: "prefill"}) for i in range(2)]
    decode = [
        Endpoint(2 + i, f"decode-{i}", f"{SUBNET}.{31 + i}", 8000, 2 + i, {ROLE_LABEL: "decode"}) for i in range(2)
    ]
    return prefill + decode


def lmcache_workers() -> list[Endpoint]:
    """Those of the profile lmcache: on one node, with LMCache's server process as its memory."""
    return [Endpoint(i, f"cached-{i}", f"{SUBNET}.{81 + i}", 8000, 0) for i in range(2)]


def files() -> dict[str, str]:
    """Text by path below deploy/."""
    every = [*workers(), *pd_workers(), *lmcache_workers()]
    return {
        "compose/endpoints.yaml": _endpoints(workers()),
        "compose/endpoints-pd.yaml": _endpoints(pd_workers()),
        "compose/endpoints-lmcache.yaml": _endpoints(lmcache_workers()),
        "compose/router-lmcache.yaml": _router("precise", "/etc/llm-d/endpoints-lmcache.yaml", LMCACHE_ENVOY),
        "compose/envoy-lmcache.yaml": _envoy(lmcache_workers(), LMCACHE_ROUTER, LMCACHE_PAGE),
        "compose/router.yaml": _router("precise", "/etc/llm-d/endpoints.yaml", ENVOY),
        "compose/router-pd.yaml": _router("pd-prefix", "/etc/llm-d/endpoints-pd.yaml", PD_ENVOY),
        "compose/envoy.yaml": _envoy(workers(), ROUTER),
        "compose/envoy-pd.yaml": _envoy(pd_workers(), PD_ROUTER),
        "compose/envoy-v0.7.1.yaml": _envoy(workers(), OLD_ROUTER),
        "compose/router-v0.7.1.yaml": _HEAD + (CONFIGS / "v0.7.1" / "approximate.yaml").read_text(),
        "compose/kubeconfig.yaml": _HEAD + _kubeconfig(),
        "compose/prometheus.yml": _prometheus(every),
        "kubernetes/router-config.yaml": _router("precise", "", "", kubernetes=True),
        "grafana/dashboards/cluster.json": json.dumps(dashboard(), indent=1) + "\n",
    }


def _endpoints(places: list[Endpoint]) -> str:
    entries = []
    for e in places:
        entry: dict[str, Any] = {"name": e.name, "address": e.address, "port": str(e.port)}
        if e.labels:
            entry["labels"] = e.labels
        entries.append(entry)
    return _HEAD + yaml.safe_dump({"endpoints": entries}, sort_keys=False)


def _router(name: str, endpoints_file: str, gateway: str, kubernetes: bool = False) -> str:
    path = CONFIGS / "v0.10.0" / f"{name}.yaml"
    _, document = config.load(path)
    facts = Facts(
        release="v0.10.0",
        model=MODEL,
        block_tokens=BLOCK_TOKENS,
        endpoints_file=endpoints_file,
        render_url="http://vllm-sim:8000" if kubernetes else f"http://{gateway}:{RENDER_PORT}",
        tokenizer_socket="",
        events_port=EVENTS_PORT,
    )
    filled = fill(document, str(path), facts)
    if kubernetes:  # the router finds the pool's pods by itself
        del filled.document["dataLayer"]["discovery"]
        filled.document["plugins"] = [p for p in filled.document["plugins"] if p["type"] != "file-discovery"]
    return _HEAD + f"# From deploy/router/configs/v0.10.0/{name}.yaml.\n" + filled.text


def _kubeconfig() -> str:
    cluster = {"name": "stand-in", "cluster": {"server": f"http://{KUBE_API}:6443"}}
    context = {"name": "stand-in", "context": {"cluster": "stand-in", "user": "nobody", "namespace": "sim"}}
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [cluster],
            "contexts": [context],
            "users": [{"name": "nobody", "user": {}}],
            "current-context": "stand-in",
        },
        sort_keys=False,
    )


def _envoy(places: list[Endpoint], router: str, page: str = PAGE) -> str:
    return _HEAD + envoy.render(
        places,
        host="0.0.0.0",
        port=GATEWAY_PORT,
        admin_host="0.0.0.0",
        admin_port=ADMIN_PORT,
        render_host="0.0.0.0",
        render_port=RENDER_PORT,
        router_host=router,
        router_port=9002,
        log_service=(page, LOG_PORT),
    )


def _prometheus(places: list[Endpoint]) -> str:
    def job(name: str, targets: list[str], path: str = "/metrics") -> dict[str, Any]:
        return {"job_name": name, "metrics_path": path, "static_configs": [{"targets": targets}]}

    document = {
        "global": {"scrape_interval": "5s", "evaluation_interval": "5s"},
        "rule_files": ["alerts.yml"],
        "scrape_configs": [
            job("vllm", [f"{e.address}:{e.port}" for e in places]),
            job("router", [f"{ROUTER}:9090", f"{PD_ROUTER}:9090", f"{LMCACHE_ROUTER}:9090"]),
            job("envoy", [f"{e}:{ADMIN_PORT}" for e in (ENVOY, PD_ENVOY, LMCACHE_ENVOY)], "/stats/prometheus"),
        ],
    }
    return _HEAD + yaml.safe_dump(document, sort_keys=False)


def main() -> int:
    """Write all of them."""
    for name, text in files().items():
        path = ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
