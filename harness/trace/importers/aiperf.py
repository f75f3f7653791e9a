"""Import of aiperf conversations: multi_turn and dag_jsonl, one conversation a line.

multi_turn: {session_id?, turns: [{text | texts, delay (ms)?, output_length?, model?}]}. dag_jsonl: {session_id, turns:
[{messages, max_tokens?, model?, delay?, forks?, spawns?}], pre_session_spawns?, orchestrator?, spawns?, rounds?,
think_time_ms?, context_mode?}. A turn adds to its conversation, as aiperf plays it: the prompt is all earlier turns
and their answers, then the turn. Answers are not in the file, so their tokens are new ones, as many as the turn's
output length says. A forked conversation begins with its parent's context, a spawned one with nothing; both become
chains of the session of the conversation that they hang on in the end. Conversations may name others further down,
so a dag_jsonl file is held in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from harness.trace import source
from harness.trace.importers.aiperf_play import Play, Turn
from harness.trace.importers.common import TEXT_ROW_LIMIT_BYTES, file_id, refused, typed_row
from harness.trace.importers.options import ImportOptions
from harness.trace.importers.tokens import TokenStream
from harness.trace.model import Session
from harness.trace.rows import Count, Name, Seconds

ISOLATED = "message_array_with_responses"


class TextRow(Struct):
    """A named text, one of several in a turn."""

    contents: list[str] = []


class SimpleTurnRow(Struct):
    """A turn of the multi_turn form; further keys (images, audio, ..) are ignored."""

    text: str | None = None
    texts: list[str | TextRow] = []
    delay: Seconds = 0.0
    output_length: Count | None = None
    max_tokens: Count | None = None
    model: str | None = None


class SimpleRow(Struct):
    """A conversation of the multi_turn form."""

    turns: list[SimpleTurnRow]
    session_id: Name | None = None


class ForkRow(Struct):
    """A fork in its object form."""

    child: Name
    background: bool = False


class SpawnRow(Struct):
    """A spawn in its object form."""

    children: list[Name]
    join_at: Count | None = None


class TurnRow(Struct):
    """A turn of the dag_jsonl form."""

    messages: list[dict[str, Any]]
    model: str | None = None
    max_tokens: Count | None = None
    delay: Seconds = 0.0
    forks: list[str | ForkRow] = []
    spawns: list[str | SpawnRow] = []


class RoundRow(Struct):
    """A round of an orchestrator."""

    spawns: list[Name]
    think_time_ms: Seconds | None = None


class ConversationRow(Struct):
    """A conversation of the dag_jsonl form."""

    session_id: Name
    turns: list[TurnRow] = []
    orchestrator: bool = False
    spawns: list[Name] = []
    rounds: Count | list[RoundRow] | None = None
    think_time_ms: Seconds = 0.0
    pre_session_spawns: list[Name] = []
    context_mode: (
        Literal["deltas_without_responses", "deltas_with_responses", "message_array_with_responses"] | None
    ) = None


Conversations = dict[str, tuple[int, ConversationRow]]


def is_dag(first_row: dict[str, Any]) -> bool:
    """Whether a file's first row is a conversation of the dag_jsonl form."""
    turns = first_row.get("turns")
    if "session_id" not in first_row:
        return False
    if first_row.get("orchestrator") is True:
        return True
    return isinstance(turns, list) and any(
        isinstance(turn, dict) and {"messages", "forks", "spawns"} & turn.keys() for turn in turns
    )


def is_multi_turn(first_row: dict[str, Any]) -> bool:
    """Whether a file's first row is a conversation of the multi_turn form."""
    return isinstance(first_row.get("turns"), list) and not is_dag(first_row)


def read_multi_turn(path: Path, check_blocks: bool, options: ImportOptions) -> Iterator[Session]:
    """Sessions of a multi_turn file, one a line. `check_blocks` changes nothing here: blocks come from the text."""
    stream = TokenStream(options)
    seen: set[str] = set()
    for number, line in source.read_lines(path, TEXT_ROW_LIMIT_BYTES):
        row = typed_row(path, number, line, SimpleRow)
        name = row.session_id or f"{file_id(path)}-{number}"
        if name in seen:
            raise refused(path, number, "session_id", f"{name!r} stands twice in the file")
        seen.add(name)
        play = Play(name, stream)
        context, last = b"", None
        for turn in row.turns:
            output = turn.output_length if turn.output_length is not None else turn.max_tokens
            step = Turn(_texts(turn), _output(path, number, output, options), turn.model)
            waits = () if last is None else (last,)
            context, last = play.call(step, "main", waits, turn.delay / 1000, context)
        yield play.session()


def _texts(turn: SimpleTurnRow) -> str:
    parts = [] if turn.text is None else [turn.text]
    for text in turn.texts:
        parts += [text] if isinstance(text, str) else text.contents
    return "\n".join(parts)


def _output(path: Path, number: int, tokens: int | None, options: ImportOptions) -> int:
    if tokens is None:
        tokens = options.output_tokens
    if tokens is None:
        raise refused(path, number, "turns", "a turn has no output length", "give --output-tokens for such turns")
    return tokens


