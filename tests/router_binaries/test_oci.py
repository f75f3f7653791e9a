"""The registry client against a registry that misbehaves on demand."""

from __future__ import annotations

import json
import os
from pathlib import Path

import httpx
import pytest

from harness.errors import ComponentError, InputError
from harness.router import binaries, gobuild, oci

from .fake_registry import REPOSITORY, FakeRegistry, cut, other, status
from .images import OCI_INDEX, OCI_LAYER, digest_of, elf, folder, make_image, tar_of

PROGRAM = elf(body=bytes(range(256)) * 200)
LAYERS = [
    tar_of([folder("etc"), ("etc/passwd", b"root")]),
    tar_of([folder("app"), ("app/epp", PROGRAM), ("app/README", b"hello")]),
]


@pytest.fixture(autouse=True)
def platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """The images here are for linux/amd64, whatever machine runs the tests."""
    monkeypatch.setattr(gobuild, "go_platform", lambda: "linux/amd64")


def pull(reference: str, tmp_path: Path, arch: str = "amd64") -> oci.PulledProgram:
    into = tmp_path / "pulled"
    into.mkdir()
    return oci.pull_program(oci.parse_reference(reference), arch, into)


@pytest.mark.parametrize("index", [True, False])
def test_takes_the_entrypoint_out_of_an_image(registry: FakeRegistry, tmp_path: Path, index: bool) -> None:
    image = make_image(LAYERS, index=index)
    pulled = pull(registry.add(image), tmp_path)
    assert pulled.path.read_bytes() == PROGRAM
    assert os.access(pulled.path, os.X_OK)
    assert (pulled.entrypoint, pulled.manifest_digest) == ("/app/epp", image.manifest)
    assert [entry.name for entry in pulled.path.parent.iterdir()] == ["epp"], "layers are not left behind"


def test_plain_tar_layers_and_docker_media_types(registry: FakeRegistry, tmp_path: Path) -> None:
    layers = [tar_of([("app/epp", PROGRAM)], packed=False)]
    image = make_image(layers, layer_type="application/vnd.docker.image.rootfs.diff.tar")
    assert pull(registry.add(image), tmp_path).path.read_bytes() == PROGRAM


def test_arm64_is_taken_from_the_index_by_platform(registry: FakeRegistry, tmp_path: Path) -> None:
    image = make_image([tar_of([("app/epp", elf(machine=183))])], arch="arm64")
    assert pull(registry.add(image), tmp_path, arch="arm64").path.read_bytes() == elf(machine=183)


# --- references ---


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("registry.example/team/router:v1", "no digest"),
        ("registry.example/team/router", "no digest"),
        ("registry.example/team/router@sha256:abc", "not a SHA-256 digest"),
        ("registry.example/team/router@md5:" + "0" * 64, "not a SHA-256 digest"),
        ("team/router@sha256:" + "0" * 64, "not an image reference with a registry host"),
        ("https://registry.example/team/router@sha256:" + "0" * 64, "not an image reference"),
        ("registry.example/../../x@sha256:" + "0" * 64, "not an image reference"),
        ("", "not an image reference"),
    ],
)
def test_only_references_by_digest_are_taken(text: str, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint) as error:
        oci.parse_reference(text)
    assert error.value.remedy.startswith("give it as HOST/REPOSITORY@sha256:")


def test_a_reference_keeps_its_parts() -> None:
    text = "registry.example:5000/llm-d/router:v1.2@sha256:" + "a" * 64
    reference = oci.parse_reference(text)
    assert (reference.host, reference.repository, reference.tag) == (
        "registry.example:5000",
        "llm-d/router",
        "v1.2",
    )
    assert str(reference) == text


def test_other_hosts_are_only_asked_over_https(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[httpx.URL] = []

    def refuse(request: httpx.Request) -> httpx.Response:
        asked.append(request.url)
        return httpx.Response(404)

    real = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **given: real(transport=httpx.MockTransport(refuse), **given))
    with pytest.raises(ComponentError, match="has no manifest"):
        pull("registry.example/team/router@sha256:" + "0" * 64, tmp_path)
    assert [str(url) for url in asked] == ["https://registry.example/v2/team/router/manifests/sha256:" + "0" * 64]


# --- faults ---


@pytest.mark.parametrize("victim", ["index", "manifest", "config", "layer"])
def test_content_that_is_not_what_its_digest_says_is_refused(registry: FakeRegistry, cache: Path, victim: str) -> None:
    image = make_image(LAYERS)
    digest = {
        "index": image.digest,
        "manifest": image.manifest,
        "config": image.config,
        "layer": image.layers[1],
    }[victim]
    right = image.blobs.get(digest) or image.manifests[digest][1]
    # One byte off, the length kept: nothing but the checksum can tell.
    registry.faults[digest] = other(bytes([right[0] ^ 1]) + right[1:])
    with pytest.raises(ComponentError, match="asked for was sha256:") as error:
        binaries.obtain("v9", image=registry.add(image))
    assert digest in str(error.value)
    assert registry.asked(digest) == 1, "a wrong digest is no passing trouble"
    assert_nothing_kept(cache)


