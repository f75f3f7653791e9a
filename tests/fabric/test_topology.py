"""Topologies and cost tables: the shipped ones load, paths are as drawn, bad files are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import InputError
from harness.fabric.goodput import load_cost, parse_cost, table_names
from harness.fabric.topology import load_topology, parse_topology, topology_names


@pytest.mark.parametrize("name", topology_names())
def test_every_shipped_topology_connects_all_gpus_with_all_stores(name):
    topology = load_topology(name)
    stores = topology.vertices_of("store") + topology.vertices_of("enclosure") + topology.vertices_of("pool")
    gpus = topology.vertices_of("gpu")
    assert len(gpus) == 64
    assert topology.about
    assert stores
    for gpu in (gpus[0], gpus[-1]):
        for store in stores:
            there, back = topology.path(gpu, store), topology.path(store, gpu)
            assert len(there) == len(back) >= 2
            assert [topology.ends[link][::-1] for link in reversed(back)] == [topology.ends[link] for link in there]


def test_the_document_names_every_shipped_topology_and_cost_table():
    text = (Path(__file__).parents[2] / "docs" / "fabric.md").read_text(encoding="utf-8")
    shipped = text.split("Shipped: ")[1].split("\n\n")[0]
    assert [name for name in topology_names() if f"`{name}`" not in shipped] == []
    assert [name for name in table_names() if name not in text] == []


def test_counts_can_be_overridden():
    topology = load_topology("one-switch", {"n": 2, "g": 1})
    assert topology.vertices_of("host") == ["host[0]", "host[1]"]
    path = topology.path("store", "gpu[1,0]")
    assert [topology.links[link].name for link in path] == ["store>switch", "switch>host[1]", "host[1]>gpu[1,0]"]
    assert topology.links[path[0]].bytes_per_s == 120 * 10**9
    assert topology.links[path[0]].latency_ns == 2_000
    assert topology.number("switch>host[1]") == path[1]
    assert topology.path("store", "store") == ()


def test_rates_can_be_overridden_by_where_a_link_leads():
    topology = load_topology("one-switch", rates={"store": 32})
    assert {link.name: link.bytes_per_s for link in topology.links if "store" in link.name} == {
        "switch>store": 32 * 10**9,
        "store>switch": 32 * 10**9,
    }
    assert topology.links[topology.number("host[0]>switch")].bytes_per_s == 50 * 10**9
    with pytest.raises(InputError, match=r"no link leads to shop.*host\[n\], switch, store"):
        load_topology("one-switch", rates={"shop": 32})


def test_a_rate_may_grow_with_a_count():
    for nodes in (2, 8):
        topology = load_topology("store-per-node", {"n": nodes}, {"store": 2.5})
        assert topology.links[topology.number("store>switch")].bytes_per_s == nodes * 2_500_000_000


def test_one_way_links_have_no_way_back():
    topology = parse_topology({"links": [{"from": "a", "to": "b", "gbytes_per_s": 1, "oneway": True}]}, "x")
    assert len(topology.links) == 1
    with pytest.raises(InputError, match="no way from b to a"):
        topology.path("b", "a")


@pytest.mark.parametrize(
    ("document", "what"),
    [
        ({"links": []}, "no links"),
        ({"links": [{"from": "a", "to": "b"}]}, "gbytes_per_s"),
        ({"links": [{"from": "a[n]", "to": "b", "gbytes_per_s": 1}]}, "no count for index n"),
        ({"links": [{"from": "a", "to": "b", "gbytes_per_s": 0}]}, "positive"),
        ({"links": [{"from": "a b", "to": "b", "gbytes_per_s": 1}]}, "vertex"),
        ({"counts": {"n": 0}, "links": [{"from": "a[n]", "to": "b", "gbytes_per_s": 1}]}, "at least 1"),
        ({"nodes": 3}, "nothing else"),
        ({"counts": {"n": 2}, "links": [{"from": "a", "to": "b", "gbytes_per_s": 1, "times": "k"}]}, "counts: n"),
        ({"counts": {"n": 2}, "links": [{"from": "a", "to": "b", "gbytes_per_s": 1, "times": ["n"]}]}, "counts: n"),
        ({"links": [{"from": "a", "to": ["b"], "gbytes_per_s": 1}]}, "vertex"),
    ],
)
def test_bad_topologies_are_named(document, what):
    with pytest.raises(InputError, match=what):
        parse_topology(document, "x")
    with pytest.raises(InputError, match="one-switch"):
        load_topology("no-such")


@pytest.mark.parametrize("name", table_names())
def test_every_shipped_cost_table_names_its_source_and_grows_with_size(name):
    cost = load_cost(name)
    curve = cost.goodput
    if curve is not None:
        assert curve.source
        assert list(curve.bytes_per_s) == sorted(curve.bytes_per_s)
        assert curve.at(1) == curve.bytes_per_s[0]
        assert curve.at(10**13) == curve.bytes_per_s[-1]
        for size, rate in zip(curve.sizes, curve.bytes_per_s, strict=True):
            assert curve.at(size) == rate


def test_between_two_points_goodput_is_log_linear():
    cost = parse_cost({"source": "s", "by": "transfer", "goodput_gbytes_per_s": {100: 1, 10000: 3}}, "t")
    assert cost.cap_bytes_per_s(1000, 1) == 2 * 10**9
    assert cost.cap_bytes_per_s(0, 1) is None


def test_descriptors_cost_time_and_set_the_message_size():
    cost = load_cost("rdma-nixl-descriptors")
    # the published transfer: 40,000 descriptors, 129 ms of posting
    assert cost.start_ns(40_000) == pytest.approx(129_000_000, rel=0.001)
    assert cost.cap_bytes_per_s(10**9, 1) is None
    copy = load_cost("host-copy-dma-h100")
    assert copy.cap_bytes_per_s(1000 * 2**20, 1000) == 44_400_000_000


def test_a_curve_can_be_scaled_to_another_wire():
    curve = load_cost("rdma-mooncake-8x200g").goodput
    assert curve is not None
    assert curve.scaled(50 * 10**9).at(4_500_000_000) == round(142.3e9 / 4)
    plain = parse_cost({"source": "s", "by": "transfer", "goodput_gbytes_per_s": {100: 1}}, "t").goodput
    assert plain is not None
    with pytest.raises(InputError):
        plain.scaled(10**9)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"source": "s", "by": "hour", "goodput_gbytes_per_s": {1: 1}},
        {"source": "s", "by": "transfer", "goodput_gbytes_per_s": {}},
        {"source": "s", "setup_us": -1},
        {"source": "s", "typo": 1},
    ],
)
def test_bad_cost_tables_are_named(document):
    with pytest.raises(InputError, match="my table"):
        parse_cost(document, "my table")
