"""Layers are merged as an unpacking container engine would merge them, and nothing but the program is ever
written.
"""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import ComponentError
from harness.router.image_layers import extract_program, merge

from .images import elf, folder, link, tar_of

Layer = dict[str, bytes | None]
"""Path -> content of a file, None for a folder; a last part `.wh.*` is a whiteout."""


def written(tmp_path: Path, *layers: bytes) -> list[tuple[Path, str]]:
    paths = []
    for number, layer in enumerate(layers):
        path = tmp_path / f"in-{number}"
        path.write_bytes(layer)
        paths.append((path, "application/vnd.oci.image.layer.v1.tar+gzip"))
    return paths


def extract(tmp_path: Path, *layers: bytes, **config: object) -> bytes:
    out = tmp_path / "out"
    given_config = {"Entrypoint": ["/app/epp"]} | config
    extract_program(written(tmp_path, *layers), given_config, "amd64", out, "test")
    return out.read_bytes()


NEW, OLD = elf(body=b"new"), elf(body=b"old")


def test_the_upper_layer_wins(tmp_path: Path) -> None:
    assert extract(tmp_path, tar_of([("app/epp", OLD)]), tar_of([("./app/epp", NEW)])) == NEW


@pytest.mark.parametrize("whiteout", ["app/.wh.epp", "app/.wh..wh..opq", ".wh.app", ".wh..wh..opq", "./app/.wh.epp"])
def test_what_a_whiteout_hides_is_gone(tmp_path: Path, whiteout: str) -> None:
    with pytest.raises(ComponentError, match="is not in its layers"):
        extract(tmp_path, tar_of([("app/epp", OLD)]), tar_of([(whiteout, b"")]))


@pytest.mark.parametrize("whiteout", ["app/.wh.epp", "app/.wh..wh..opq"])
@pytest.mark.parametrize("first", [True, False])
def test_a_whiteout_does_not_hide_its_own_layer(tmp_path: Path, whiteout: str, first: bool) -> None:
    members: list[tarfile.TarInfo | tuple[str, bytes]] = [(whiteout, b""), ("app/epp", NEW)]
    upper = tar_of(members if first else members[::-1])
    assert extract(tmp_path, tar_of([("app/epp", OLD)]), upper) == NEW


@pytest.mark.parametrize(
    "members",
    [
        [link("app/epp", "/opt/router/epp"), ("opt/router/epp", NEW)],
        [link("app/epp", "../opt/epp"), ("opt/epp", NEW)],
        [link("app", "opt/v1"), ("opt/v1/epp", NEW)],
        [link("app/epp", "one"), link("app/one", "/app/two"), ("app/two", NEW)],
        [link("app/epp", "../../../../opt/epp"), ("opt/epp", NEW)],
        [("opt/epp", NEW), link("app/epp", "opt/epp", tarfile.LNKTYPE)],
    ],
)
def test_links_are_followed_inside_the_image(
    tmp_path: Path, members: list[tarfile.TarInfo | tuple[str, bytes]]
) -> None:
    assert extract(tmp_path, tar_of(members)) == NEW


def test_a_link_across_layers(tmp_path: Path) -> None:
    assert extract(tmp_path, tar_of([("opt/epp", NEW)]), tar_of([link("app", "opt")])) == NEW


@pytest.mark.parametrize(
    "members",
    [
        [link("app/epp", "epp")],
        [link("app/epp", "/app/two"), link("app/two", "/app/epp")],
        [link("app/epp", "/no/such/file")],
        [folder("app/epp")],
    ],
)
def test_links_that_lead_nowhere(tmp_path: Path, members: list[tarfile.TarInfo | tuple[str, bytes]]) -> None:
    with pytest.raises(ComponentError, match="is not in its layers"):
        extract(tmp_path, tar_of(members))


