"""Import of OpenTelemetry traces with gen_ai spans: one document a file, in OTLP JSON or as inference-perf writes it.

OTLP: {resourceSpans: [{scopeSpans: [{spans}]}]}, nanosecond times, attributes as a list of key and value.
inference-perf: {trace_id, spans}, ISO times, attributes as an object. A span with gen_ai attributes whose operation
is chat, text_completion or generate_content (or not given) is a call. Spans with the same gen_ai.conversation.id (else
session.id, exgentic.session.id, else the trace id) make a session. Prompts are tokenised and hashed where the span
carries the messages; else the lengths in gen_ai.usage count and `reuse` says what a call repeats. Calls below
different invoke_agent spans are sub-agents of the first of them. Dependencies are derived from the recorded times, and
a call whose messages repeat the answer of an earlier one waits for that one too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from harness.trace import source
from harness.trace.chains import MAIN, end_s, split_chains
from harness.trace.dependencies import derive_dependencies, release_base_s
from harness.trace.importers.aiperf import message_text
from harness.trace.importers.common import TIME_DIGITS, Ids, hashed_call, refused, reusing_call
from harness.trace.importers.options import ImportOptions
from harness.trace.importers.tokens import TokenStream
from harness.trace.model import Call, Session
from harness.trace.prefixes import PrefixIndex

CALLS = ("chat", "text_completion", "generate_content")
AGENT = "invoke_agent"
SESSION_KEYS = ("gen_ai.conversation.id", "session.id", "exgentic.session.id")
INPUT_KEYS = ("gen_ai.input.messages", "gen_ai.prompt")
OUTPUT_KEYS = ("gen_ai.output.text", "gen_ai.output.messages", "gen_ai.completion")
INPUT_COUNTS = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
OUTPUT_COUNTS = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
NS_PER_S = 1_000_000_000


@dataclass(slots=True)
class _Span:
    place: str
    trace: str
    id: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]


@dataclass(slots=True)
class _Request:
    span: _Span
    ids: Ids | None
    input_tokens: int
    output_tokens: int
    repeats: set[int]
    """Hashes of the assistant's messages in the prompt."""
    answer: int | None
    """Hash of the answer."""


def looks_like(head: bytes) -> bool:
    """Whether the first bytes of a file are those of such a document."""
    return b'"resourceSpans"' in head or (b'"spans"' in head and b'"trace_id"' in head)


def read_otel(path: Path, check_blocks: bool, options: ImportOptions) -> Iterator[Session]:
    """Sessions of a document, by their first call. `check_blocks` changes nothing here."""
    spans = list(_spans(path))
    agents = {(span.trace, span.id): span for span in spans}
    stream = TokenStream(options)
    sessions: dict[str, list[_Request]] = {}
    for span in sorted(spans, key=lambda span: (span.start_ns, span.end_ns)):
        operation = span.attributes.get("gen_ai.operation.name")
        if any(key.startswith("gen_ai.") for key in span.attributes) and (operation is None or operation in CALLS):
            name = next((str(span.attributes[key]) for key in SESSION_KEYS if span.attributes.get(key)), span.trace)
            sessions.setdefault(name, []).append(_request(path, span, stream, options))
    if not sessions:
        raise refused(path, 0, "spans", "no span is a call with gen_ai attributes")
    first_ns = min(requests[0].span.start_ns for requests in sessions.values())
    for name, requests in sessions.items():
        start_s = (requests[0].span.start_ns - first_ns) / NS_PER_S if len(sessions) > 1 else None
        yield _session(name, requests, agents, options, start_s)


def _spans(path: Path) -> Iterator[_Span]:
    data = source.read_document(path)
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        what = "is not UTF-8" if "UTF-8" in str(error) else f"is not JSON ({error})"
        raise refused(path, 0, "", what, "check that the file is an OpenTelemetry trace and complete") from None
    if not isinstance(document, dict):
        raise refused(path, 0, "", "is not a JSON object", "check that the file is an OpenTelemetry trace")
    if "resourceSpans" not in document:
        for index, span in enumerate(_list(document.get("spans"))):
            yield _span(path, f"spans[{index}]", span, str(document.get("trace_id") or ""))
        return
    for r, resource in enumerate(_list(document["resourceSpans"])):
        for s, scope in enumerate(_list(_dict(resource).get("scopeSpans"))):
            for index, span in enumerate(_list(_dict(scope).get("spans"))):
                yield _span(path, f"resourceSpans[{r}].scopeSpans[{s}].spans[{index}]", span, "")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _span(path: Path, place: str, span: Any, trace: str) -> _Span:
    if not isinstance(span, dict):
        raise refused(path, 0, place, "is not an object")
    start_ns, end_ns = (_time_ns(path, place, span, names) for names in (_START, _END))
    if end_ns < start_ns:
        raise refused(path, 0, f"{place}.{_END[0]}", "is before the span's start")
    return _Span(
        place,
        str(span.get("trace_id") or span.get("traceId") or trace),
        str(span.get("span_id") or span.get("spanId") or place),
        str(span.get("parent_span_id") or span.get("parentSpanId") or ""),
        start_ns,
        end_ns,
        _attributes(span.get("attributes")),
    )


_START = ("start_time", "startTimeUnixNano")
_END = ("end_time", "endTimeUnixNano")


