"""The stand-in for the Kubernetes API as a service of its own: an endpoints file's workers as ready pods of a pool.

    python -m harness.live.kube_api --endpoints FILE [--host 0.0.0.0] [--port 6443]

For router releases that find their endpoints nowhere else (v0.7.1), in compose. Read-only, plain HTTP, no accounts.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path

from harness.errors import HarnessError
from harness.live.page_server import read_endpoints
from harness.router import kubernetes_api
from harness.router.endpoints import NAMESPACE, POOL

LABELS = {"harness/pool": POOL}


def main() -> int:
    """Until a signal."""
    parser = argparse.ArgumentParser(prog="python -m harness.live.kube_api", description=__doc__)
    parser.add_argument("--endpoints", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=6443)
    arguments = parser.parse_args()
    try:
        endpoints = read_endpoints(arguments.endpoints)
        api = kubernetes_api.KubernetesApi(arguments.host, arguments.port)
    except HarnessError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    api.put(kubernetes_api.POOLS, NAMESPACE, POOL, kubernetes_api.pool(endpoints[0].port, LABELS, 9002))
    for endpoint in endpoints:
        api.put(kubernetes_api.PODS, NAMESPACE, endpoint.name, kubernetes_api.pod(endpoint, LABELS))
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()
    api.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
