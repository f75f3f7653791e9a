"""A stand-in for the Kubernetes API, as much of it as the router reads: pods and the inference extension's
resources.

Plain HTTP, read-only towards the router: discovery, GET, LIST and WATCH, including the watch that starts with
a list (`sendInitialEvents`): the present objects as ADDED, then a BOOKMARK annotated
`k8s.io/initial-events-end`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from harness.router.base import Endpoint
from harness.router.endpoints import POOL

Json = dict[str, Any]

INFERENCE = "inference.networking.k8s.io"
INFERENCE_X = "inference.networking.x-k8s.io"
LLMD = "llm-d.ai"
_POOL_REF = {"name": POOL, "group": INFERENCE, "kind": "InferencePool"}
_SEND_BOOKMARK_S = 30.0


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object: API group ("" is the core group), version, plural and kind."""

    group: str
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


PODS = Resource("", "v1", "pods", "Pod")
POOLS = Resource(INFERENCE, "v1", "inferencepools", "InferencePool")
OBJECTIVES = Resource(INFERENCE_X, "v1alpha2", "inferenceobjectives", "InferenceObjective")
REWRITES = Resource(INFERENCE_X, "v1alpha2", "inferencemodelrewrites", "InferenceModelRewrite")
LLMD_OBJECTIVES = Resource(LLMD, "v1alpha2", "inferenceobjectives", "InferenceObjective")
LLMD_REWRITES = Resource(LLMD, "v1alpha2", "inferencemodelrewrites", "InferenceModelRewrite")
RESOURCES = (PODS, POOLS, OBJECTIVES, REWRITES, LLMD_OBJECTIVES, LLMD_REWRITES)


@dataclass(slots=True, eq=False)
class _Watch:
    resource: Resource
    namespace: str
    selector: Json
    events: queue.SimpleQueue[Json | None]


