"""The registry client against a real registry: Debian's docker-registry (the distribution project), as a
child process.

Skipped where that program is not installed (apt-get install docker-registry); test_oci.py covers the rest
everywhere.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from harness.errors import ComponentError
from harness.router import binaries, gobuild, oci

from .images import OCI_MANIFEST, Image, digest_of, elf, folder, link, make_image, tar_of

SERVER = shutil.which("docker-registry")
pytestmark = pytest.mark.skipif(SERVER is None, reason="docker-registry is not installed")

REPOSITORY = "team/router"
PROGRAM = elf(body=bytes(range(256)) * 500)
HTPASSWD = "user:$2y$05$0J6dZ1Q5c1m0m6x1ZyYwXuY2m8vJ1dJr0o1mT9c1r8i1rXv4k0u1a\n"
"""Syntactically right; nobody logs in with it."""


@dataclass
class RealRegistry:
    host: str
    storage: Path

    def push(self, image: Image) -> str:
        """Upload all parts as any client does; returns the reference by digest."""
        with httpx.Client(base_url=f"http://{self.host}", trust_env=False) as http:
            for digest, blob in image.blobs.items():
                start = http.post(f"/v2/{REPOSITORY}/blobs/uploads/")
                assert start.status_code == 202, start.text
                done = http.put(
                    httpx.URL(start.headers["Location"]).copy_merge_params({"digest": digest}),
                    content=blob,
                    headers={"Content-Type": "application/octet-stream"},
                )
                assert done.status_code == 201, done.text
            # The image manifest first: the registry refuses an index whose manifests it does not have.
            for digest, (media_type, body) in sorted(image.manifests.items(), key=lambda m: m[1][0] != OCI_MANIFEST):
                done = http.put(
                    f"/v2/{REPOSITORY}/manifests/{digest}", content=body, headers={"Content-Type": media_type}
                )
                assert done.status_code == 201, done.text
        return f"{self.host}/{REPOSITORY}@{image.digest}"

    def file_of(self, digest: str) -> Path:
        """Where the registry keeps an object on disk."""
        value = digest.partition(":")[2]
        return self.storage / "docker/registry/v2/blobs/sha256" / value[:2] / value / "data"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def run_registry(folder: Path, extra: str = "") -> Iterator[RealRegistry]:
    host = f"127.0.0.1:{free_port()}"
    storage = folder / "storage"
    config = folder / "config.yml"
    config.write_text(
        "version: 0.1\n"
        "log: {level: error}\n"
        # No cache of what is in the storage, since tests damage it.
        f"storage: {{filesystem: {{rootdirectory: {storage}}}}}\n"
        f"http: {{addr: '{host}', relativeurls: true}}\n" + extra
    )
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([str(SERVER), "serve", str(config)], stdout=log, stderr=log)
        try:
            deadline_s = time.monotonic() + 20
            while True:
                try:
                    httpx.get(f"http://{host}/v2/", trust_env=False)
                    break
                except httpx.TransportError:
                    assert process.poll() is None, (folder / "log").read_text()
                    assert time.monotonic() < deadline_s, "the registry does not answer"
                    time.sleep(0.05)
            yield RealRegistry(host, storage)
        finally:
            process.terminate()
            process.wait(timeout=10)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRegistry]:
    with run_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture(autouse=True)
def platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gobuild, "go_platform", lambda: "linux/amd64")


def image_of(mark: str, index: bool = True) -> Image:
    """Three layers: the upper ones replace, hide and bring back what is below. `mark` keeps blobs of tests
    apart.
    """
    program = PROGRAM + mark.encode()
    return make_image(
        [
            tar_of([folder("app"), ("app/epp", elf(body=b"old")), ("etc/os-release", mark.encode())]),
            tar_of([("app/.wh..wh..opq", b""), folder("app/v2"), ("app/v2/epp", program)]),
            tar_of([link("app/epp", "v2/epp"), ("etc/.wh.os-release", b"")]),
        ],
        index=index,
    )


@pytest.mark.parametrize("index", [True, False])
def test_pull_by_digest(server: RealRegistry, index: bool) -> None:
    reference = server.push(image_of("pull", index=index))
    binary = binaries.obtain("v9", image=reference)
    assert binary.path.read_bytes() == PROGRAM + b"pull"
    assert f"sha256:{binary.sha256}" == digest_of(PROGRAM + b"pull")
    assert (binary.how, binary.source, binary.unmodified) == ("image", reference, None)
    assert "entrypoint /app/v2/epp" in binary.note


@pytest.mark.parametrize("damage", ["other content", "cut", "missing"])
def test_damaged_storage(server: RealRegistry, cache: Path, damage: str) -> None:
    image = image_of(damage)
    reference = server.push(image)
    victim = server.file_of(image.layers[1])
    content = victim.read_bytes()
    if damage == "other content":
        victim.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        complaint = f"asked for was {image.layers[1]}; nothing was kept"
    elif damage == "cut":
        victim.write_bytes(content[: len(content) // 2])
        complaint = "could not be read"
    else:
        victim.unlink()
        complaint = f"has no blob {image.layers[1]}"
    with pytest.raises(ComponentError, match=complaint):
        binaries.obtain("v9", image=reference)
    assert [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"] == []
    victim.write_bytes(content)
    assert binaries.obtain("v9", image=reference).path.read_bytes() == PROGRAM + damage.encode()


def test_unknown_digest(server: RealRegistry, tmp_path: Path) -> None:
    reference = oci.parse_reference(f"{server.host}/{REPOSITORY}@sha256:{'0' * 64}")
    with pytest.raises(ComponentError, match="has no manifest sha256:0000"):
        oci.pull_program(reference, "amd64", tmp_path)


def test_a_registry_that_wants_a_password(tmp_path: Path) -> None:
    (tmp_path / "htpasswd").write_text(HTPASSWD)
    auth = f"auth: {{htpasswd: {{realm: here, path: {tmp_path / 'htpasswd'}}}}}\n"
    with run_registry(tmp_path, auth) as closed:
        reference = oci.parse_reference(f"{closed.host}/{REPOSITORY}@sha256:{'0' * 64}")
        with pytest.raises(ComponentError, match="asks for a login that is not supported"):
            oci.pull_program(reference, "amd64", tmp_path)
