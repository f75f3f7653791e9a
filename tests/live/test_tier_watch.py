"""What the page makes of the workers' samples of tiers and links."""

from __future__ import annotations

import pytest

from harness.live import tier_watch
from harness.live.tier_watch import TierWatch, samples

GIB = 1 << 30


def page(seconds: float, asked: int, hit: int, read: int, link: int, resident: int = GIB) -> str:
    return "\n".join(
        [
            "# HELP sim_clock_seconds_total The engines' time.",
            f"sim_clock_seconds_total {seconds}",
            f'sim_tier_asked_tokens_total{{tier="dram",node="0"}} {asked}.0',
            f'sim_tier_hit_tokens_total{{tier="dram",node="0"}} {hit}.0',
            f'sim_tier_read_bytes_total{{tier="dram",node="0"}} {read}.0',
            f'sim_tier_resident_bytes{{tier="dram",node="0"}} {resident}.0',
            f'sim_tier_capacity_bytes{{tier="dram",node="0"}} {2 * GIB}.0',
            'sim_tier_asked_tokens_total{tier="store",node=""} 5.0',
            'sim_tier_resident_bytes{tier="store",node=""} 7.0',
            'sim_tier_capacity_bytes{tier="store",node=""} 0.0',
            f'sim_link_bytes_total{{link="host[0]>gpu[0,0]"}} {link}.0',
            f'sim_link_bytes_total{{link="host[0]>gpu[0,1]"}} {2 * link}.0',
            'sim_link_capacity_bytes_per_second{link="host[0]>gpu[0,0]"} 1000.0',
            'sim_link_capacity_bytes_per_second{link="host[0]>gpu[0,1]"} 1000.0',
            "sim_broken nan-or-not",
            'vllm:num_requests_running{model_name="m"} 1.0',
        ]
    )


def test_rates_hits_and_the_busiest_link() -> None:
    watch = TierWatch()
    assert watch.view() == {"tiers": [], "links": []}
    for seconds, asked, hit, read, link in ((10.0, 100, 10, 0, 0), (12.0, 300, 60, 4000, 500)):
        for _ in range(2):  # two workers of one process show the same
            watch.take(page(seconds, asked, hit, read, link))
        watch.remember()
    view = watch.view()
    dram, store = view["tiers"]
    assert (dram["name"], dram["node"], dram["resident"], dram["capacity"]) == ("dram", "0", GIB, 2 * GIB)
    assert dram["hit_rate"] == pytest.approx(50 / 200) and dram["read_per_s"] == 2000.0
    assert (store["name"], store["capacity"], store["hit_rate"], store["evicted"]) == ("store", None, None, None)
    (link,) = view["links"]
    assert (link["kind"], link["links"], link["busiest"]) == ("host>gpu", 2, "host[0]>gpu[0,1]")
    assert (link["rate"], link["use"], link["rate_all"], link["bytes_all"]) == (500.0, 0.5, 750.0, 1500.0)


def test_a_process_that_began_anew_has_no_negative_rates() -> None:
    watch = TierWatch()
    for seconds, asked in ((100.0, 900), (1.0, 20), (2.0, 40)):
        watch.take(page(seconds, asked, asked // 2, 10 * asked, asked))
        watch.remember()
    dram = watch.view()["tiers"][0]
    assert dram["read_per_s"] == 200.0 and dram["hit_rate"] == 0.5
    watch.remember()  # nobody answered
    assert watch.view() == {"tiers": [], "links": []}


def test_what_is_no_sample_is_passed_over() -> None:
    found = samples(page(1.0, 1, 1, 1, 1))
    assert found[tier_watch.CLOCK, ""] == 1.0
    assert not any(name.startswith(("vllm", "sim_broken")) for name, _ in found)