def test_a_link_never_reads_this_machine(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(elf(body=b"secret"))
    with pytest.raises(ComponentError, match="is not in its layers"):
        extract(tmp_path, tar_of([link("app/epp", str(secret))]))


def test_names_that_climb_out_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    layer = tar_of([("../escaped", NEW), ("app/../../escaped", NEW), ("/app/epp", NEW)])
    assert extract(tmp_path / "work", layer) == NEW
    assert not list(tmp_path.rglob("escaped"))


@pytest.mark.parametrize(
    ("config", "place"),
    [
        ({"Entrypoint": ["epp", "--flag"], "Env": ["PATH=/nowhere:/opt/bin"]}, "opt/bin/epp"),
        ({"Entrypoint": ["epp"]}, "usr/bin/epp"),
        ({"Entrypoint": None, "Cmd": ["/app/epp"]}, "app/epp"),
        ({"Entrypoint": ["./epp"], "WorkingDir": "/srv/x"}, "srv/x/epp"),
    ],
)
def test_the_entrypoint_is_found_as_an_engine_finds_it(tmp_path: Path, config: dict[str, object], place: str) -> None:
    assert extract(tmp_path, tar_of([(place, NEW)]), **config) == NEW


@pytest.mark.parametrize("entrypoint", [None, [], [""], "epp", [3]])
def test_no_usable_entrypoint(tmp_path: Path, entrypoint: object) -> None:
    with pytest.raises(ComponentError, match="names no entrypoint"):
        extract(tmp_path, tar_of([("app/epp", NEW)]), Entrypoint=entrypoint)


def test_an_archive_that_ends_in_the_program(tmp_path: Path) -> None:
    whole = tar_of([("app/epp", elf(body=bytes(5000)))], packed=False)
    with pytest.raises(ComponentError, match=r"not a readable tar archive|ends early"):
        extract(tmp_path, whole[:3000])


# --- against a real file system ---

_NAME = st.sampled_from(["a", "b", "c"])
_PATH = st.lists(_NAME, min_size=1, max_size=3).map("/".join)


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    """A layer as engines write them: each folder on the way to an entry has an entry of its own."""
    layer: Layer = {}
    for path in draw(st.lists(_PATH, max_size=5, unique=True)):
        parents = [str(p) for p in PurePosixPath(path).parents][:-1]
        taken = any(layer.get(parent, None) is not None for parent in parents) or path in layer
        if taken:
            continue
        for parent in reversed(parents):
            layer[parent] = None
        mark = draw(st.sampled_from(["file", "folder", "whiteout", "opaque"]))
        if mark == "file":
            layer[path] = draw(st.binary(max_size=3))
        elif mark == "folder":
            layer[path] = None
        elif mark == "whiteout":
            layer[str(PurePosixPath(path).with_name(".wh." + PurePosixPath(path).name))] = b""
        else:
            layer[path] = None
            layer[f"{path}/.wh..wh..opq"] = b""
    return layer


def unpack(root: Path, layer: Layer) -> None:
    """What a container engine does with a layer, on a real folder: first the whiteouts, then the entries."""
    for path in layer:
        place = root / path
        if place.name == ".wh..wh..opq" and place.parent.is_dir():
            shutil.rmtree(place.parent)
            place.parent.mkdir()
        elif place.name.startswith(".wh."):
            target = place.with_name(place.name[4:])
            if target.is_dir():
                shutil.rmtree(target)
            elif target.parent.is_dir():
                target.unlink(missing_ok=True)
    for path, content in layer.items():
        place = root / path
        if place.name.startswith(".wh."):
            continue
        if content is None:
            if place.is_file():
                place.unlink()
            place.mkdir(exist_ok=True)
        else:
            if place.is_dir():
                shutil.rmtree(place)
            place.write_bytes(content)


@settings(max_examples=300, deadline=None)
@given(st.lists(layers(), min_size=1, max_size=4))
def test_merging_equals_unpacking(stack: list[Layer]) -> None:
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        root = work / "root"
        root.mkdir()
        archives = []
        for number, layer in enumerate(stack):
            unpack(root, layer)
            members = [folder(path) if content is None else (path, content) for path, content in layer.items()]
            archives.append(work / f"layer-{number}")
            archives[-1].write_bytes(tar_of(members, packed=False))
        expected = {
            str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in root.rglob("*")
        }
        got: Layer = {}
        for path, node in merge(archives).items():
            with tarfile.open(archives[node.layer]) as archive:
                source = archive.extractfile(node.info)
                got[str(path)] = source.read() if source else None
        assert got == expected
