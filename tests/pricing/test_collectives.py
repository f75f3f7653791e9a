"""Measured collectives: shipped tables, gaps, a user's own file."""

from __future__ import annotations

from pathlib import Path

import pytest

from fake_workers.errors import InputError
from fake_workers.pricing.collectives import COLUMNS, GAPS, OPERATIONS, collective_gpus, load_collectives


def test_shipped_points_come_back() -> None:
    h200 = load_collectives("h200")
    assert h200.time_ns("all_reduce", 8, 512) == 16_010  # NCCL's floor
    assert h200.time_ns("all_reduce", 8, 2 * 268_435_456) == pytest.approx(2_040_310, rel=1e-4)
    assert load_collectives("mi300x").time_ns("all_reduce", 8, 8 << 20) == 83_740
    assert load_collectives("mi350x").time_ns("ep_dispatch", 8, 1024 * 8 * 7168 * 2) == 227_500


def test_nvidia_has_every_operation_on_two_four_and_eight() -> None:
    for gpu in ("h100", "h200", "b200"):
        table = load_collectives(gpu)
        for op in OPERATIONS[:4]:
            for ranks in (2, 4, 8):
                times = [table.time_ns(op, ranks, size) for size in (1 << 10, 1 << 20, 1 << 26, 1 << 29)]
                assert times[1] < times[2] < times[3] and times[0] <= times[2]
        assert not table.beyond


def test_the_kernel_that_is_fastest_at_a_size_is_taken() -> None:
    mi355x = load_collectives("mi355x")
    assert mi355x.time_ns("all_reduce", 8, 196_608) == 7_000  # vLLM's own; RCCL takes 10 us
    assert mi355x.time_ns("all_reduce", 8, 16 << 20) == 91_770  # only RCCL's is known


def test_one_rank_needs_no_collective() -> None:
    assert load_collectives("mi355x").time_ns("all_gather", 1, 1 << 20) == 0


def test_beyond_the_measured_sizes_is_noted() -> None:
    mi355x = load_collectives("mi355x")
    floor = mi355x.time_ns("all_reduce", 8, 1)
    assert floor == mi355x.time_ns("all_reduce", 8, 24 * 1024)
    assert mi355x.time_ns("all_reduce", 8, 4 << 30) > 3.5 * 4_900_000
    assert mi355x.beyond == {"all_reduce of 8 ranks": 4 << 30}


@pytest.mark.parametrize(
    ("gpu", "op", "ranks", "message"),
    [
        ("mi300x", "reduce_scatter", 8, "no size was found published"),
        ("mi300x", "all_to_all", 8, "one size only"),
        ("h200", "all_reduce", 16, "measured with 2, 4, 8"),
    ],
)
def test_what_was_not_measured_is_refused_with_the_reason(gpu: str, op: str, ranks: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_collectives(gpu).time_ns(op, ranks, 1 << 20)
    with pytest.raises(InputError, match="known: b200"):
        load_collectives("a-card")


def test_gaps_are_about_shipped_gpus() -> None:
    assert {gpu for gpu, _ in GAPS} <= set(collective_gpus())


HEAD = ",".join(COLUMNS)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(f"{HEAD}\nmine,all_reduce,x,4,1000,10,me\nmine,all_reduce,x,4,100000,40,me\n")
    table = load_collectives(str(path))
    assert table.gpu == "mine" and table.time_ns("all_reduce", 4, 10_000) == 20_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu,op\na,b\n", "column kernel is missing"),
        (f"{HEAD}\n", "holds no rows"),
        (f"{HEAD}\na,broadcast,x,4,10,1,me\n", "line 2 column op.*unknown operation"),
        (f"{HEAD}\na,all_reduce,x,four,10,1,me\n", "line 2.*must be numbers"),
        (f"{HEAD}\na,all_reduce,x,4,10,0,me\n", "line 2.*a time above 0"),
        (f"{HEAD}\na,all_reduce,x,4,10,1,me\na,all_reduce,x,4,10,1,me\n", "line 3.*repeats a point"),
        (f"{HEAD}\na,all_reduce,x,4,10,1,me\nb,all_reduce,x,4,10,1,me\n", "holds 2 GPU types"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        load_collectives(str(path))