def test_a_cut_download_is_tried_again(registry: FakeRegistry, tmp_path: Path) -> None:
    image = make_image(LAYERS)
    registry.faults[image.layers[1]] = cut(2)
    assert pull(registry.add(image), tmp_path).path.read_bytes() == PROGRAM
    assert registry.asked(image.layers[1]) == 3


def test_a_download_that_is_always_cut_leaves_nothing(registry: FakeRegistry, cache: Path) -> None:
    image = make_image(LAYERS)
    registry.faults[image.layers[1]] = cut(99)
    with pytest.raises(ComponentError, match="3 attempts") as error:
        binaries.obtain("v9", image=registry.add(image))
    assert "give the router's program itself by path" in error.value.kept
    assert registry.asked(image.layers[1]) == 3
    assert_nothing_kept(cache)


@pytest.mark.parametrize("code", [429, 500, 503])
def test_a_busy_registry_is_asked_again(registry: FakeRegistry, tmp_path: Path, code: int) -> None:
    image = make_image(LAYERS)
    registry.faults[image.layers[0]] = status(code, times=2)
    registry.faults[image.digest] = status(code, times=1)
    assert pull(registry.add(image), tmp_path).path.read_bytes() == PROGRAM


def test_a_short_blob_without_announced_length_is_noticed(registry: FakeRegistry, cache: Path) -> None:
    image = make_image(LAYERS)
    registry.faults[image.layers[1]] = other(LAYERS[1][:-10])
    with pytest.raises(ComponentError, match=r"ended after [\d,]+ of [\d,]+ bytes"):
        binaries.obtain("v9", image=registry.add(image))
    assert_nothing_kept(cache)


def test_a_blob_longer_than_its_manifest_says_is_stopped(registry: FakeRegistry, cache: Path) -> None:
    image = make_image(LAYERS, sizes={1: 100})
    with pytest.raises(ComponentError, match="longer than the 100 bytes"):
        binaries.obtain("v9", image=registry.add(image))
    assert_nothing_kept(cache)


@pytest.mark.parametrize("victim", ["index", "manifest", "config", "layer"])
def test_missing_parts_are_named(registry: FakeRegistry, cache: Path, victim: str) -> None:
    image = make_image(LAYERS)
    reference = registry.add(image)
    digest = {
        "index": image.digest,
        "manifest": image.manifest,
        "config": image.config,
        "layer": image.layers[0],
    }[victim]
    registry.blobs.pop(digest, None)
    registry.manifests.pop(digest, None)
    kind = "manifest" if victim in ("index", "manifest") else "blob"
    with pytest.raises(ComponentError, match=f"has no {kind} {digest}"):
        binaries.obtain("v9", image=reference)
    assert_nothing_kept(cache)


def test_no_registry_there(tmp_path: Path) -> None:
    with FakeRegistry() as gone:
        host = gone.host
    with pytest.raises(ComponentError, match="could not be read") as error:
        pull(f"{host}/{REPOSITORY}@sha256:{'0' * 64}", tmp_path)
    assert "Check the network" in error.value.kept


def test_the_platforms_on_offer_are_named(registry: FakeRegistry, tmp_path: Path) -> None:
    with pytest.raises(ComponentError, match=r"no linux/arm64; it has unknown/unknown, linux/amd64"):
        pull(registry.add(make_image(LAYERS)), tmp_path, arch="arm64")


def test_a_single_manifest_of_another_platform_is_refused(registry: FakeRegistry, tmp_path: Path) -> None:
    with pytest.raises(ComponentError, match="for linux/amd64, this machine needs linux/arm64"):
        pull(registry.add(make_image(LAYERS, index=False)), tmp_path, arch="arm64")


def test_an_entrypoint_that_is_no_program_for_this_machine(registry: FakeRegistry, tmp_path: Path) -> None:
    image = make_image([tar_of([("app/epp", b"#!/bin/sh\nexec true\n")])])
    with pytest.raises(ComponentError, match="app/epp is not a linux/amd64 program"):
        pull(registry.add(image), tmp_path)


def test_zstd_layers_are_refused_in_words(registry: FakeRegistry, tmp_path: Path) -> None:
    image = make_image(LAYERS, layer_type="application/vnd.oci.image.layer.v1.tar+zstd")
    with pytest.raises(ComponentError, match="zstd-compressed"):
        pull(registry.add(image), tmp_path)