def _time_ns(path: Path, place: str, span: dict[str, Any], names: tuple[str, str]) -> int:
    iso, nano = names
    value = span.get(iso, span.get(nano))
    try:
        if iso not in span:
            return int(str(value))
        moment = datetime.fromisoformat(str(value))
    except ValueError:
        raise refused(path, 0, f"{place}.{iso if iso in span else nano}", f"is not a time: {value!r}") from None
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return ((since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds) * 1_000


def _attributes(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    found: dict[str, Any] = {}
    for entry in _list(value):
        pair = _dict(entry)
        if isinstance(pair.get("key"), str):
            found[pair["key"]] = _plain(pair.get("value"))
    return found


def _plain(value: Any) -> Any:
    """A value of OTLP JSON without its type."""
    if not isinstance(value, dict):
        return value
    if "arrayValue" in value:
        return [_plain(item) for item in _list(_dict(value["arrayValue"]).get("values"))]
    if "kvlistValue" in value:
        return _attributes(_dict(value["kvlistValue"]).get("values"))
    return next((value[key] for key in ("stringValue", "intValue", "doubleValue", "boolValue") if key in value), None)


def _request(path: Path, span: _Span, stream: TokenStream, options: ImportOptions) -> _Request:
    prompt, answer = _text(span, INPUT_KEYS), _text(span, OUTPUT_KEYS)
    repeats = {hash(_content(m)) for m in _messages(span, INPUT_KEYS) if m.get("role") == "assistant"}
    answers = [_content(m) for m in _messages(span, OUTPUT_KEYS)]
    answer_text = answers[0] if answers else answer
    said = hash(answer_text) if answer_text else None
    output = _count(path, span, OUTPUT_COUNTS)
    if output is None and answer is not None:
        output = stream.count(stream.encode(answer))
    if output is None:
        output = options.output_tokens
    if output is None:
        what = "has neither an output text nor gen_ai.usage.output_tokens"
        raise refused(path, 0, span.place, what, "give --output-tokens for such spans")
    if prompt is not None:
        data = stream.encode(prompt)
        return _Request(span, stream.ids(data), stream.count(data), output, repeats, said)
    tokens = _count(path, span, INPUT_COUNTS)
    if tokens is None:
        raise refused(path, 0, span.place, "has neither input messages nor gen_ai.usage.input_tokens")
    return _Request(span, None, tokens, output, repeats, said)


def _text(span: _Span, keys: tuple[str, ...]) -> str | None:
    messages = _messages(span, keys)
    if messages:
        return message_text(messages)
    value = next((span.attributes[key] for key in keys if span.attributes.get(key) is not None), None)
    return value if value is None else str(value)


def _messages(span: _Span, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """An attribute as messages, where it is a list of them or the JSON text of one."""
    value = next((span.attributes[key] for key in keys if span.attributes.get(key) is not None), None)
    if isinstance(value, str) and value[:1] == "[":
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError:
            return []
    return [item if isinstance(item, dict) else {"content": item} for item in _list(value)]


def _content(message: dict[str, Any]) -> str:
    return message_text([{**message, "role": ""}])[2:-1]


def _count(path: Path, span: _Span, keys: tuple[str, ...]) -> int | None:
    for key in keys:
        value = span.attributes.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not str(value).isdigit() or int(value) > 2**40:
            raise refused(path, 0, f"{span.place}.{key}", f"is not a number of tokens: {value!r}")
        return int(value)
    return None


def _session(
    name: str,
    requests: list[_Request],
    spans: dict[tuple[str, str], _Span],
    options: ImportOptions,
    start_s: float | None,
) -> Session:
    block = options.block()
    prefixes = PrefixIndex()
    calls: list[Call] = []
    groups: dict[tuple[str, str] | None, str] = {}
    labels: list[str] = []
    first_ns = requests[0].span.start_ns
    for request in requests:
        span = request.span
        t_s = (span.start_ns - first_ns) / NS_PER_S
        previous = calls[-1] if calls else None
        if request.ids is None:
            prefixes.add(np.empty(0, dtype=np.int64))
            reuse = options.reuse or 0.0
            sizes = (t_s, request.input_tokens, request.output_tokens)
            call = reusing_call(previous, len(calls), reuse, block, *sizes)
        else:
            call = hashed_call(prefixes, len(calls), request.ids, t_s, request.input_tokens, request.output_tokens)
        call.api_s = round((span.end_ns - span.start_ns) / NS_PER_S, TIME_DIGITS)
        model = span.attributes.get("gen_ai.response.model") or span.attributes.get("gen_ai.request.model")
        call.model = None if model is None else str(model)
        agent = _agent(span, spans)
        labels.append(groups.setdefault(agent, MAIN if not groups else f"s{len(groups)}"))
        calls.append(call)
    session = Session(name, block, calls, start_s=start_s)
    split_chains(calls, labels)
    derive_dependencies(session)
    _wait_for_answers(calls, requests)
    return session


def _wait_for_answers(calls: list[Call], requests: list[_Request]) -> None:
    said: dict[int, list[int]] = {}
    for call, request in zip(calls, requests, strict=True):
        earlier = {index for answer in request.repeats for index in said.get(answer, ())}
        ended = {index for index in earlier if end_s(calls[index]) <= call.t_s}
        if not ended <= set(call.deps):
            call.deps = tuple(sorted(ended.union(call.deps)))
            call.gap_s = round(max(call.t_s - release_base_s(calls, call), 0.0), TIME_DIGITS)
        if request.answer is not None:
            said.setdefault(request.answer, []).append(call.index)


def _agent(span: _Span, spans: dict[tuple[str, str], _Span]) -> tuple[str, str] | None:
    """The nearest invoke_agent span above a call."""
    seen: set[str] = set()
    above = spans.get((span.trace, span.parent))
    while above is not None and above.id not in seen:
        seen.add(above.id)
        if above.attributes.get("gen_ai.operation.name") == AGENT:
            return above.trace, above.id
        above = spans.get((above.trace, above.parent))
    return None
