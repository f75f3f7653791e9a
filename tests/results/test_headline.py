"""The headline says what the numbers say, and no more."""

from __future__ import annotations

import copy
from typing import Any

from harness.results.compare import compare
from harness.results.headline import Headline, headline
from harness.results.records import to_frame
from harness.results.summary import summarise
from tests.results.synthetic import SHAPES, make_info, make_records


def _base() -> dict[str, Any]:
    records = make_records(SHAPES[0], 100)
    return summarise(to_frame(records), make_info(SHAPES[0], records, window_ns=(0, None)), None, "00")


BASE = _base()


def _run(label: str, p90: float | None, **paths: float) -> dict[str, Any]:
    """A summary with a given p90; `paths` are like hit_rate__token=0.5."""
    summary = copy.deepcopy(BASE)
    summary["label"] = label
    summary["ttft_s"]["p90"] = summary["ttft_with_failures_s"]["p90"] = p90
    summary["measured"] |= {"timed_out": 0, "failed": 0}
    for path, value in paths.items():
        outer, inner = path.split("__")
        summary[outer][inner] = value
    return summary


def _say(*summaries: dict[str, Any]) -> Headline:
    return headline(compare(summaries), summaries)


def test_the_fastest_is_named_with_its_lead_over_the_next() -> None:
    said = _say(_run("load", 7.44), _run("precise", 3.1), _run("rr", 31.0))
    assert said.title == "precise: p90 TTFT 3.10 s, 2.4× lower than load"
    assert "The slowest, rr, takes 31.0 s, 10× as long." in said.sentences
    assert "No call timed out or failed." in said.sentences


def test_close_results_are_called_level() -> None:
    said = _say(_run("a", 3.10), _run("b", 3.20), _run("c", 9.0))
    assert said.title == "a and b are level: p90 TTFT 3.10 s to 3.20 s"
    assert any("not called on one seed" in s for s in said.sentences)


def test_losing_calls_does_not_win() -> None:
    quick = _run("quick", None, measured__timed_out=50)
    quick["ttft_s"]["p90"] = 0.1
    said = _say(quick, _run("steady", 5.0), _run("slow", 9.0))
    assert said.title.startswith("steady: p90 TTFT 5.00 s")
    assert any("No 90th percentile for quick" in s for s in said.sentences)
    assert any(
        s.startswith("Calls lost to time-outs or failures: quick") and s.endswith("; every other less than 0.2 %.")
        for s in said.sentences
    )
    assert not any("slowest" in s for s in said.sentences)


def test_only_one_keeps_nine_in_ten() -> None:
    said = _say(_run("a", None, measured__timed_out=60), _run("b", 5.0))
    assert said.title == "Only b keeps nine calls in ten: p90 TTFT 5.00 s"


def test_all_drown() -> None:
    assert _say(_run("a", None), _run("b", None)).title == "Every config lost more than one call in ten"


def test_counting_failures_is_said_where_it_matters() -> None:
    a = _run("a", 5.0, measured__timed_out=4)
    a["ttft_s"]["p90"] = 4.0
    assert any("count lost calls" in s for s in _say(a, _run("b", 9.0)).sentences)
    assert not any("count lost calls" in s for s in _say(_run("a", 5.0), _run("b", 9.0)).sentences)


def test_what_others_do_better_is_said() -> None:
    fast = _run("fast", 1.0, load_balance__busiest_over_mean=2.33, hit_rate__token=0.9)
    even = _run("even", 3.0, load_balance__busiest_over_mean=1.02, hit_rate__token=0.2)
    said = " ".join(_say(fast, even).sentences)
    assert "even spreads the work more evenly: busiest node 1.02× the mean, fast 2.33×." in said
    assert "fast reuses 90.0 % of input tokens (even: 20.0 %)." in said
    assert "streams faster" not in said


def test_invalid_runs_do_not_take_part() -> None:
    broken = _run("broken", 0.1)
    broken["validity"]["valid"] = False
    assert _say(broken, _run("a", 1.0), _run("b", 2.0)).title.startswith("a: p90 TTFT 1.00 s, 2.0× lower than b")
    assert _say(broken, _run("a", 1.0)).title == "Nothing to compare"


def test_different_load_is_not_compared() -> None:
    assert _say(_run("a", 1.0), _run("b", 2.0, load__calls=1)).title == "These runs cannot be compared"


def test_a_single_run() -> None:
    said = _say(_run("a", 2.0, hit_rate__token=0.5, measured__timed_out=1))
    assert said.title == "a: p90 TTFT 2.00 s with 50.0 % of input tokens reused"
    assert any("lost to time-outs" in s for s in said.sentences)
    assert "no call completed" in _say(_run("a", None)).title
    broken = _run("a", 2.0)
    broken["validity"] = {"valid": False, "reasons": ["the run was interrupted"], "notes": []}
    assert _say(broken) == Headline("a: not to be used", ["the run was interrupted", "What there is stands below."])
