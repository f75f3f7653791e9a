"""The KV event codec against vLLM's own bytes and against another msgpack implementation."""

from __future__ import annotations

import msgpack
from hypothesis import given
from hypothesis import strategies as st

from fake_workers.api import kv_events as wire

HASH = st.integers(1 << 40, (1 << 64) - 1)
EVENTS = st.lists(
    st.one_of(
        st.builds(
            wire.stored,
            st.lists(HASH, min_size=1, max_size=5),
            st.none() | HASH,
            st.lists(st.integers(0, (1 << 32) - 1), max_size=8),
            st.integers(1, 256),
        ),
        st.builds(wire.removed, st.lists(HASH, min_size=1, max_size=5)),
        st.builds(wire.AllBlocksCleared),
    ),
    max_size=6,
)


def test_bytes_of_vllm_0_32() -> None:
    """BlockRemoved and AllBlocksCleared as vLLM 0.32 encoded them (32-byte hash there, hence the splice)."""
    golden = (
        "93cb3ff80000000000009284a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391"
        "{hash}a66d656469756da3475055a967726f75705f6964780081a474797065b0416c6c426c6f636b73436c656172656400"
    )
    number = 6855480666593105943
    ours = wire.encode_batch([wire.removed([number]), wire.AllBlocksCleared()], 1.5, 0)
    assert ours.hex() == golden.format(hash="cf" + number.to_bytes(8, "big").hex())


def test_stored_has_the_fields_that_vllm_0_32_publishes() -> None:
    payload = wire.encode_batch([wire.stored([1 << 60], None, list(range(300, 316)), 16)], 2.0, 3)
    assert msgpack.unpackb(payload) == [
        2.0,
        [
            {
                "type": "BlockStored",
                "block_hashes": [1 << 60],
                "parent_block_hash": None,
                "token_ids": list(range(300, 316)),
                "block_size": 16,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [None],
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        ],
        3,
    ]


@given(EVENTS, st.none() | st.integers(0, 127))
def test_map_form_decodes_to_what_was_put_in(events: list[wire.WireEvent], rank: int | None) -> None:
    ts, decoded, got_rank = msgpack.unpackb(wire.encode_batch(events, 0.25, rank))
    assert (ts, got_rank) == (0.25, rank)
    assert [e["type"] for e in decoded] == [type(e).__name__ for e in events]
    for event, fields in zip(events, decoded, strict=True):
        for name, value in fields.items():
            if name != "type":
                assert value == getattr(event, name)


@given(EVENTS)
def test_array_form_is_the_map_form_by_position(events: list[wire.WireEvent]) -> None:
    _, as_arrays, _ = msgpack.unpackb(wire.encode_batch(events, 0.0, 0, "array"))
    _, as_maps, _ = msgpack.unpackb(wire.encode_batch(events, 0.0, 0, "map"))
    for array, fields in zip(as_arrays, as_maps, strict=True):
        assert array == [fields["type"], *(v for k, v in fields.items() if k != "type")]


def test_array_form_leaves_trailing_defaults_out() -> None:
    event = wire.BlockStored(
        block_hashes=[1 << 60],
        parent_block_hash=None,
        token_ids=[1],
        block_size=1,
        lora_id=None,
        medium=None,
        lora_name=None,
    )
    assert wire.as_array(event) == ["BlockStored", [1 << 60], None, [1], 1, None, None, None]


def test_topic_and_sequence_frames() -> None:
    assert wire.topic("127.0.0.2", 8000, "org/model") == b"kv@127.0.0.2:8000@org/model"
    assert wire.sequence_frame(258) == b"\0\0\0\0\0\0\1\2"
