"""Addresses of the simulated workers and the forms in which a router learns of them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from harness.errors import InputError
from harness.router.base import Endpoint

NAMESPACE = "sim"
POOL = "pool"
DEFAULT_PORT = 8000
_PORTS_TRIED = 20
_HOSTS_PER_SUBNET = 250


def subnets(pid: int | None = None) -> Iterator[str]:
    """Loopback subnets "127.x.y" to try, starting at one that depends on the process, so that two runs do not
    meet.
    """
    start = (os.getpid() if pid is None else pid) * 7919
    for step in range(64):
        number = (start + step * 257) % (254 * 255)
        yield f"127.{1 + number // 255}.{number % 255}"


def loopback_endpoints(
    count: int,
    *,
    port: int = DEFAULT_PORT,
    ranks_per_node: int = 1,
    labels: dict[str, str] | Sequence[dict[str, str]] | None = None,
) -> list[Endpoint]:
    """`count` endpoints w0, w1, ... on loopback addresses of their own that nobody listens on, one port for
    all.
    """
    if count < 1:
        raise InputError("cluster", f"{count} endpoints", "configure at least one worker")
    addresses, port = _free_addresses(count, port)
    given = labels or {}
    return [
        Endpoint(
            index=i,
            name=f"w{i}",
            address=address,
            port=port,
            node=i // ranks_per_node,
            labels=dict(given if isinstance(given, dict) else given[i]),
        )
        for i, address in enumerate(addresses)
    ]


def _free_addresses(count: int, port: int) -> tuple[list[str], int]:
    """Addresses and one port on which nobody listens; somebody who listens on all addresses takes a port everywhere."""
    for candidate in range(port, port + _PORTS_TRIED):
        for subnet in subnets():
            addresses = [_address(subnet, i) for i in range(count)]
            if _is_free(addresses[0], candidate) and all(_is_free(address, candidate) for address in addresses):
                return addresses, candidate
    raise InputError(
        "cluster",
        f"ports {port} to {port + _PORTS_TRIED - 1} are in use on every loopback subnet tried",
        "stop what listens there",
    )


def _address(subnet: str, index: int) -> str:
    first, second, third = subnet.split(".")
    carry, host = divmod(index, _HOSTS_PER_SUBNET)
    return f"{first}.{second}.{(int(third) + carry) % 256}.{host + 1}"


def _is_free(address: str, port: int) -> bool:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((address, port))
        except OSError:
            return False
    return True


def write_endpoints_file(path: Path, endpoints: Sequence[Endpoint]) -> None:
    """The file that `file-discovery` reads; replaced in one step so that a watching router never sees half of
    it.
    """
    entries: list[dict[str, Any]] = []
    for e in endpoints:
        entry: dict[str, Any] = {"name": e.name, "address": e.address, "port": str(e.port)}
        if e.labels:
            entry["labels"] = dict(e.labels)
        entries.append(entry)
    new = path.with_suffix(".new")
    new.write_text(yaml.safe_dump({"endpoints": entries}, sort_keys=False))
    new.replace(path)
