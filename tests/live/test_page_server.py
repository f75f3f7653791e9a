"""`harness page`: what is wrong with its endpoints file or its ports is one line."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli import app
from harness.errors import InputError
from harness.live.page_server import read_endpoints, serve_page

WORKER = "endpoints: [{name: a, address: 127.0.0.1, port: 8000}]\n"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"a: \xff", "byte 3 is not UTF-8"),
        (b"endpoints: 3", "is no endpoints file"),
        (b"- a", "is no endpoints file"),
        (b"endpoints: []", "names no worker"),
        (b"endpoints: [{name: a, address: h, port: 99999}]", "port beyond 65535"),
        (b"endpoints: [{name: a, address: h, port: 1, labels: [a]}]", "is no endpoints file"),
        (b"endpoints: [{name: a, address: h}]", "is no endpoints file"),
    ],
)
def test_a_bad_endpoints_file_is_one_line(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "e.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=complaint) as caught:
        read_endpoints(path)
    assert str(path) in str(caught.value)
    path.write_text(WORKER)
    assert [worker.port for worker in read_endpoints(path)] == [8000]
    with pytest.raises(InputError, match="no such file"):
        read_endpoints(tmp_path / "gone.yaml")


def test_a_port_that_is_taken_or_none_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text(WORKER)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"--port: {port} of 127.0.0.1 cannot be used"):
            serve_page(path, "", None, "", "127.0.0.1", port, 0, None)
    for option in ("--port", "--access-log-port"):
        done = CliRunner().invoke(app, ["page", "--endpoints", str(path), option, "70000"])
        assert done.exit_code == 2
