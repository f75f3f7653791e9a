"""Results of cache tiers: files read back as written, numbers by hand, words, and pages with and without tiers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from harness.errors import InputError
from harness.results.plots import PLOTS, figures
from harness.results.records import to_frame
from harness.results.report import render_html
from harness.results.store import Run, load_run, report, write_run
from harness.results.tier_data import RESTORE_COLUMNS, TierData
from harness.results.tier_plots import TIER_PLOTS
from harness.results.tier_series import rate_over_time, resident_over_time
from harness.results.tier_summary import tier_summary
from harness.results.tier_words import of_one, of_several
from tests.results.synthetic import SHAPES, S, make_info, make_records, make_tiers, make_timeline, with_tier_tokens


def _run(dir: Path, busy: float = 0.4, tiers: bool = True) -> Run:
    records = make_records(SHAPES[0], 400, hours=0.2)
    facts, data = make_tiers(with_tier_tokens(records), busy=busy) if tiers else (None, None)
    info = make_info(SHAPES[0], records, tier=facts)
    timeline = make_timeline(records, [e // 8 for e in range(64)])
    return write_run(dir, records, info, timeline, tiers=data, report=False)


def test_a_run_is_the_same_when_it_is_read_back(tmp_path: Path) -> None:
    run = _run(tmp_path)
    again = load_run(tmp_path)
    assert again.summary == run.summary
    assert again.tiers is not None and run.tiers is not None
    for table in ("series", "links", "restores"):
        assert getattr(again.tiers, table).equals(getattr(run.tiers, table))
    report([tmp_path], tmp_path / "again.html")
    assert "Cache tiers below the GPU" in (tmp_path / "again.html").read_text(encoding="utf-8")


def test_a_page_without_tiers_says_nothing_of_them(tmp_path: Path) -> None:
    page = render_html([_run(tmp_path, tiers=False)])
    for word in (
        "Cache tiers",
        "plot-tier-",
        "<dt>Restore</dt>",
        ">Restore, s<",
        'id="tiers"',
        *(plot.title for plot in TIER_PLOTS),
    ):
        assert word not in page
    assert set(_run(tmp_path / "two", tiers=False).summary["tier"].values()) == {None}


def test_all_plots_of_tiers_have_data_beside_a_run_without(tmp_path: Path) -> None:
    runs = [_run(tmp_path / "with"), _run(tmp_path / "without", tiers=False)]
    assert list(figures(runs, TIER_PLOTS)) == [plot.key for plot in TIER_PLOTS]


def test_links_that_are_idle_in_all_runs_have_no_bars_of_zero(tmp_path: Path) -> None:
    run = _run(tmp_path)
    for kind in run.summary["tier"]["links"]:
        kind["busiest"]["utilisation_p99"] = 0.0
    assert "tier-links" not in figures([run], TIER_PLOTS)
    run.summary["tier"]["links"][0]["busiest"]["utilisation_p99"] = 0.01
    assert "tier-links" in figures([run], TIER_PLOTS)


def test_the_caption_of_the_wait_names_all_shades_of_the_bar() -> None:
    (caption,) = (plot.caption for plot in PLOTS if plot.key == "parts")
    for words in ("Full colour: waiting", "Lighter: bringing KV back", "Lightest: computing", "gateway, router"):
        assert words in caption


def test_the_words_explain_the_truth_gap_only_where_the_table_has_it(tmp_path: Path) -> None:
    run = _run(tmp_path, tiers=False)
    assert "<dt>Truth gap</dt>" in render_html([run])
    run.summary["router_truth_gap"] = {"mean": None}
    assert "<dt>Truth gap</dt>" not in render_html([run])


def test_broken_and_foreign_tables_are_refused(tmp_path: Path) -> None:
    _run(tmp_path)
    (tmp_path / "links.parquet").write_bytes(b"no table")
    with pytest.raises(InputError, match="not a readable table of tiers"):
        load_run(tmp_path)
    pl.DataFrame({"a": [1]}).write_parquet(tmp_path / "links.parquet")
    with pytest.raises(InputError, match="schema unknown"):
        load_run(tmp_path)


def _restore(tier: str, outcome: str, ended_s: float, fetch_s: float, copy_s: float, dram: int, store: int) -> tuple:
    end = int(ended_s * S)
    started = end - int(copy_s * S)
    return ("c", 0, outcome, tier, (dram + store) * 10, 0, int(fetch_s * S), started, end, dram, store)


def test_restores_by_hand() -> None:
    """Three loads in the window, one before it, one that failed, one cancelled."""
    rows = [
        _restore("dram", "loaded", 5, 9, 9, 1000, 1000),
        _restore("dram", "loaded", 20, 0, 1, 100, 0),
        _restore("store", "loaded", 30, 2, 1, 100, 300),
        _restore("store", "loaded", 40, 4, 2, 0, 500),
        _restore("store", "failed", 41, 4, 2, 0, 500),
        ("c", 0, "cancelled", None, 0, None, None, None, 42 * S, 0, 0),
    ]
    table = pl.DataFrame(
        rows, schema=RESTORE_COLUMNS | dict.fromkeys(("dram_tokens", "store_tokens"), pl.Int64), orient="row"
    )
    records = with_tier_tokens(make_records(SHAPES[0], 50))
    facts, data = make_tiers(records)
    facts["kv_bytes_per_token"] = 10
    calls = to_frame(records)
    tier = tier_summary(calls, calls, (10 * S, 100 * S), facts, TierData(data.series, data.links, table))
    assert {k: tier["restores"][k] for k in ("loaded", "failed", "cancelled")} == {
        "loaded": 3,
        "failed": 1,
        "cancelled": 1,
    }
    assert tier["restores"]["s"]["mean"] == pytest.approx((1 + 3 + 6) / 3)
    assert tier["restores"]["fetch_s"]["p50"] == 2
    assert tier["restores"]["copy_s"]["mean"] == pytest.approx(4 / 3)
    assert tier["restores"]["bytes"]["p50"] == 4000
    dram, store = tier["tiers"]
    assert (dram["served_tokens"], store["served_tokens"], store["served_bytes"]) == (200, 800, 8000)
    assert (dram["restores"]["loaded"], dram["restores"]["bytes"]["mean"]) == (2, 1000)
    assert dram["restores"]["s"] == {"mean": 1, "p50": 1, "p90": 1, "p99": 1}
    assert store["restores"]["s"]["p90"] == pytest.approx(3 + 0.9 * 3)
    assert store["restores"]["bytes"]["p90"] == pytest.approx(3000 + 0.9 * 2000)
    assert tier["bytes_by_source"]["dram"] == 10 * sum(r.dram_tokens for r in records)


def test_what_a_tier_served_is_what_was_moved() -> None:
    """Layers with a window move less than their tokens have; shares of one load add up to it."""
    rows = [
        ("c", 0, "loaded", "dram", 700, 0, 0, S, 20 * S, 100, 0),
        ("c", 0, "loaded", "store", 4000, 0, 0, S, 21 * S, 100, 300),
    ]
    schema = RESTORE_COLUMNS | dict.fromkeys(("dram_tokens", "store_tokens"), pl.Int64)
    records = with_tier_tokens(make_records(SHAPES[0], 50))
    facts, data = make_tiers(records)
    facts["tiers"].append(facts["tiers"][1] | {"name": "idle"})
    calls, table = to_frame(records), pl.DataFrame(rows, schema=schema, orient="row")
    tier = tier_summary(calls, calls, (10 * S, 100 * S), facts, TierData(data.series, data.links, table))
    assert [served["served_bytes"] for served in tier["tiers"]] == [700 + 1000, 3000, 0]
    assert tier["tiers"][0]["restores"]["bytes"]["mean"] == 850
    none = tier_summary(calls, calls, (30 * S, 100 * S), facts, TierData(data.series, data.links, table))
    assert [served["served_bytes"] for served in none["tiers"]] == [0, 0, 0]


def test_series_by_hand() -> None:
    """Two bins of 10 s and a cut one of 5 s."""
    schema = {"kind": pl.String, "name": pl.String, "start_ns": pl.Int64, "width_ns": pl.Int64, "bytes": pl.Int64}
    rows = [
        (kind, name, start * S, width * S, value, value)
        for kind, name, values in (
            ("read", "store", (100, 0, 50)),
            ("resident", "dram/0", (10, 20, 30)),
            ("resident", "dram/1", (30, 40, 50)),
        )
        for start, width, value in zip((0, 10, 20), (10, 10, 5), values, strict=True)
    ]
    series = pl.DataFrame(rows, schema=schema | {"high_bytes": pl.Int64}, orient="row")
    data = TierData(series, pl.DataFrame(), pl.DataFrame())
    x, y = rate_over_time(data, "read", "store")
    assert (x.tolist(), y.tolist()) == (pytest.approx([5, 15, 22.5]), [10, 0, 10])
    x, mean, high = resident_over_time(data, ["dram/0", "dram/1"])
    assert (mean.tolist(), high.tolist()) == ([20, 30, 40], [30, 40, 50])
    assert rate_over_time(data, "write", "store")[0].tolist() == []


def _restores_take(summary: dict[str, Any], share: float) -> None:
    summary["ttft_s"]["mean"], summary["restore_s"] = 1.8, {"mean": share * 1.8}


def test_a_link_is_judged_by_its_busy_time_and_not_by_the_idle_run(tmp_path: Path) -> None:
    """Full whenever it is used, for 0.58 % of the run, and nearly all of what calls wait for."""
    summary = _run(tmp_path).summary
    summary["tier"]["links"][-1]["busiest"] |= {"busy_share": 0.0058, "full_share": 0.0058}
    for kind in summary["tier"]["links"][:-1]:
        kind["busiest"] |= {"busy_share": 0.001, "full_share": 0.0}
    _restores_take(summary, 1.28 / 1.80)
    assert "and store \u2192 switch was full for 100 % of its busy time." in " ".join(of_one(summary))
    assert "Links that held restores up" in " ".join(of_several([("a", summary)]))
    _restores_take(summary, 0.02)
    for said in (of_one(summary), of_several([("a", summary)])):
        assert "No link was a bottleneck: restores were" in " ".join(said) and "100 %" in " ".join(said)


def test_words_of_a_calm_run_and_of_one_with_a_full_link(tmp_path: Path) -> None:
    calm, full = _run(tmp_path / "calm", 0.3).summary, _run(tmp_path / "full", 0.98).summary
    calm["tier"]["computed_again_share"] = 0.004
    said = " ".join(of_one(calm))
    assert "The tiers held what was needed: 0.40 % of input tokens were computed again." in said
    assert "No link was a bottleneck: restores were 0 % of the mean TTFT; the busiest, store \u2192 switch, was" in said
    _restores_take(full, 0.71)
    said = " ".join(of_one(full))
    assert "No link was a bottleneck: restores were 71 % of the mean TTFT; the busiest, store" in said
    assert "was full for 49 % of its busy time" in said
    full["tier"]["links"][-1]["busiest"]["full_share"] = 0.9
    said = " ".join(of_one(full))
    assert (
        "A link held restores up: they were 71 % of the mean TTFT, and store \u2192 switch was full for 92 % of its"
        in said
    )
    assert "5.0 % of input tokens were computed again" in said
    assert "10.0 % of what was to be stored in node memory found no room." in said
    without = copy.deepcopy(calm) | {"tier": {"read_bytes_per_s_mean": None}}
    several = " ".join(of_several([("calm", calm), ("full", full), ("none", without)]))
    wanted = "full for this share of their busy time: full store \u2192 switch 92 % (restores 71 % of mean TTFT)."
    assert wanted in several
    assert "full 5.0 %; every other less than 1 %." in several
    assert of_one(without) == [] and of_several([("none", without)]) == []


def test_shares_of_sources_add_up(tmp_path: Path) -> None:
    summary = _run(tmp_path).summary
    tokens = summary["tokens_by_source"]
    total = sum(tokens.values())
    parts = {"the GPU's own cache": "gpu", "node memory": "dram", "store": "shared"}
    wanted = ", ".join(f"{name} {100 * tokens[key] / total:.1f} %" for name, key in parts.items())
    assert of_one(summary)[0].startswith(f"Input tokens came from {wanted};")
