"""Text to token ids and back, without a network: a built-in scheme, or a Hugging Face tokenizer's folder.

A simulated model writes words, each of which is one token that tokenises back to itself when the words stand one after
the other. So a streamed chunk is a token, and a client with the same tokenizer counts what the server counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from fake_workers.errors import InputError

Message = dict[str, Any]

_SYLLABLES_FIRST = "bdfgklmnprstvz"
_SYLLABLES_MIDDLE = "aeiou"
_SYLLABLES_LAST = "lmnrst"


class Tokenizer(Protocol):
    """What the worker's API needs."""

    eos: int
    """The id that a model ends with."""
    words: Sequence[int]
    """Ids that a simulated model writes: any sequence of them tokenises back to itself."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special ones are left out."""

    def piece(self, token: int) -> str:
        """The text of one id alone; empty for a special one."""

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation."""


class WordTokenizer:
    """No vocabulary: a token is up to three bytes, or up to four ASCII characters, of one word with its leading space.

    Ids: 0 end of text, then single bytes, pairs, triples, then runs of four ASCII characters. All fit 32 bits.
    """

    eos = 0
    _BYTES = 1
    _PAIRS = _BYTES + (1 << 8)
    _TRIPLES = _PAIRS + (1 << 16)
    _QUADS = _TRIPLES + (1 << 24)
    _END = _QUADS + (1 << 28)
    _PIECES = re.compile(r" ?\w+| ?[^\s\w]+|\n|[^\S\n]+(?!\S)|[^\S\n]+")
    # a line's end stands alone, white space leaves its last character to the next word: what follows a text does not
    # change how it is cut

    _MOST_KNOWN = 200_000

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, ...]] = {}
        """Words that have been cut before."""
        self._bytes_of: dict[int, bytes] = {}
        self.words: Sequence[int] = [
            self.encode(f" {a}{b}{c}")[0] for a in _SYLLABLES_FIRST for b in _SYLLABLES_MIDDLE for c in _SYLLABLES_LAST
        ]

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        out: list[int] = []
        known = self._known
        for piece in self._PIECES.findall(text):
            ids = known.get(piece)
            out.extend(self._cut(piece) if ids is None else ids)
        return out

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special ones and unknown ones are left out."""
        known = self._bytes_of
        parts = []
        for token in ids:
            data = known.get(token)
            if data is None:
                data = self._bytes(token)
                if len(known) < self._MOST_KNOWN:
                    known[token] = data
            parts.append(data)
        return b"".join(parts).decode("utf-8", "replace")

    def piece(self, token: int) -> str:
        """The text of one id alone."""
        return self._bytes(token).decode("utf-8", "replace")

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The conversation in ChatML."""
        parts = [f"<|im_start|>{m.get('role', 'user')}\n{message_text(m)}<|im_end|>\n" for m in messages]
        if add_generation_prompt:
            parts.append("<|im_start|>assistant\n")
        return "".join(parts)

    def _cut(self, piece: str) -> tuple[int, ...]:
        data = piece.encode("utf-8", "surrogatepass")
        size = 4 if data.isascii() else 3
        ids = tuple(self._id(data[at : at + size]) for at in range(0, len(data), size))
        if len(self._known) < self._MOST_KNOWN:
            self._known[piece] = ids
        return ids

    def _id(self, data: bytes) -> int:
        if len(data) == 4:
            a, b, c, d = data
            return self._QUADS + (a << 21 | b << 14 | c << 7 | d)
        return (self._BYTES, self._PAIRS, self._TRIPLES)[len(data) - 1] + int.from_bytes(data, "big")

    def _bytes(self, token: int) -> bytes:
        if token < self._BYTES or token >= self._END:
            return b""
        if token >= self._QUADS:
            n = token - self._QUADS
            return bytes((n >> 21, n >> 14 & 127, n >> 7 & 127, n & 127))
        if token >= self._TRIPLES:
            return (token - self._TRIPLES).to_bytes(3, "big")
        if token >= self._PAIRS:
            return (token - self._PAIRS).to_bytes(2, "big")
        return (token - self._BYTES).to_bytes(1, "big")


class HfTokenizer:
    """A Hugging Face tokenizer's folder (tokenizer.json, tokenizer_config.json), read from disk only."""

    _MOST_WORDS = 4096

    def __init__(self, folder: Path) -> None:
        try:
            from tokenizers import Tokenizer as Fast
        except ImportError:
            raise InputError(
                f"tokenizer {folder}", "needs the package tokenizers", "pip install '.[live]' or leave it out"
            ) from None
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise InputError(f"tokenizer {folder}", "has no tokenizer.json", "give the folder of a fast tokenizer")
        try:
            self._fast = Fast.from_file(str(path))
        except Exception as error:
            raise InputError(f"tokenizer {path}", f"cannot be read ({error})", "save it again") from None
        config = _read_json(folder / "tokenizer_config.json")
        self._template = _template(folder, config)
        self._names = {key: _content(config.get(key)) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
        eos = self._fast.token_to_id(self._names["eos_token"]) if self._names["eos_token"] else None
        self.eos = eos if eos is not None else 0
        self.words: Sequence[int] = self._own_words()
        if not self.words:
            raise InputError(
                f"tokenizer {folder}", "has no words that tokenise back to themselves", "use a byte-level BPE tokenizer"
            )
        self._pieces: dict[int, str] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of a text, no special ones added."""
        ids: list[int] = self._fast.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special ones are left out."""
        return str(self._fast.decode(list(ids), skip_special_tokens=True))

    def piece(self, token: int) -> str:
        """The text of one id alone."""
        text = self._pieces.get(token)
        if text is None:
            text = self._pieces[token] = self.decode([token])
        return text

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The conversation by the tokenizer's own template, ChatML where it has none."""
        if self._template is None:
            return WordTokenizer.chat(self, messages, add_generation_prompt)  # type: ignore[arg-type]
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        flat = [{**message, "content": message_text(message)} for message in messages]
        return environment.from_string(self._template).render(
            messages=flat, add_generation_prompt=add_generation_prompt, **{k: v for k, v in self._names.items() if v}
        )

    def _own_words(self) -> list[int]:
        """Ids of lower-case words with a leading space that no pre-tokenizer merges with their neighbours."""
        found = []
        for token in range(self._fast.get_vocab_size()):
            text = self._fast.decode([token], skip_special_tokens=True)
            if len(text) > 1 and text[0] == " " and text[1:].isascii() and text[1:].isalpha() and text.islower():
                if self.encode(text) == [token] and self.encode(text + text) == [token, token]:
                    found.append(token)
                if len(found) == self._MOST_WORDS:
                    break
        return found


def load_tokenizer(folder: str | None) -> Tokenizer:
    """The tokenizer in a folder; None: the built-in one."""
    return HfTokenizer(Path(folder)) if folder else WordTokenizer()


def message_text(message: Message) -> str:
    """A message's text: its content as it is, or the text parts of a list."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return ""


def _content(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"tokenizer {path}", f"cannot be read ({error})", "save it again") from None
    return document if isinstance(document, dict) else {}


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    return template if isinstance(template, str) else None
