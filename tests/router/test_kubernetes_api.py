"""The stand-in for the Kubernetes API, as a client sees it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from harness.router import kubernetes_api as k8s
from harness.router.base import Endpoint

PODS = "/api/v1/namespaces/sim/pods"
POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/sim/inferencepools"


@pytest.fixture
def api() -> Iterator[k8s.KubernetesApi]:
    served = k8s.KubernetesApi()
    yield served
    served.close()


@pytest.fixture
def client(api: k8s.KubernetesApi) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{api.port}", timeout=5) as c:
        yield c


def endpoint(i: int) -> Endpoint:
    return Endpoint(index=i, name=f"w{i}", address=f"127.9.9.{i + 1}", port=8000, node=0, labels={"role": f"r{i}"})


def test_discovery_names_every_resource(client: httpx.Client) -> None:
    groups = {g["name"]: g for g in client.get("/apis").json()["groups"]}
    found = {(r["kind"], "v1") for r in client.get("/api/v1").json()["resources"]}
    for group in groups.values():
        version = group["preferredVersion"]["groupVersion"]
        listing = client.get(f"/apis/{version}").json()
        assert listing["groupVersion"] == version
        found |= {(r["kind"], version) for r in listing["resources"]}
    assert found == {(r.kind, r.api_version) for r in k8s.RESOURCES}
    assert client.get("/apis/other.io/v1").status_code == 404


def test_list_and_get_with_selectors(api: k8s.KubernetesApi, client: httpx.Client) -> None:
    for i in range(3):
        api.put(k8s.PODS, "sim", f"w{i}", k8s.pod(endpoint(i), {"app": "vllm"}))
    api.put(k8s.PODS, "other", "x", k8s.pod(endpoint(7), {"app": "vllm"}))
    listed = client.get(PODS).json()
    assert listed["kind"] == "PodList" and [p["metadata"]["name"] for p in listed["items"]] == [
        "w0",
        "w1",
        "w2",
    ]
    assert int(listed["metadata"]["resourceVersion"]) >= max(
        int(p["metadata"]["resourceVersion"]) for p in listed["items"]
    )
    chosen = client.get(PODS, params={"labelSelector": "role=r1"}).json()["items"]
    assert [p["status"]["podIP"] for p in chosen] == ["127.9.9.2"]
    assert [
        p["metadata"]["name"] for p in client.get(PODS, params={"fieldSelector": "metadata.name=w2"}).json()["items"]
    ] == ["w2"]
    assert client.get(f"{PODS}/w0").json()["metadata"]["namespace"] == "sim"
    missing = client.get(f"{PODS}/w9")
    assert missing.status_code == 404 and missing.json()["reason"] == "NotFound"


def events(lines: Iterator[str], count: int) -> list[dict[str, Any]]:
    return [json.loads(next(lines)) for _ in range(count)]


def test_watch_starts_with_the_list_and_goes_on(api: k8s.KubernetesApi, client: httpx.Client) -> None:
    api.put(k8s.PODS, "sim", "w0", k8s.pod(endpoint(0), {"app": "vllm"}))
    query = {
        "watch": "true",
        "sendInitialEvents": "true",
        "allowWatchBookmarks": "true",
        "timeoutSeconds": "60",
    }
    with client.stream("GET", PODS, params=query) as response:
        lines = response.iter_lines()
        added, bookmark = events(lines, 2)
        assert (added["type"], added["object"]["metadata"]["name"]) == ("ADDED", "w0")
        assert bookmark["type"] == "BOOKMARK"
        assert bookmark["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}
        api.put(k8s.PODS, "sim", "w1", k8s.pod(endpoint(1), {"app": "vllm"}))
        api.put(k8s.PODS, "other", "w2", k8s.pod(endpoint(2), {"app": "vllm"}))
        api.put(k8s.PODS, "sim", "w0", k8s.pod(endpoint(3), {"app": "vllm"}))
        api.delete(k8s.PODS, "sim", "w1")
        later = events(lines, 3)
    assert [(e["type"], e["object"]["metadata"]["name"]) for e in later] == [
        ("ADDED", "w1"),
        ("MODIFIED", "w0"),
        ("DELETED", "w1"),
    ]
    assert later[1]["object"]["metadata"]["uid"] == added["object"]["metadata"]["uid"]
    versions = [int(e["object"]["metadata"]["resourceVersion"]) for e in [added, *later]]
    assert versions == sorted(set(versions))


def test_watch_from_a_version_tells_only_what_is_newer(api: k8s.KubernetesApi, client: httpx.Client) -> None:
    api.put(k8s.POOLS, "sim", "pool", k8s.pool(8000, {"app": "vllm"}, 9002))
    since = client.get(POOLS).json()["metadata"]["resourceVersion"]
    api.put(k8s.POOLS, "sim", "second", k8s.pool(8000, {"app": "vllm"}, 9002))
    with client.stream("GET", POOLS, params={"watch": "1", "resourceVersion": since}) as response:
        (first,) = events(response.iter_lines(), 1)
    assert first["object"]["metadata"]["name"] == "second"


def test_watch_ends_when_its_time_is_over(client: httpx.Client) -> None:
    with client.stream("GET", PODS, params={"watch": "1", "timeoutSeconds": "1"}) as response:
        assert list(response.iter_lines()) == []
