"""The built-in tokenizer: reversible, and a simulated model's words are single tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_workers.api.tokenizer import HfTokenizer, WordTokenizer
from fake_workers.errors import InputError

TOKENIZER = WordTokenizer()


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_text_survives(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert all(0 < i < 2**32 for i in ids)


@given(st.lists(st.sampled_from(TOKENIZER.words), min_size=1))
def test_words_tokenise_back(ids: list[int]) -> None:
    assert TOKENIZER.encode(TOKENIZER.decode(ids)) == ids


@given(st.text(max_size=40), st.text(max_size=40))
def test_a_prefix_of_words_stays_a_prefix(a: str, b: str) -> None:
    """What makes prefix caching work on text: adding a sentence does not change the tokens before it."""
    ids = TOKENIZER.encode(a + "\n" if not a.endswith("\n") else a)
    longer = TOKENIZER.encode((a + "\n" if not a.endswith("\n") else a) + "x" + b)
    assert longer[: len(ids)] == ids


def test_the_end_has_no_text() -> None:
    assert TOKENIZER.piece(TOKENIZER.eos) == ""


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        HfTokenizer(tmp_path)


def test_a_hugging_face_folder(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    make_hf_tokenizer(tmp_path, tokenizers)
    tokenizer = HfTokenizer(tmp_path)
    words = list(tokenizer.words[:50])
    assert len(words) > 10
    assert tokenizer.encode(tokenizer.decode(words)) == words
    assert tokenizer.piece(tokenizer.eos) == ""
    assert tokenizer.chat([{"role": "user", "content": [{"type": "text", "text": "hi"}]}]) == "user: hi\n"


def make_hf_tokenizer(folder: Path, tokenizers: object) -> None:
    """A small byte-level BPE, trained on made-up words, with a chat template; needs no network."""
    import json
    import random

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    random.seed(0)
    syllables = ["ka", "to", "mi", "re", "lo", "su", "ne", "va", "di", "pe", "ro", "tu", "shi", "gra", "lin", "mor"]
    words = ["".join(random.choices(syllables, k=random.randint(1, 3))) for _ in range(2000)]
    text = [" ".join(random.choices(words, k=40)) for _ in range(800)]
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<|bos|>", "<|eos|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(text, trainer)
    fast.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "model_max_length": 32768,
        "chat_template": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 2000}))
