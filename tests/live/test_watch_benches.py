"""Which replays the page lists."""

from __future__ import annotations

import json
from pathlib import Path

from harness.live.watch import Watch


def test_the_replays_of_this_cluster_in_the_order_of_their_start(tmp_path: Path) -> None:
    for number, name in enumerate(("tiers-bench-9", "tiers-bench-10", "other-bench", "tiers")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "progress.json").write_text(json.dumps({"done": number, "calls": 5}))
    (tmp_path / "tiers-bench-10" / "report.html").write_text("")
    watch = Watch([], facts={}, router_metrics=None, results=tmp_path, benches="tiers-bench*")
    found = watch.state()["benches"]
    assert [(b["name"], b["done"], b["report"]) for b in found] == [
        ("tiers-bench-9", 0, False),
        ("tiers-bench-10", 1, True),
    ]
    assert len(Watch([], facts={}, router_metrics=None, results=tmp_path).state()["benches"]) == 4
