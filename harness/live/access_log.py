"""Envoy's access log over gRPC: the gateway in a container tells the page in another what was decided."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from google.protobuf import json_format

from harness.errors import InputError
from harness.live.envoy import DESTINATION, SCORES
from harness.live.response_flags import code_of

_THREADS = 8


class AccessLogServer:
    """Serves `envoy.service.accesslog.v3.AccessLogService`; every entry becomes a line as the JSON log has it."""

    def __init__(self, host: str, port: int, on_entry: Callable[[dict[str, Any]], None]) -> None:
        self._server = grpc.server(futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="access-log"))
        als_pb2_grpc.add_AccessLogServiceServicer_to_server(_Service(on_entry), self._server)
        try:
            self.port = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError:
            self.port = 0
        if not self.port:
            raise InputError(f"access log at {host}:{port}", "cannot be bound", "choose a free port")
        self._server.start()

    def close(self) -> None:
        """End the service."""
        self._server.stop(0).wait()


class _Service(als_pb2_grpc.AccessLogServiceServicer):  # type: ignore[misc]
    def __init__(self, on_entry: Callable[[dict[str, Any]], None]) -> None:
        self._on_entry = on_entry

    def StreamAccessLogs(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
        """Reads until Envoy hangs up."""
        for message in requests:
            for entry in message.http_logs.log_entry:
                self._on_entry(as_line(entry))
        return als_pb2.StreamAccessLogsResponse()


def as_line(entry: Any) -> dict[str, Any]:
    """An HTTPAccessLogEntry in the fields of the JSON log."""
    common, request, response = entry.common_properties, entry.request, entry.response
    headers = dict(request.request_headers)
    scores = None
    if "envoy.lb" in common.metadata.filter_metadata:
        metadata = json_format.MessageToDict(common.metadata.filter_metadata["envoy.lb"])
        scores = metadata.get(SCORES)
    upstream = common.upstream_remote_address.socket_address
    flags = [code_of(field.name) for field, value in common.response_flags.ListFields() if value is True]
    return {
        "access": 1,
        "start": common.start_time.ToNanoseconds() / 1e9,
        "id": request.request_id or headers.get("x-request-id", ""),
        "path": request.path,
        "status": response.response_code.value,
        "flags": ",".join(flags),
        "first_byte_ms": _ms(common, "time_to_first_upstream_rx_byte"),
        "duration_ms": _ms(common, "time_to_last_downstream_tx_byte"),
        "upstream": f"{upstream.address}:{upstream.port_value}" if upstream.address else None,
        "picked": headers.get(DESTINATION),
        "prefiller": headers.get("x-prefiller-host-port"),
        "scores": scores,
    }


def _ms(common: Any, name: str) -> float | None:
    return round(getattr(common, name).ToNanoseconds() / 1e6, 1) if common.HasField(name) else None