class KubernetesApi:
    """Holds objects in memory and serves them, by default on a free port of 127.0.0.1."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._objects: dict[Resource, dict[tuple[str, str], Json]] = {r: {} for r in RESOURCES}
        self._watches: set[_Watch] = set()
        self._lock = threading.Lock()
        self._versions = itertools.count(100)
        self._version = next(self._versions)
        self.requests: list[str] = []
        api = self

        class Handler(_Handler):
            pass

        Handler.api = api
        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="kubernetes-api", daemon=True
        )
        self._thread.start()

    def put(self, resource: Resource, namespace: str, name: str, content: Json) -> None:
        """Creates or replaces an object (`content`: metadata labels/annotations, spec, status) and tells the
        watchers.
        """
        with self._lock:
            self._version = next(self._versions)
            old = self._objects[resource].get((namespace, name))
            metadata: Json = {
                **content.get("metadata", {}),
                "name": name,
                "namespace": namespace,
                "resourceVersion": str(self._version),
                "uid": old["metadata"]["uid"] if old else f"00000000-0000-0000-0000-{self._version:012d}",
                "creationTimestamp": "2026-01-01T00:00:00Z",
                "generation": old["metadata"]["generation"] + 1 if old else 1,
            }
            stored = {
                **content,
                "apiVersion": resource.api_version,
                "kind": resource.kind,
                "metadata": metadata,
            }
            self._objects[resource][namespace, name] = stored
            self._notify(resource, "MODIFIED" if old else "ADDED", stored)

    def delete(self, resource: Resource, namespace: str, name: str) -> None:
        """Removes an object and tells the watchers."""
        with self._lock:
            old = self._objects[resource].pop((namespace, name))
            self._version = next(self._versions)
            metadata = {**old["metadata"], "resourceVersion": str(self._version)}
            self._notify(resource, "DELETED", {**old, "metadata": metadata})

    def close(self) -> None:
        """Ends all watches and frees the port."""
        with self._lock:
            for watch in self._watches:
                watch.events.put(None)
        self._server.shutdown()
        self._server.server_close()

    def select(self, resource: Resource, namespace: str, query: Json) -> list[Json]:
        """Objects of a namespace that match the query's selectors."""
        with self._lock:
            return [o for o in self._objects[resource].values() if _matches(o, namespace, query)]

    def get(self, resource: Resource, namespace: str, name: str) -> Json | None:
        """One object."""
        with self._lock:
            return self._objects[resource].get((namespace, name))

    def version(self) -> str:
        """The newest resource version."""
        return str(self._version)

    def watch(self, resource: Resource, namespace: str, query: Json) -> tuple[_Watch, list[Json]]:
        """Starts a watch; the objects that it begins with come along, so that none is missed or sent twice."""
        with self._lock:
            since = query.get("resourceVersion", "")
            everything = query.get("sendInitialEvents") == "true" or since in ("", "0")
            present = [
                o
                for o in self._objects[resource].values()
                if _matches(o, namespace, query) and (everything or int(o["metadata"]["resourceVersion"]) > int(since))
            ]
            watch = _Watch(resource, namespace, query, queue.SimpleQueue())
            self._watches.add(watch)
            return watch, present

    def unwatch(self, watch: _Watch) -> None:
        """The client has gone."""
        with self._lock:
            self._watches.discard(watch)

    def _notify(self, resource: Resource, kind: str, stored: Json) -> None:
        for watch in self._watches:
            if watch.resource == resource and _matches(stored, watch.namespace, watch.selector):
                watch.events.put({"type": kind, "object": stored})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: KubernetesApi

    def log_message(self, format: str, *args: Any) -> None:
        """The router's requests are not worth a line on the terminal."""

    def do_GET(self) -> None:
        api = self.api
        api.requests.append(self.path)
        url = urlsplit(self.path)
        query = {k: v[-1] for k, v in parse_qs(url.query).items()}
        parts = [p for p in url.path.split("/") if p]
        discovered = _discovery(parts)
        if discovered is not None:
            self._reply(200, discovered)
            return
        resource, namespace, name = _locate(parts)
        if resource is None:
            self._reply(404, _status(404, "NotFound", "the server could not find the requested resource"))
        elif name:
            found = api.get(resource, namespace, name)
            self._reply(200, found) if found else self._reply(404, _status(404, "NotFound", f"{name} not found"))
        elif query.get("watch") in ("1", "true"):
            self._watch(resource, namespace, query)
        else:
            items = api.select(resource, namespace, query)
            metadata = {"resourceVersion": api.version()}
            self._reply(
                200,
                {
                    "kind": resource.kind + "List",
                    "apiVersion": resource.api_version,
                    "metadata": metadata,
                    "items": items,
                },
            )

    def _reply(self, code: int, body: Json) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _watch(self, resource: Resource, namespace: str, query: Json) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        watch, present = self.api.watch(resource, namespace, query)
        ends_s = time.monotonic() + float(query.get("timeoutSeconds", 1800))
        with contextlib.suppress(OSError):
            for stored in present:
                self._event({"type": "ADDED", "object": stored})
            if query.get("sendInitialEvents") == "true":
                self._event(_bookmark(resource, self.api.version(), initial=True))
            while (left_s := ends_s - time.monotonic()) > 0:
                try:
                    event = watch.events.get(timeout=min(left_s, _SEND_BOOKMARK_S))
                except queue.Empty:
                    if time.monotonic() >= ends_s or query.get("allowWatchBookmarks") != "true":
                        continue
                    event = _bookmark(resource, self.api.version())
                if event is None:
                    break
                self._event(event)
            self.wfile.write(b"0\r\n\r\n")
        self.api.unwatch(watch)
        self.close_connection = True

    def _event(self, event: Json) -> None:
        data = json.dumps(event).encode() + b"\n"
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


def _bookmark(resource: Resource, version: str, *, initial: bool = False) -> Json:
    metadata: Json = {"resourceVersion": version, "creationTimestamp": None}
    if initial:
        metadata["annotations"] = {"k8s.io/initial-events-end": "true"}
    stored: Json = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata}
    if resource == PODS:
        stored |= {"spec": {"containers": None}, "status": {}}
    return {"type": "BOOKMARK", "object": stored}


