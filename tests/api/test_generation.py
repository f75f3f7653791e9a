"""What the simulated model writes, against vLLM's rules of ending."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fake_workers.api.generation import Sampling, plan
from fake_workers.api.tokenizer import WordTokenizer

T = WordTokenizer()
PROMPT = T.encode("a prompt")


def answer(mean: int = 20, prompt: list[int] = PROMPT, index: int = 0, **more: object):  # type: ignore[no-untyped-def]
    return plan(T, prompt, Sampling(**{"max_tokens": 50, **more}), index, mean)  # type: ignore[arg-type]


def test_equal_requests_equal_answers_and_others_not() -> None:
    assert answer().token_ids == answer().token_ids
    assert answer().token_ids != answer(prompt=T.encode("another")).token_ids
    assert answer().token_ids != answer(index=1).token_ids
    assert answer().token_ids != answer(seed=5).token_ids


def test_ignore_eos_runs_to_the_limit() -> None:
    found = answer(ignore_eos=True)
    assert len(found.token_ids) == 50 and found.finish_reason == "length"
    assert T.eos not in found.token_ids


def test_it_ends_by_itself() -> None:
    found = answer(max_tokens=1000)
    assert 10 <= len(found.token_ids) <= 31
    assert found.finish_reason == "stop" and found.stop_reason is None
    assert found.token_ids[-1] == T.eos and found.deltas[-1] == ""


@given(st.integers(1, 60), st.integers(0, 60), st.integers(1, 40), st.integers(0, 1000))
def test_limits_hold(max_tokens: int, min_tokens: int, mean: int, seed: int) -> None:
    min_tokens = min(min_tokens, max_tokens)
    found = answer(mean, max_tokens=max_tokens, min_tokens=min_tokens, seed=seed)
    assert min_tokens <= len(found.token_ids) <= max_tokens
    assert (found.finish_reason == "stop") == (found.token_ids[-1] == T.eos)
    assert T.encode(found.text) == [t for t in found.token_ids if t != T.eos]


@given(st.integers(0, 30), st.booleans(), st.integers(0, 12), st.integers(1, 7))
def test_stop_strings(at: int, include: bool, min_tokens: int, length: int) -> None:
    whole = answer(ignore_eos=True)
    stop = whole.text[at * 4 : at * 4 + length]
    found = answer(ignore_eos=True, stop=[stop], include_stop=include, min_tokens=min_tokens)
    text = "".join(found.deltas)
    ends = [i for i in range(len(whole.text)) if whole.text.startswith(stop, i) and (i + length + 3) // 4 > min_tokens]
    if not ends:
        assert found.token_ids == whole.token_ids and text == whole.text and found.finish_reason == "length"
        return
    end = ends[0]
    assert text == whole.text[: end + length if include else end]
    assert len(found.token_ids) == (end + length + 3) // 4
    assert (found.finish_reason, found.stop_reason) == ("stop", stop)
    assert len(found.deltas) == len(found.token_ids)


def test_stop_tokens() -> None:
    whole = answer(ignore_eos=True)
    wanted = whole.token_ids[7]
    at = whole.token_ids.index(wanted)
    found = answer(ignore_eos=True, stop_token_ids=[wanted])
    assert found.token_ids == whole.token_ids[: at + 1] and found.stop_reason == wanted
    assert found.text == T.decode(whole.token_ids[:at])
