"""The comparison: marks, best values, the three ways of writing it."""

from __future__ import annotations

import io
import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from harness.results.compare import COLUMNS, compare, groups, merged_notes, number
from harness.results.records import to_frame
from harness.results.summary import summarise
from harness.results.table import markdown_table, plain_table, print_table
from tests.results.synthetic import SHAPES, Shape, make_info, make_records


def _summary(shape: Shape, calls: int = 200, **changes: Any) -> dict[str, Any]:
    records = make_records(shape, calls)
    return summarise(to_frame(records), make_info(shape, records, window_ns=(0, None), **changes), None, "00")


def _all() -> list[dict[str, Any]]:
    return [_summary(shape) for shape in SHAPES]


def test_best_values_are_the_lowest_times_and_highest_rates() -> None:
    summaries = _all()
    rows = compare(summaries).rows
    fastest = min(range(5), key=lambda i: summaries[i]["ttft_s"]["p90"])
    assert [i for i, row in enumerate(rows) if "ttft_p90" in row.best] == [fastest]
    most = max(range(5), key=lambda i: summaries[i]["hit_rate"]["token"])
    assert [i for i, row in enumerate(rows) if "hit_token" in row.best] == [most]
    assert not any("batch" in row.best or "timed_out" in row.best for row in rows)


def test_an_invalid_run_is_marked_and_never_best() -> None:
    summaries = [
        _summary(SHAPES[0], invalid=["a silent fall-back"]),
        _summary(SHAPES[1]),
        _summary(SHAPES[3]),
    ]
    comparison = compare(summaries)
    assert comparison.rows[0].best == set() and comparison.rows[1].best
    text = plain_table(comparison)
    assert "precise-prefix INVALID" in text and "INVALID, not to be used: precise-prefix" in text


def test_equal_runs_have_no_best() -> None:
    assert all(not row.best for row in compare([_summary(SHAPES[0]), _summary(SHAPES[0])]).rows)


def test_baselines_are_marked_as_ours() -> None:
    labels = [row.marked_label for row in compare(_all()).rows]
    assert [label for label in labels if label.endswith("(ours)")] == ["round-robin (ours)"]


def test_a_column_without_values_is_left_out() -> None:
    columns = compare([_summary(SHAPES[3]), _summary(SHAPES[4])]).columns
    assert "gap" not in {c.key for c in columns} and "ttft_p90" in {c.key for c in columns}


def test_different_load_is_said() -> None:
    comparison = compare([_summary(SHAPES[0], 200), _summary(SHAPES[1], 100)])
    assert comparison.load_differs
    assert "cannot be compared" in plain_table(comparison) and "cannot be compared" in markdown_table(comparison)


def test_the_legend_speaks_only_of_what_the_table_has() -> None:
    one, several = plain_table(compare([_summary(SHAPES[4])])), plain_table(compare(_all()))
    for words in ("* best of the valid runs", "Truth gap: |believed - held|"):
        assert words not in " ".join(one.split()) and words in " ".join(several.split())
    assert "Times and rates: completed calls" in one


def test_notes_that_differ_in_numbers_alone_are_one_with_the_range() -> None:
    light = "lightly loaded: GPUs were busy {} of the run's virtual time"
    late = "service level p90 TTFT <= 2 s: met ({} s)"
    first = [light.format("1.8%"), late.format("1.1"), "profile llama-3.1-8b extrapolated up to 9,000 tokens"]
    second = [light.format("0.4%"), late.format("1.3"), "profile llama-3.3-70b extrapolated up to 131,072 tokens"]
    assert merged_notes([first, second, [light.format("1.8%")]]) == [
        (light.format("0.4 to 1.8%"), [0, 1, 2]),
        (first[1], [0]),
        (first[2], [0]),
        (second[1], [1]),
        (second[2], [1]),
    ]
    text = plain_table(compare([_summary(SHAPES[0], notes=first[:1]), _summary(SHAPES[1], notes=second[:1])]))
    assert text.count("lightly loaded") == 1 and "0.4 to 1.8%" in text


def test_plain_table_is_aligned() -> None:
    comparison = compare(_all())
    lines = plain_table(comparison).splitlines()
    rule = next(line for line in lines if line.startswith("---"))
    body = lines[3:8]
    assert [line.split("  ")[0] for line in body] == [row.marked_label for row in comparison.rows]
    assert all(len(line) <= len(rule) for line in lines[:8])
    assert len(rule) <= 140
    ends = [[m.end() for m in re.finditer(r"[\d.,]+|-", line.ljust(len(rule)))] for line in body]
    width = max(len(row.marked_label) for row in comparison.rows)
    columns = [[end for end in row if end > width] for row in ends]
    assert len(columns[0]) == len(comparison.columns) and all(row == columns[0] for row in columns)


def test_markdown_cannot_be_broken_by_a_name() -> None:
    evil = Shape("a|b <img src=x>\nc")
    lines = markdown_table(compare([_summary(evil), _summary(SHAPES[1])])).splitlines()
    assert "a\\|b &lt;img src=x> c" in lines[2]
    assert lines[2].replace("\\|", "").count("|") == lines[0].count("|")


def test_a_wide_terminal_gets_colour_and_a_pipe_gets_plain_text() -> None:
    terminal, pipe = io.StringIO(), io.StringIO()
    print_table(_all(), Console(file=terminal, force_terminal=True, width=200, color_system="standard"))
    print_table(_all(), Console(file=pipe, force_terminal=False, width=200))
    assert "\x1b[" in terminal.getvalue() and "precise-prefix" in terminal.getvalue()
    assert pipe.getvalue() == plain_table(compare(_all()))


def test_names_with_console_markup_stay_as_they_are() -> None:
    terminal = io.StringIO()
    odd = Shape("[red]x[/red]")
    print_table([_summary(odd)], Console(file=terminal, force_terminal=True, width=200))
    assert "[red]x[/red]" in terminal.getvalue()


def test_long_labels_are_cut_in_the_middle() -> None:
    long = _summary(Shape("a-router-config-" * 8, kind="baseline"))
    lines = plain_table(compare([long, _summary(SHAPES[1])])).splitlines()
    assert lines[3].startswith("a-router-config-a-rou...") and "(ours)" in lines[3]
    assert len(lines[2]) < 155


def test_groups_span_their_columns() -> None:
    spans = groups(COLUMNS)
    assert sum(n for _, n in spans) == len(COLUMNS)
    assert spans[0] == ("TTFT, s", 3)


@given(st.floats(1e-4, 1e9))
def test_numbers_keep_three_significant_digits(value: float) -> None:
    written = number(value)
    assert "e" not in written
    assert abs(float(written.replace(",", "")) - value) <= max(value * 0.0051, 5e-6)
