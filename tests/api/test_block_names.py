"""Names of blocks: equal prefix, equal name, never two contents under one name; hashes are vLLM's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fake_workers.api.block_names import NONE_HASH, BlockNames, block_hash, chunk_hash, event_hash

SIZE = 4
TOKEN = st.integers(0, 1)


def test_hashes_are_those_of_vllm() -> None:
    """Values that vLLM 0.32 itself computed (sha256, no seed)."""
    assert NONE_HASH.hex() == "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198"
    first = block_hash(None, range(16))
    assert first.hex().startswith("fe8fa5dda3210d0c") and first.hex().endswith("434798")
    assert event_hash(first) == int.from_bytes(first[-8:], "big")


@given(
    st.lists(
        st.tuples(
            st.lists(TOKEN, min_size=1, max_size=5 * SIZE),
            st.lists(TOKEN, max_size=3 * SIZE),
            st.sampled_from([None, "s"]),
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 40),
)
def test_names_mean_contents(requests: list[tuple[list[int], list[int], str | None]], most: int) -> None:
    names = BlockNames(SIZE, most)
    meaning: dict[tuple[int, int], tuple[object, ...]] = {}
    for prompt, outputs, salt in requests:
        named = names.name(prompt, outputs, salt)
        full = len(prompt) // SIZE
        assert [p for _, a, b in named.runs for p in range(a, b)] == list(range(full))
        tokens = prompt + outputs
        blocks = [(o, p) for o, a, b in named.runs for p in range(a, b)]
        blocks += [(named.origin, p) for p in range(full, len(tokens) // SIZE)]
        for place in blocks:
            content = (salt, *tokens[: (place[1] + 1) * SIZE])
            assert meaning.setdefault(place, content) == content


@given(st.lists(TOKEN, min_size=SIZE, max_size=6 * SIZE), st.lists(TOKEN, max_size=2 * SIZE))
def test_a_follow_up_finds_prompt_and_answer(prompt: list[int], outputs: list[int]) -> None:
    names = BlockNames(SIZE, 1000)
    first = names.name(prompt, outputs)
    again = names.name([*prompt, *outputs, 7, 7, 7, 7, 7], [])
    known = (len(prompt) + len(outputs)) // SIZE
    before = [(o, p) for o, a, b in first.runs for p in range(a, b)]
    before += [(first.origin, p) for p in range(len(prompt) // SIZE, known)]
    after = [(o, p) for o, a, b in again.runs for p in range(a, b)]
    assert after[:known] == before


def test_events_get_hashes_and_tokens_back() -> None:
    names = BlockNames(SIZE, 1000)
    prompt = list(range(10))
    named = names.name(prompt, [], "salty", ("adapter", "/path"))
    found = names.describe(named.origin, 0, 2)
    assert found is not None
    hashes, tokens = found
    extra = (("lora", "adapter", "/path"), ("cache_salt", "salty"))
    digest = block_hash(None, prompt[:4], extra)
    assert tokens == prompt[:8]
    assert hashes[0] == event_hash(digest)
    assert hashes[1] == event_hash(block_hash(digest, prompt[4:8], extra[:1]))
    assert names.extra_keys(named.origin) == ("adapter", "salty")


def test_a_chain_goes_on_over_names() -> None:
    """Blocks that an origin continues are found under the names of those that brought them."""
    names = BlockNames(SIZE, 1000)
    first = list(range(10))
    names.name(first, [50, 51])
    longer = [*first, 50, 51, *range(60, 72)]
    named = names.name(longer, [])
    assert len(named.runs) == 2
    found = names.chain(named.origin, 1, 5)
    digest, hashes = None, []
    for i in range(6):
        digest = block_hash(digest, longer[4 * i : 4 * i + 4])
        hashes.append(event_hash(digest))
    assert found == (hashes[1:], longer[4:24])
    assert names.chain(named.origin, 4, 1) == names.describe(named.origin, 4, 1)
    assert names.chain(named.origin, 4, 3) is None
    assert len({chunk_hash(h) for h in hashes} | set(hashes)) == 12


def test_who_keeps_keys_hears_what_is_forgotten() -> None:
    gone: list[int] = []
    names = BlockNames(SIZE, 8, resident=lambda origin: origin == 2, forgotten=gone.append)
    origins = [names.name([100 + i] * 16, []).origin for i in range(8)]
    assert gone and set(gone) <= set(origins) - {2}
    assert all(names.describe(origin, 0, 1) is None for origin in gone)


def test_what_a_cache_holds_is_not_forgotten() -> None:
    names = BlockNames(SIZE, 8, resident=lambda origin: origin == 1)
    first = names.name(list(range(16)), [])
    for i in range(20):
        names.name([100 + i] * 16, [])
    assert len(names) <= 8 + 4
    assert names.describe(first.origin, 0, 4) is not None
