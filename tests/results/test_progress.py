"""Progress: its pace, its words, and that standard output stays free."""

from __future__ import annotations

import io

import pytest

from harness.progress import Progress, clock, share_done


class _Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.9, "59 s"), (187, "3:07"), (7387, "2:03:07"), (90061, "1 d 01:01:01")],
)
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_plain_lines_come_every_ten_seconds() -> None:
    now, out = _Clock(), io.StringIO()
    progress = Progress("precise", 1000, stream=out, now=now)
    for second in range(1, 36):
        now.now_s = 1000.0 + second
        progress.update(second * 10, second * 60_000_000_000)
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0] == "precise: 100/1,000 calls (10 %)  virtual 10:00  10 calls/s  wall 10 s  left 1:30"
    progress.close()
    progress.close()
    assert out.getvalue().splitlines()[3:] == ["precise: 350 calls in 35 s (10 calls/s), virtual 35:00"]


def test_time_left_follows_the_pace_of_the_last_minute() -> None:
    now, out = _Clock(), io.StringIO()
    progress = Progress("x", 10_000, stream=out, now=now)
    done = 0
    for second in range(1, 301):
        now.now_s = 1000.0 + second
        done += 100 if second <= 100 else 1
        progress.update(min(done, 10_000 - 300 + second), 0)
    assert "1 calls/s" in progress.line()


def test_a_rate_below_one_is_not_called_none() -> None:
    now = _Clock()
    progress = Progress("x", 40, stream=io.StringIO(), now=now)
    now.now_s += 20
    progress.update(9, 0)
    assert "0.45 calls/s" in progress.line()


def test_without_a_total_there_is_no_share_and_no_time_left() -> None:
    now, out = _Clock(), io.StringIO()
    progress = Progress("x", 0, stream=out, now=now)
    now.now_s += 11
    progress.update(0, 0)
    assert "(-)" in out.getvalue() and "left" not in out.getvalue()


def test_a_run_that_ends_at_a_time_is_measured_by_it() -> None:
    now = _Clock()
    progress = Progress("x", 10_000, 1200.0, stream=io.StringIO(), now=now)
    now.now_s += 20
    progress.update(50, 300_000_000_000)
    assert progress.line() == "x: 50 calls (25 %)  virtual 5:00  2.5 calls/s  wall 20 s  left 1:00"


@pytest.mark.parametrize(
    ("calls", "total", "virtual_ns", "until_s", "share"),
    [(5, 10, 10**9, None, 0.5), (9, 10, 10**9, 2.0, 0.9), (1, 10, 10**9, 2.0, 0.5), (3, 0, 10**9, None, 0.0),
     (3, 0, 3 * 10**9, 2.0, 1.0)],
)  # fmt: skip
def test_a_run_is_as_far_as_the_nearer_of_its_two_ends(
    calls: int, total: int, virtual_ns: int, until_s: float | None, share: float
) -> None:
    assert share_done(calls, total, virtual_ns, until_s) == share


def test_a_share_may_be_told() -> None:
    now = _Clock()
    progress = Progress("study", 0, stream=io.StringIO(), now=now)
    now.now_s += 20
    progress.update(50, 0, 0.1)
    assert progress.line() == "study: 50 calls (10 %)  2.5 calls/s  wall 20 s  left 3:00"


def test_a_terminal_gets_one_live_line_and_a_last_plain_one() -> None:
    now, out = _Clock(), _Terminal()
    with Progress("x", 10, stream=out, now=now) as progress:
        for done in range(1, 11):
            now.now_s += 1
            progress.update(done, done * 1_000_000_000)
    text = out.getvalue()
    assert "\x1b[" in text and text.endswith("x: 10 calls in 10 s (1 calls/s), virtual 10 s\n")


def test_the_way_a_run_ended_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    with pytest.raises(KeyboardInterrupt), Progress("x", 10, stream=out):
        raise KeyboardInterrupt
    assert out.getvalue().endswith("; interrupted\n")
    with pytest.raises(ValueError, match="boom"), Progress("x", 10):
        raise ValueError("boom")
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.endswith("; failed\n")
