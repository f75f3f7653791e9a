"""Which program is taken, and what is said of its origin."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from harness.errors import ComponentError, InputError
from harness.router import binaries, gobuild
from harness.router.binaries import find, obtain
from harness.router.oci import parse_reference
from harness.router.releases import Release, Releases, load_releases, variable_of

from .fake_registry import FakeRegistry
from .images import elf, go_program, make_image, tar_of

OLD = "github.com/llm-d/llm-d-inference-scheduler"
NEW = "github.com/llm-d/llm-d-router"
KNOWN = load_releases()
COMMIT = KNOWN.known["v0.10.0"].commit


def pinned() -> str:
    build = KNOWN.known["v0.7.1"].module
    assert build is not None
    return gobuild.pinned_sum(build)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return executable(tmp_path / "epp", elf())


def executable(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gobuild, "go_platform", lambda: "linux/amd64")


# --- the shipped list ---


def test_the_shipped_releases() -> None:
    old, new = KNOWN.known["v0.7.1"], KNOWN.known["v0.10.0"]
    assert old.module is not None and (old.module.module, old.module.version) == (OLD, "v0.7.1")
    assert "unmodified source" in old.module.note and "not its released dependency set" in old.module.note
    assert (old.module.directory / "go.sum").is_file()
    assert new.module is None
    assert new.image is not None and str(new.image).startswith(f"{new.image_name}:v0.10.0@sha256:")
    assert re.fullmatch("[0-9a-f]{40}", new.commit)
    assert KNOWN.go_wheel.sha256 and all(re.fullmatch("[0-9a-f]{64}", value) for value in KNOWN.go_wheel.sha256)


def test_no_download_without_a_digest() -> None:
    """A release whose digest nobody pinned has no image way of its own."""
    assert all(release.image is None or release.image.digest for release in KNOWN.known.values())
    assert KNOWN.known["v0.7.1"].image is None and KNOWN.known["v0.7.1"].image_name


@pytest.mark.parametrize("text", ["releases: [", "releases: {}", "just text", "releases: {v1: 3}\ngo_wheel: {}"])
def test_a_broken_list_is_bad_input(tmp_path: Path, text: str) -> None:
    (tmp_path / "releases.yaml").write_text(text)
    with pytest.raises(InputError, match="is not a list of releases"):
        load_releases(tmp_path)


def test_a_missing_list_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="full checkout"):
        load_releases(tmp_path)


# --- where it is looked for ---


def test_variables_of_releases() -> None:
    assert [variable_of(name) for name in ("v0.7.1", "v0.10.0")] == [
        "HARNESS_ROUTER_V071",
        "HARNESS_ROUTER_V0100",
    ]


def test_nothing_at_hand() -> None:
    assert find("v0.7.1") is None and find("v0.10.0") is None and find("v77") is None


def test_a_given_path_goes_first(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specific = executable(tmp_path / "specific", elf(body=b"specific"))
    general = executable(tmp_path / "general", elf(body=b"general"))
    monkeypatch.setenv("HARNESS_ROUTER_BINARY", str(general))
    found = find("v0.10.0")
    assert found is not None and found.path == general
    monkeypatch.setenv("HARNESS_ROUTER_V0100", str(specific))
    found = find("v0.10.0")
    assert found is not None and found.path == specific
    found = find("v0.10.0", path=program)
    assert found is not None and found.path == program
    assert (found.how, found.release, found.source) == ("path", "v0.10.0", str(program))
    assert found.sha256 == hashlib.sha256(program.read_bytes()).hexdigest()
    other = find("v0.7.1")
    assert other is not None and other.path == general, "the specific variable is of its release alone"


def test_a_relative_path_is_made_absolute(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(program.parent)
    found = find("v1", path="epp")
    assert found is not None and found.path == program


def test_bad_paths(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"^router\.binary: there is no file .*/none; give the path"):
        find("v0.7.1", path=tmp_path / "none")
    with pytest.raises(InputError, match="there is no file"):
        find("v0.7.1", path=tmp_path)
    program.chmod(0o644)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may execute anything
    monkeypatch.setenv("HARNESS_ROUTER_V071", str(program))
    with pytest.raises(InputError, match=r"^HARNESS_ROUTER_V071: .* is not executable; chmod \+x"):
        find("v0.7.1")


# --- what is known of a program that the user brings ---


def judged(tmp_path: Path, release: str, content: bytes) -> tuple[bool | None, str]:
    found = find(release, path=executable(tmp_path / "brought", content))
    assert found is not None
    return found.unmodified, found.note


def test_a_program_without_build_information(tmp_path: Path) -> None:
    unmodified, note = judged(tmp_path, "v0.10.0", elf())
    assert unmodified is None and "could not be checked" in note


def test_the_published_module_is_known_by_its_checksum(tmp_path: Path) -> None:
    kv_cache = [("github.com/llm-d/llm-d-kv-cache", "v0.9.0", "h1:x=")]
    unmodified, note = judged(tmp_path, "v0.7.1", go_program((OLD, "v0.7.1", pinned()), kv_cache))
    assert unmodified is True and "llm-d-kv-cache in it is v0.9.0" in note
    unmodified, _ = judged(tmp_path, "v0.7.1", go_program((OLD, "v0.7.1", "h1:changed=")))
    assert unmodified is None


def test_the_release_commit_is_known(tmp_path: Path) -> None:
    def built(revision: str, modified: str) -> bytes:
        return go_program((NEW, "(devel)", ""), settings={"vcs.revision": revision, "vcs.modified": modified})

    assert judged(tmp_path, "v0.10.0", built(COMMIT, "false"))[0] is True
    assert judged(tmp_path, "v0.10.0", built(COMMIT, "true"))[0] is False
    unmodified, note = judged(tmp_path, "v0.10.0", built("f" * 40, "false"))
    assert unmodified is None and "commit " + "f" * 40 in note


def test_a_replaced_dependency_is_no_release(tmp_path: Path) -> None:
    content = go_program(
        (NEW, "(devel)", ""),
        [("example.org/dep", "v1.0.0", "h1:x=")],
        {"vcs.revision": COMMIT, "vcs.modified": "false"},
        replaced="example.org/dep",
    )
    assert judged(tmp_path, "v0.10.0", content)[0] is None


def test_an_image_build_tells_its_commit(tmp_path: Path) -> None:
    flags = f'"-s -w -X {NEW}/version.CommitSHA={COMMIT} -X {NEW}/version.BuildRef=v0.10.0"'
    unmodified, note = judged(tmp_path, "v0.10.0", go_program((NEW, "(devel)", ""), settings={"-ldflags": flags}))
    assert unmodified is None and f"commit {COMMIT}" in note, "a flag is a claim, not a check"


def test_another_release_than_asked_for(tmp_path: Path) -> None:
    path = executable(tmp_path / "brought", go_program((OLD, "v0.7.1", pinned())))
    with pytest.raises(
        InputError, match=r"says that it is .* v0\.7\.1, not v0\.10\.0; set router\.release to v0\.7\.1"
    ):
        find("v0.10.0", path=path)


# --- obtaining ---


def some_release(registry: FakeRegistry, digest: str | None = None) -> Releases:
    image = make_image([tar_of([("app/epp", elf())])])
    reference = parse_reference(registry.add(image))
    reference = replace(reference, digest=digest) if digest else reference
    return Releases({"v5": Release("v5", reference, reference.name)}, KNOWN.go_wheel)


def test_what_is_at_hand_is_not_fetched(registry: FakeRegistry, program: Path) -> None:
    assert obtain("v5", path=program, releases=some_release(registry)).path == program
    assert registry.requests == []


def test_the_pinned_image_is_pulled(registry: FakeRegistry) -> None:
    binary = obtain("v5", releases=some_release(registry))
    assert (binary.how, binary.unmodified, binary.path.read_bytes()) == ("image", True, elf())
    assert find("v5", releases=some_release(registry)) == binary


def test_a_pinned_image_of_another_commit_is_refused(registry: FakeRegistry, cache: Path) -> None:
    """A digest that was written down for the wrong release."""
    flags = f'"-X {NEW}/version.CommitSHA={COMMIT}"'
    content = go_program((NEW, "(devel)", ""), settings={"-ldflags": flags})
    reference = parse_reference(registry.add(make_image([tar_of([("app/epp", content)])])))
    right, wrong = Release("v5", reference, commit=COMMIT), Release("v5", reference, commit="f" * 40)
    with pytest.raises(ComponentError, match="could not be obtained") as error:
        obtain("v5", releases=Releases({"v5": wrong}, KNOWN.go_wheel))
    assert f"the program in it says commit {COMMIT}, the release v5 is fff" in error.value.kept
    assert list(cache.rglob("epp")) == []
    by_tag = Release("v7", reference, commit="f" * 40, tag_object=COMMIT)
    assert obtain("v7", releases=Releases({"v7": by_tag}, KNOWN.go_wheel)).unmodified is True
    shutil.rmtree(cache)
    binary = obtain("v5", releases=Releases({"v5": right}, KNOWN.go_wheel))
    assert binary.unmodified is True and f"the program says commit {COMMIT}" in binary.note
    # The same image under a name of the user's: nobody can say of which release it is.
    own = obtain("v6", image=str(reference))
    assert (own.path, own.release, own.unmodified) == (binary.path, "v6", None)
    assert "the user's word" in own.note


def test_the_module_is_built_when_the_image_cannot_be_had(
    registry: FakeRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases = some_release(registry, digest="sha256:" + "0" * 64)
    built = binaries.RouterBinary(tmp_path, "v5", "0", "module", "source", True)
    monkeypatch.setattr(binaries, "_from_module", lambda *given: built)
    with_module = Releases({"v5": replace(releases.known["v5"], module=KNOWN.known["v0.7.1"].module)}, KNOWN.go_wheel)
    lines: list[str] = []
    assert obtain("v5", lines.append, releases=with_module) is built
    assert any("has no manifest" in line for line in lines), "said, not hidden"


def test_an_image_of_the_user_is_used_or_fails(registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "_from_module", lambda *given: pytest.fail("another way was tried"))
    with pytest.raises(ComponentError, match="has no manifest"):
        obtain("v0.7.1", image=f"{registry.host}/team/router@sha256:{'0' * 64}")


def test_every_way_that_failed_is_named(registry: FakeRegistry) -> None:
    releases = some_release(registry, digest="sha256:" + "0" * 64)
    with pytest.raises(ComponentError, match="router v5: could not be obtained") as error:
        obtain("v5", releases=releases)
    assert error.value.exit_code == 3
    for part in ("has no manifest sha256:000", "router.binary", "HARNESS_ROUTER_V5", "--image"):
        assert part in error.value.kept


def test_a_release_without_digest_or_module(registry: FakeRegistry) -> None:
    releases = Releases({"v5": Release("v5", None, f"{registry.host}/team/router")}, KNOWN.go_wheel)
    with pytest.raises(ComponentError, match="nothing is downloaded without one") as error:
        obtain("v5", releases=releases)
    assert f"--image {registry.host}/team/router@sha256:..." in error.value.kept
    assert registry.requests == []


def test_an_unknown_release() -> None:
    with pytest.raises(
        ComponentError, match=r"none of the releases that the harness can fetch \(v0\.7\.1, v0\.10\.0\)"
    ):
        obtain("v77")


def test_images_hold_linux_programs(registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gobuild, "go_platform", lambda: "darwin/arm64")
    with pytest.raises(ComponentError, match="images hold Linux programs"):
        obtain("v5", releases=some_release(registry))
    assert registry.requests == []


def test_a_cache_that_cannot_be_written(registry: FakeRegistry, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(ComponentError, match=r"the cache .* cannot be written"):
        obtain("v5", releases=some_release(registry))


def test_a_record_of_the_cache_that_is_broken_counts_as_absent(registry: FakeRegistry) -> None:
    releases = some_release(registry)
    binary = obtain("v5", releases=releases)
    for text in ("", "{", "[]", '{"release": "v5"}'):
        (binary.path.parent / binaries.ORIGIN).write_text(text)
        assert find("v5", releases=releases) is None
    assert obtain("v5", releases=releases) == binary