def _matches(stored: Json, namespace: str, query: Json) -> bool:
    metadata = stored["metadata"]
    if namespace and metadata["namespace"] != namespace:
        return False
    for field, value in _terms(query.get("fieldSelector", "")):
        if metadata.get(field.removeprefix("metadata.")) != value:
            return False
    return all(metadata.get("labels", {}).get(k) == v for k, v in _terms(query.get("labelSelector", "")))


def _terms(selector: str) -> list[tuple[str, str]]:
    return [
        (key, value)
        for term in selector.split(",")
        if term
        for key, _, value in [term.replace("==", "=").partition("=")]
    ]


def _discovery(parts: list[str]) -> Json | None:
    """What the API server says about itself, in the plain (not aggregated) form."""
    if parts == ["version"]:
        return {"major": "1", "minor": "35", "gitVersion": "v1.35.0"}
    if parts == ["api"]:
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
    if parts == ["apis"]:
        groups = [_group(g) for g in sorted({r.group for r in RESOURCES} - {""})]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if len(parts) == 2 and parts[0] == "apis" and any(r.group == parts[1] for r in RESOURCES):
        return {"kind": "APIGroup", "apiVersion": "v1", **_group(parts[1])}
    if parts == ["api", "v1"] or (len(parts) == 3 and parts[0] == "apis"):
        version = "/".join(parts[1:])
        found = [r for r in RESOURCES if r.api_version == version]
        if found:
            resources = [
                {
                    "name": r.plural,
                    "singularName": r.kind.lower(),
                    "namespaced": True,
                    "kind": r.kind,
                    "verbs": ["get", "list", "watch"],
                }
                for r in found
            ]
            return {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": version,
                "resources": resources,
            }
    return None


def _group(name: str) -> Json:
    versions = [
        {"groupVersion": v, "version": v.split("/")[1]}
        for v in sorted({r.api_version for r in RESOURCES if r.group == name})
    ]
    return {"name": name, "versions": versions, "preferredVersion": versions[0]}


def _locate(parts: list[str]) -> tuple[Resource | None, str, str]:
    """Resource, namespace and name of an object path."""
    version, rest = (parts[1:2], parts[2:]) if parts[:1] == ["api"] else (parts[1:3], parts[3:])
    namespace = ""
    if len(rest) >= 3 and rest[0] == "namespaces":
        namespace, rest = rest[1], rest[2:]
    for resource in RESOURCES:
        if resource.api_version == "/".join(version) and rest and rest[0] == resource.plural:
            return resource, namespace, rest[1] if len(rest) > 1 else ""
    return None, "", ""


def _status(code: int, reason: str, message: str) -> Json:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


def pod(endpoint: Endpoint, labels: dict[str, str]) -> Json:
    """A ready pod at the endpoint's address."""
    return {
        "metadata": {"labels": {**endpoint.labels, **labels}},
        "spec": {"containers": [{"name": "vllm", "image": "vllm"}]},
        "status": {
            "phase": "Running",
            "podIP": endpoint.address,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def pool(port: int, labels: dict[str, str], picker_port: int) -> Json:
    """An InferencePool that selects pods by label."""
    return {
        "spec": {
            "selector": {"matchLabels": labels},
            "targetPorts": [{"number": port}],
            "endpointPickerRef": {"name": "epp", "port": {"number": picker_port}},
        }
    }


def objective(priority: int) -> Json:
    """An InferenceObjective: requests that name it get this priority."""
    return {"spec": {"priority": priority, "poolRef": _POOL_REF}}


def rewrite(model: str, target: str) -> Json:
    """An InferenceModelRewrite: requests for `model` go out as requests for `target`."""
    rule = {
        "matches": [{"model": {"type": "Exact", "value": model}}],
        "targets": [{"modelRewrite": target, "weight": 100}],
    }
    return {"spec": {"poolRef": _POOL_REF, "rules": [rule]}}


def write_kubeconfig(path: Path, port: int, namespace: str) -> None:
    """A kubeconfig that points at the stand-in: no TLS, no credentials."""
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "sim", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
                "users": [{"name": "sim", "user": {}}],
                "contexts": [{"name": "sim", "context": {"cluster": "sim", "user": "sim", "namespace": namespace}}],
                "current-context": "sim",
            },
            sort_keys=False,
        )
    )
