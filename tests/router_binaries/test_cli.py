"""`harness router ...`: results on standard output, progress on standard error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.errors import ComponentError, InputError
from harness.router import gobuild
from harness.router.cli import app

from .fake_registry import FakeRegistry
from .images import elf, make_image, tar_of


@pytest.fixture(autouse=True)
def platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gobuild, "go_platform", lambda: "linux/amd64")
    monkeypatch.setenv("COLUMNS", "40")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "epp"
    path.write_bytes(elf())
    path.chmod(0o755)
    monkeypatch.setenv("HARNESS_ROUTER_V0100", str(path))
    return path


def test_list(program: Path) -> None:
    rows = {row["release"]: row for row in json.loads(CliRunner().invoke(app, ["list", "--json"]).stdout)}
    assert set(rows) == {"v0.7.1", "v0.10.0"}
    assert rows["v0.10.0"]["binary"]["path"] == str(program) and rows["v0.7.1"]["binary"] is None
    assert any(way.startswith("build: Go module") for way in rows["v0.7.1"]["ways"])
    shown = CliRunner().invoke(app, ["list"])
    assert shown.exit_code == 0 and "v0.7.1: not at hand" in shown.stdout and "HARNESS_ROUTER_V071" in shown.stdout
    assert f" {program}\n" in shown.stdout, "a path is whole, however narrow the terminal"


def test_list_shows_a_bad_path_instead_of_failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_ROUTER_V071", str(tmp_path / "none"))
    rows = {row["release"]: row for row in json.loads(CliRunner().invoke(app, ["list", "--json"]).stdout)}
    assert "there is no file" in rows["v0.7.1"]["problem"] and rows["v0.10.0"]["problem"] is None
    assert CliRunner().invoke(app, ["list"]).exit_code == 0


def test_which(program: Path) -> None:
    assert CliRunner().invoke(app, ["which", "v0.10.0"]).stdout == f"{program}\n"
    assert json.loads(CliRunner().invoke(app, ["which", "v0.10.0", "--json"]).stdout)["how"] == "path"
    assert [row["release"] for row in json.loads(CliRunner().invoke(app, ["which", "--json"]).stdout)] == ["v0.10.0"]
    assert f" {program}\n" in CliRunner().invoke(app, ["which"]).stdout


def test_which_of_one_that_is_not_there() -> None:
    result = CliRunner().invoke(app, ["which", "v0.7.1"])
    assert isinstance(result.exception, ComponentError)
    assert "harness router install v0.7.1" in str(result.exception) and result.stdout == ""


def test_install_from_an_image(registry: FakeRegistry, cache: Path) -> None:
    reference = registry.add(make_image([tar_of([("app/epp", elf())])]))
    result = CliRunner().invoke(app, ["install", "v9", "--image", reference])
    assert result.exit_code == 0, result.output
    path = Path(result.stdout.strip())
    assert path.read_bytes() == elf() and cache in path.parents
    assert "router v9: layer 1 of 1" in result.stderr and reference in result.stderr
    result = CliRunner().invoke(app, ["install", "v9", "--image", reference, "--json"])
    assert json.loads(result.stdout)["path"] == str(path)


def test_install_by_tag_is_refused() -> None:
    result = CliRunner().invoke(app, ["install", "v9", "--image", "registry.example/router:v9"])
    assert isinstance(result.exception, InputError) and "nothing is downloaded by tag" in str(result.exception)