def test_a_layer_that_is_no_archive(registry: FakeRegistry, tmp_path: Path) -> None:
    with pytest.raises(ComponentError, match="not a readable tar archive"):
        pull(registry.add(make_image([b"this is not a tar file" * 100])), tmp_path)


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        (b"not json", "is not JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "describes its config"),
        (json.dumps({"config": {"digest": "sha256:zz", "size": 1}}).encode(), "describes its config"),
        (
            json.dumps({"config": {"digest": "sha256:" + "0" * 64, "size": -1}}).encode(),
            "describes its config",
        ),
        (json.dumps({"config": {"digest": "sha256:" + "0" * 64, "size": 1 << 40}}).encode(), "more than the"),
        (json.dumps({"mediaType": OCI_INDEX, "manifests": []}).encode(), "it has nothing"),
        (json.dumps({"mediaType": OCI_INDEX, "manifests": ["x"]}).encode(), "no linux/amd64"),
    ],
)
def test_strange_manifests(registry: FakeRegistry, tmp_path: Path, document: bytes, complaint: str) -> None:
    registry.manifests[digest_of(document)] = (OCI_LAYER, document)
    with pytest.raises(ComponentError, match=complaint):
        pull(f"{registry.host}/{REPOSITORY}@{digest_of(document)}", tmp_path)


def test_an_endless_manifest_is_stopped(registry: FakeRegistry, tmp_path: Path) -> None:
    document = b" " * (oci.MAX_DOCUMENT_BYTES + 1)
    registry.manifests[digest_of(document)] = (OCI_LAYER, document)
    with pytest.raises(ComponentError, match="longer than"):
        pull(f"{registry.host}/{REPOSITORY}@{digest_of(document)}", tmp_path)


# --- tokens ---


def test_an_anonymous_token_is_fetched_once_and_used(registry: FakeRegistry, tmp_path: Path) -> None:
    registry.require_token()
    assert pull(registry.add(make_image(LAYERS)), tmp_path).path.read_bytes() == PROGRAM
    tokens = [path for path, _ in registry.requests if path.startswith("/token")]
    # The scope is our own: this repository, pulling, whatever the registry would like us to ask for.
    assert tokens == ["/token?service=fake&scope=repository%3Ateam%2Frouter%3Apull"]
    assert [auth for path, auth in registry.requests if not path.startswith("/token")][1:] == ["Bearer pull-me"] * 5


def test_a_token_does_not_follow_a_redirect_to_another_host(registry: FakeRegistry, tmp_path: Path) -> None:
    registry.require_token()
    with FakeRegistry("127.0.0.2") as store:
        image = make_image(LAYERS)
        store.add(image)
        registry.redirect_blobs_to = store.host
        assert pull(registry.add(image), tmp_path).path.read_bytes() == PROGRAM
        assert [auth for _, auth in store.requests] == [None] * 3


@pytest.mark.parametrize(
    "challenge",
    ['Basic realm="registry"', 'Bearer realm="file:///etc/passwd"', "Bearer", 'Bearer service="x"'],
)
def test_logins_that_are_not_supported(registry: FakeRegistry, tmp_path: Path, challenge: str) -> None:
    registry.challenge = challenge
    with pytest.raises(ComponentError, match="asks for a login that is not supported"):
        pull(registry.add(make_image(LAYERS)), tmp_path)


def test_no_token_for_us(registry: FakeRegistry, tmp_path: Path) -> None:
    registry.require_token()
    registry.token_status = 403
    with pytest.raises(ComponentError, match="gives no anonymous pull token"):
        pull(registry.add(make_image(LAYERS)), tmp_path)


def test_a_token_that_is_not_accepted_ends_the_matter(registry: FakeRegistry, tmp_path: Path) -> None:
    registry.require_token()
    reference = registry.add(make_image(LAYERS))
    with FakeRegistry() as giver:
        giver.token = "for somebody else"
        registry.challenge = f'Bearer realm="http://{giver.host}/token",service="fake"'
        with pytest.raises(ComponentError, match=r"refuses access \(HTTP 401\); only public images are read"):
            pull(reference, tmp_path)


# --- through the cache ---


def test_an_image_is_pulled_once(registry: FakeRegistry, cache: Path) -> None:
    image = make_image(LAYERS)
    reference = registry.add(image)
    lines: list[str] = []
    first = binaries.obtain("v9", lines.append, image=reference)
    assert (first.how, first.source, first.unmodified) == ("image", reference, None)
    assert f"sha256:{first.sha256}" == digest_of(PROGRAM)
    assert image.manifest in first.note and "the user's word" in first.note
    assert any("checksum verified" in line for line in lines)
    asked = len(registry.requests)
    assert binaries.obtain("v9", image=reference) == first
    assert binaries.find("v9", image=reference) == first
    assert len(registry.requests) == asked


def test_a_damaged_cache_entry_is_pulled_anew(registry: FakeRegistry, cache: Path) -> None:
    reference = registry.add(make_image(LAYERS))
    first = binaries.obtain("v9", image=reference)
    first.path.write_bytes(b"damaged")
    assert binaries.find("v9", image=reference) is None
    assert binaries.obtain("v9", image=reference) == first
    assert first.path.read_bytes() == PROGRAM


def assert_nothing_kept(cache: Path) -> None:
    left = [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert left == []
