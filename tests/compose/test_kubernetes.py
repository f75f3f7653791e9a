"""The Kubernetes manifests: valid against the API's schemas, and consistent with each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fake_workers.api.__main__ import parser, specification
from harness.live.deploy_files import EVENTS_PORT, ROOT
from harness.router import config

FOLDER = ROOT / "kubernetes"
CRD = "sigs.k8s.io/gateway-api-inference-extension@*/config/crd/bases/inference.networking.k8s.io_inferencepools.yaml"


def kustomization() -> dict[str, Any]:
    return dict(yaml.safe_load((FOLDER / "kustomization.yaml").read_text()))


def objects() -> list[dict[str, Any]]:
    found = []
    for name in kustomization()["resources"]:
        found += [o for o in yaml.safe_load_all((FOLDER / name).read_text()) if o]
    return found


def one(kind: str, name: str) -> dict[str, Any]:
    return next(o for o in objects() if o["kind"] == kind and o["metadata"]["name"] == name)


def test_core_objects_follow_the_api_schemas() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    checked = 0
    for item in objects():
        if "networking.k8s.io" not in item["apiVersion"]:
            validate.validate(item, validate.latest_version(), strict=True)
            checked += 1
    assert checked >= 8


def test_the_pool_follows_its_definition() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    found = sorted(Path.home().glob(f"go/pkg/mod/{CRD}"))
    if not found:
        pytest.skip("the InferencePool's definition is not at hand (it comes with the router's Go modules)")
    definition = yaml.safe_load(found[-1].read_text())
    schema = next(v for v in definition["spec"]["versions"] if v["name"] == "v1")["schema"]["openAPIV3Schema"]
    jsonschema.validate(one("InferencePool", "vllm-sim"), schema)


def test_everything_that_is_named_is_there() -> None:
    pool, workers, router = (
        one("InferencePool", "vllm-sim"),
        one("Deployment", "vllm-sim"),
        one("Deployment", "llm-d-router"),
    )
    template = workers["spec"]["template"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    container = template["spec"]["containers"][0]
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    assert pool["spec"]["targetPorts"] == [{"number": ports["http"]}]
    assert pool["spec"]["endpointPickerRef"]["name"] == one("Service", "llm-d-router")["metadata"]["name"]
    route = one("HTTPRoute", "vllm-sim")["spec"]["rules"][0]["backendRefs"][0]
    assert (route["kind"], route["name"]) == ("InferencePool", pool["metadata"]["name"])
    assert (
        router["spec"]["template"]["spec"]["serviceAccountName"]
        == one("ServiceAccount", "llm-d-router")["metadata"]["name"]
    )
    arguments = [a.replace("$(POD_NAME)", "pod").replace("$(POD_IP)", "10.0.0.1") for a in container["args"]]
    spec = specification(parser().parse_args(arguments[1:]))
    assert arguments[0] == "fake_workers.api" and spec.groups[0][0].port == ports["http"]
    assert spec.events_port == ports["kv-events"] == EVENTS_PORT
    for name in kustomization()["configMapGenerator"][0]["files"]:
        config.load(FOLDER / name)
    for item in (workers, router):
        security = item["spec"]["template"]["spec"]["containers"][0]["securityContext"]
        assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