def read_dag(path: Path, check_blocks: bool, options: ImportOptions) -> Iterator[Session]:
    """Sessions of a dag_jsonl file: the conversations that no other one begins. `check_blocks` changes nothing here."""
    conversations: Conversations = {}
    for number, line in source.read_lines(path, TEXT_ROW_LIMIT_BYTES):
        row = typed_row(path, number, line, ConversationRow)
        if row.session_id in conversations:
            raise refused(path, number, "session_id", f"{row.session_id!r} stands twice in the file")
        conversations[row.session_id] = (number, row)
    children: set[str] = set()
    for number, row in conversations.values():
        for child in _named(row):
            if child not in conversations:
                raise refused(
                    path, number, "session_id", f"the conversation {child!r} that it begins is not in the file"
                )
            children.add(child)
    roots = [name for name in conversations if name not in children]
    if conversations and not roots:
        raise refused(path, 1, "session_id", "every conversation is begun by another one")
    stream = TokenStream(options)
    reached: set[str] = set()
    for name in roots:
        dag = _Dag(path, conversations, options, Play(name, stream), reached)
        dag.run(name, "main", (), 0.0, b"", ())
        yield dag.play.session()
    for name, (number, _) in conversations.items():
        if name not in reached:
            raise refused(path, number, "session_id", "the conversation is begun only by those that it begins itself")


def _named(row: ConversationRow) -> Iterator[str]:
    for turn in row.turns:
        for fork in turn.forks:
            yield fork if isinstance(fork, str) else fork.child
        for spawn in turn.spawns:
            yield from [spawn] if isinstance(spawn, str) else spawn.children
    yield from row.spawns
    yield from row.pre_session_spawns
    for round_ in row.rounds if isinstance(row.rounds, list) else []:
        yield from round_.spawns


class _Dag:
    """Plays one root conversation with all that hangs on it into a session."""

    def __init__(
        self, path: Path, conversations: Conversations, options: ImportOptions, play: Play, reached: set[str]
    ) -> None:
        self.play = play
        self._path, self._conversations, self._options = path, conversations, options
        self._reached = reached
        self._chains = 0

    def run(
        self, name: str, chain: str, waits: tuple[int, ...], delay_s: float, context: bytes, above: tuple[str, ...]
    ) -> tuple[int, ...]:
        """Play a conversation; returns the calls that have to end for it, and what it forked, to be over."""
        number, row = self._conversations[name]
        if name in above:
            raise refused(self._path, number, "session_id", f"{name!r} begins itself, by way of others")
        self._reached.add(name)
        above = (*above, name)
        for child in row.pre_session_spawns:
            self.run(child, self._chain("f"), waits, delay_s, b"", above)
        if row.orchestrator:
            return self._rounds(row, waits, delay_s, above)
        joins: dict[int, list[int]] = {}
        over: list[int] = []
        for place, turn in enumerate(row.turns):
            if row.context_mode == ISOLATED:
                context = b""
            output = _output(self._path, number, turn.max_tokens, self._options)
            step = Turn(message_text(turn.messages), output, turn.model)
            wanted = tuple({*waits, *joins.pop(place, [])})
            context, last = self.play.call(step, chain, wanted, delay_s + turn.delay / 1000, context)
            waits, delay_s = (last,), 0.0
            for fork in turn.forks:
                child, background = (fork, False) if isinstance(fork, str) else (fork.child, fork.background)
                ends = self.run(child, self._chain("f"), waits, 0.0, context, above)
                over += [] if background else ends
            for spawn in turn.spawns:
                group = SpawnRow([spawn]) if isinstance(spawn, str) else spawn
                at = place + 1 if group.join_at is None else group.join_at
                if at <= place:
                    raise refused(self._path, number, "join_at", f"{at} is not after the turn {place} that spawns")
                for child in group.children:
                    ends = self.run(child, self._chain("s"), waits, 0.0, b"", above)
                    joins.setdefault(at, []).extend(ends)
        # What would join after the last turn is joined by whoever waits for this conversation.
        return tuple({*waits, *over, *(end for ends in joins.values() for end in ends)})

    def _rounds(
        self, row: ConversationRow, waits: tuple[int, ...], delay_s: float, above: tuple[str, ...]
    ) -> tuple[int, ...]:
        rounds: list[RoundRow]
        if isinstance(row.rounds, list):
            rounds = row.rounds
        else:
            rounds = [RoundRow(row.spawns)] * (1 if row.rounds is None else row.rounds)
        for round_ in rounds:
            think_ms = row.think_time_ms if round_.think_time_ms is None else round_.think_time_ms
            ends: list[int] = []
            for child in round_.spawns:
                ends += self.run(child, self._chain("s"), waits, delay_s + think_ms / 1000, b"", above)
            waits, delay_s = tuple(ends), 0.0
        return waits

    def _chain(self, kind: str) -> str:
        self._chains += 1
        return f"s{self._chains}.0" if kind == "s" else f"f{self._chains}"


def message_text(messages: list[dict[str, Any]]) -> str:
    """Chat messages as one text in which an appended message leaves everything before it as it was."""
    return "".join(f"<{message.get('role', '')}>{_content(message)}\n" for message in messages)


def _content(message: dict[str, Any]) -> str:
    parts = message.get("content", message.get("parts"))
    found = []
    for part in parts if isinstance(parts, list) else [parts]:
        text = part.get("text", part.get("content")) if isinstance(part, dict) else part
        found.append(text if isinstance(text, str) else "" if part is None else str(part))
    if message.get("tool_calls"):
        found.append(str(message["tool_calls"]))
    return "\n".join(found)
