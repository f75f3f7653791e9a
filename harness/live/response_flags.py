"""Envoy's response flags, as its access log has them, in words for the page.

The JSON log has Envoy's short names, the gRPC log the names of fields of `envoy.data.accesslog.v3.ResponseFlags`.
Meanings after Envoy's documentation of access logging.
"""

from __future__ import annotations

from typing import Final

_KNOWN: Final = {
    "DC": ("downstream_connection_termination", "the client went away before its answer had ended"),
    "DPE": ("downstream_protocol_error", "the client broke the HTTP protocol"),
    "DR": ("downstream_remote_reset", "the client cancelled the request"),
    "DT": ("duration_timeout", "the request took longer than the gateway allows"),
    "IH": ("invalid_envoy_request_headers", "a header of the request was invalid"),
    "LR": ("local_reset", "the gateway broke the connection off"),
    "NC": ("no_cluster_found", "the gateway knows no such group of workers"),
    "NR": ("no_route_found", "the gateway has no route for this path"),
    "OM": ("overload_manager", "the gateway was overloaded"),
    "SI": ("stream_idle_timeout", "nothing was sent for too long"),
    "UC": ("upstream_connection_termination", "the worker broke the connection off"),
    "UF": ("upstream_connection_failure", "no connection to the worker could be made"),
    "UH": ("no_healthy_upstream", "no worker could be taken"),
    "UO": ("upstream_overflow", "the gateway's limit of requests was reached"),
    "UPE": ("upstream_protocol_error", "the worker broke the HTTP protocol"),
    "UR": ("upstream_remote_reset", "the worker cancelled the request"),
    "URX": ("upstream_retry_limit_exceeded", "it was tried as often as the gateway may"),
    "UT": ("upstream_request_timeout", "the worker did not answer in time"),
}
_CODES: Final = {field: code for code, (field, _) in _KNOWN.items()}


def code_of(field: str) -> str:
    """The short name of a field; the field itself where none is known."""
    return _CODES.get(field, field)


def meanings(flags: str) -> dict[str, str]:
    """What each flag of a log line ("UF,URX") says; a flag that is not known says that it is one of Envoy's."""
    return {
        code: _KNOWN[code][1] if code in _KNOWN else "see Envoy's response flags" for code in flags.split(",") if code
    }
