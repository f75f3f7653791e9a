"""A full disk ends recording and logging, never the service (/dev/full answers every write with ENOSPC)."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from fake_workers.api.paced_clock import PacedClock
from fake_workers.api.serving import Recorder
from harness.live.tiers import LiveTiers
from harness.router.process import RouterProcess
from tests.live.running import experiment

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full on this system")


def test_records(capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(FULL)
    recorder._do(lambda file: file.write("x" * (1 << 17)))
    recorder.flush()
    recorder._do(lambda file: file.write("more"))
    recorder.close()
    assert "no longer recorded" in capsys.readouterr().err
    assert recorder.lost >= 2


def test_a_child_that_logs_goes_on() -> None:
    """Its pipe is drained though nothing can be kept: it writes more than a pipe holds and still ends."""
    code = "import sys\nfor i in range(60000): print('line', i, 'x' * 60)\nsys.exit(7)"
    seen = 0

    def sink(line: bytes) -> bool:
        nonlocal seen
        seen += 1
        return True

    child = RouterProcess([sys.executable, "-c", code], dict(os.environ), FULL, sink, "child")
    child.start()
    end = time.monotonic() + 30
    while child.returncode is None and time.monotonic() < end:
        time.sleep(0.05)
    assert child.returncode == 7
    child.wait_drained(5)
    assert seen == 60000
    assert "line 59999" in child.tail()
    child.stop()


@pytest.mark.parametrize("missing", ["folder", "room"])
def test_the_account_of_tiers(tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: str) -> None:
    """A worker that cannot write its tiers' account says so and ends as ever."""
    wanted = experiment(1, cache={"kind": "offloading", "offloading": {"cpu_bytes_to_use": 1 << 30}})
    folder = tmp_path / "tiers"
    if missing == "folder":
        folder.write_text("in the way")
    else:
        folder.mkdir()
        for name in ("tiers.parquet", "links.parquet", "restores.parquet", "tiers.json"):
            (folder / name).symlink_to(FULL)
    LiveTiers(PacedClock(), wanted, [0], "m", folder).close()
    assert "the tiers' account is not written" in capsys.readouterr().err
