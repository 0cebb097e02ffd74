"""Adapts tool calls and their results to a chat template.

Clients send calls in one form, templates differ: some concatenate arguments as text, some accept one call per turn,
some require ids in a certain form, some know no calls or no tools at all. What a template doesn't render is written
into the text of messages. Results are matched with their calls first.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.errors import InvalidRequest
from headrace.text.template_probe import TemplateTraits
from headrace.text.written_numbers import parse_written
from headrace.tool_calls.syntaxes import CallSyntax
from headrace.types.chat import ChatMessage, TextPart, ToolCall

_MAX_DEPTH = 200
"""Nesting of arguments; deeper ones are shown as text. Request bodies have the same limit."""

_TOOLS = "You may call these tools:\n{tools}\n\nTo call some, write nothing but {form}"
_CALL = '<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
_SHORT_LENGTH = 9
_ALPHANUMERICS = string.digits + string.ascii_letters


def fit_tool_turns(messages: tuple[ChatMessage, ...], traits: TemplateTraits) -> tuple[ChatMessage, ...]:
    """The conversation with its calls and results as the template accepts them. Every content is one text or empty."""
    fitted = _with_ids(matched_results(messages, traits), traits)
    if not traits.takes_thoughts and not traits.inserts_text:
        fitted = tuple(_with_thoughts_joined(message) for message in fitted)
    if not traits.shows_calls:
        fitted = tuple(_with_calls_as_text(message) for message in fitted)
    fitted = _with_results_as_text(fitted, traits)
    return fitted if traits.takes_several_calls else tuple(_one_call_a_turn(fitted))


def matched_results(messages: Sequence[ChatMessage], traits: TemplateTraits) -> tuple[ChatMessage, ...]:
    """The conversation with results that have the ids and names of their calls, in the order of the calls unless the
    prompt shows ids. Raises InvalidRequest."""
    paired = paired_results(messages)
    return paired if traits.shows_ids and traits.takes_several_calls else in_call_order(paired)


def with_results_joined(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages of a template's form, with text results moved into the turn of their calls."""
    joined: list[Mapping[str, Any]] = []
    for message in messages:
        turn = joined[-1] if joined else {}
        if message["role"] == "tool" and "tool_calls" in turn and isinstance(message["content"], str):
            response = {"name": message.get("name", "unknown"), "response": message["content"]}
            joined[-1] = {**turn, "tool_responses": [*turn.get("tool_responses", ()), response]}
        else:
            joined.append(message)
    return joined


def tools_note(tools: Sequence[dict[str, Any]], syntax: CallSyntax) -> ChatMessage:
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return ChatMessage("system", (TextPart(_TOOLS.format(tools=listed, form=syntax.description)),))


def call_arguments(text: str, traits: TemplateTraits) -> Any:
    """A call's arguments as the template expects them; no text means no arguments. For numbers see `parse_written`."""
    text = text if text.strip() else "{}"
    try:
        parsed = parse_written(text)
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict) and not _is_deep(parsed):
        return parsed if traits.arguments == "mapping" else text
    return text if traits.takes_broken_arguments or traits.arguments == "text" else {"arguments": text}


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [each for values in inner for each in values if isinstance(each, dict | list)]
        if not level:
            return False
    return True


def _with_ids(messages: tuple[ChatMessage, ...], traits: TemplateTraits) -> tuple[ChatMessage, ...]:
    form = traits.ids
    if form == "any":
        return messages if traits.takes_brief_ids else tuple(map(_without_brief_ids, messages))
    new_ids: dict[str, str] = {}
    count = 0
    changed = []
    for message in messages:
        calls = []
        for call in message.tool_calls:
            new_ids[call.id] = _counted_id(call, count) if form == "counted" else _short_id(call.id)
            calls.append(replace(call, id=new_ids[call.id]))
            count += 1
        result_id = message.tool_call_id
        if result_id is not None:
            result_id = new_ids.get(result_id) or (_short_id(result_id) if form == "short" else result_id)
        changed.append(replace(message, tool_calls=tuple(calls), tool_call_id=result_id))
    return tuple(changed)


def _without_brief_ids(message: ChatMessage) -> ChatMessage:
    calls = tuple(replace(call, id=_no_brief_id(call.id)) for call in message.tool_calls)
    result_id = message.tool_call_id
    return replace(message, tool_calls=calls, tool_call_id=None if result_id is None else _no_brief_id(result_id))


def _no_brief_id(call_id: str) -> str:
    return call_id if len(call_id) >= _SHORT_LENGTH else _short_id(call_id)


def _counted_id(call: ToolCall, count: int) -> str:
    name, _, index = call.id.rpartition(":")
    return call.id if name.endswith(call.name) and index.isdigit() else f"functions.{call.name}:{count}"


def _short_id(call_id: str) -> str:
    """Nine letters and digits derived from the id, so that a turn always renders the same."""
    if len(call_id) == _SHORT_LENGTH and set(call_id) <= set(_ALPHANUMERICS):
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode(errors="replace")).digest())
    digits = []
    for _ in range(_SHORT_LENGTH):
        number, digit = divmod(number, len(_ALPHANUMERICS))
        digits.append(_ALPHANUMERICS[digit])
    return "".join(digits)


def _with_thoughts_joined(message: ChatMessage) -> ChatMessage:
    """A call's content appended to the thinking before it, where the template accepts only one of them."""
    text = content_text(message)
    if not message.tool_calls or not message.reasoning or not text:
        return message
    return replace(message, content=(), reasoning=f"{message.reasoning}\n\n{text}")


def _with_calls_as_text(message: ChatMessage) -> ChatMessage:
    if not message.tool_calls:
        return message
    written = (
        _CALL.format(name=json.dumps(call.name, ensure_ascii=False), arguments=call.arguments.strip() or "{}")
        for call in message.tool_calls
    )
    text = "\n".join(part for part in (content_text(message), *written) if part)
    return replace(message, content=(TextPart(text),), tool_calls=())


def _with_results_as_text(messages: tuple[ChatMessage, ...], traits: TemplateTraits) -> tuple[ChatMessage, ...]:
    called = {call.id for message in messages for call in message.tool_calls}
    changed = []
    for message in messages:
        is_lone = message.tool_call_id not in called
        if message.role == "tool" and (not traits.shows_results or (is_lone and not traits.takes_lone_results)):
            content = (TextPart("<tool_response>"), *message.content, TextPart("</tool_response>"))
            message = ChatMessage("user", content)
        changed.append(message)
    return tuple(changed)


def _one_call_a_turn(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        if len(message.tool_calls) < 2:
            yield message
            continue
        results: list[ChatMessage] = []
        while index < len(messages) and messages[index].role == "tool":
            results.append(messages[index])
            index += 1
        for number, call in enumerate(message.tool_calls):
            yield replace(message, tool_calls=(call,)) if not number else ChatMessage("assistant", tool_calls=(call,))
            yield from (each for each in results if each.tool_call_id == call.id)
        known = {call.id for call in message.tool_calls}
        yield from (each for each in results if each.tool_call_id not in known)


def content_text(message: ChatMessage) -> str:
    """The text of a message; parts are joined by a newline, media are left out."""
    return "\n".join(part.text for part in message.content if isinstance(part, TextPart))


@dataclass(slots=True, eq=False)
class _OpenCall:
    """A call: the client's id, its new id, and whether its result has been found."""

    sent_id: str
    call: ToolCall
    is_answered: bool = False


def paired_results(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """The conversation with a unique id on every call of a turn, and each result with its call's id and name.

    Missing and repeated ids are replaced. A result without an id, or with an ambiguous one, answers the first
    unanswered call of the latest turn. A result with an unknown id stays unchanged. Raises InvalidRequest, naming the
    field, for a second result of one call and if no call is left.
    """
    paired = list(messages)
    open_calls: dict[str, deque[_OpenCall]] = {}
    starts = [index for index, message in enumerate(messages) if message.tool_calls]
    num_calls = 0
    for start, end in zip((-1, *starts), (*starts, len(messages)), strict=True):
        turn: list[_OpenCall] = []
        if start >= 0:
            turn = _with_unique_ids(messages[start].tool_calls, num_calls)
            num_calls += len(turn)
            if any(each.call is not call for each, call in zip(turn, messages[start].tool_calls, strict=True)):
                paired[start] = replace(messages[start], tool_calls=tuple(each.call for each in turn))
        for each in reversed(turn):
            open_calls.setdefault(each.sent_id, deque()).appendleft(each)
        left = deque(turn)
        results = [index for index in range(start + 1, end) if messages[index].role == "tool"]
        # Those that name their call come first, so that none without an id takes it.
        for index in sorted(results, key=lambda index: not messages[index].tool_call_id):
            sent_id = messages[index].tool_call_id
            if not sent_id:
                paired[index] = _answering(messages[index], left)
            elif sent_id in open_calls:
                paired[index] = _answering(messages[index], open_calls[sent_id])
    return tuple(paired)


def in_call_order(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Results that directly follow a turn of several calls in the order of these; others after them."""
    return tuple(_ordered(messages))


def _ordered(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    places: dict[str | None, int] = {}
    results: list[ChatMessage] = []
    for message in messages:
        if message.role == "tool":
            results.append(message)
            continue
        yield from _sorted(results, places)
        results = []
        places = {call.id: place for place, call in enumerate(message.tool_calls)}
        yield message
    yield from _sorted(results, places)


def _sorted(results: Iterable[ChatMessage], places: dict[str | None, int]) -> list[ChatMessage]:
    return sorted(results, key=lambda result: places.get(result.tool_call_id, len(places)))


def _with_unique_ids(calls: Sequence[ToolCall], num_earlier: int) -> list[_OpenCall]:
    """num_earlier: calls earlier in the conversation, from which generated ids count on."""
    taken = {call.id for call in calls}
    seen: set[str] = set()
    unique: list[_OpenCall] = []
    for number, call in enumerate(calls, start=num_earlier):
        call_id = call.id
        if not call_id or call_id in seen:
            call_id = f"call_{number}"
            while call_id in taken:
                call_id += "_"
            taken.add(call_id)
        seen.add(call_id)
        unique.append(_OpenCall(call.id, call if call_id == call.id else replace(call, id=call_id)))
    return unique


def _answering(result: ChatMessage, candidates: deque[_OpenCall]) -> ChatMessage:
    """The result with the id and name of the first of these calls without one; removes those that have one."""
    while candidates:
        found = candidates.popleft()
        if not found.is_answered:
            found.is_answered = True
            return replace(result, tool_call_id=found.call.id, name=found.call.name)
    fault = "the call already has a result" if result.tool_call_id else "there is no call without a result"
    raise InvalidRequest(f"{result.param}: {fault}", param=result.param)
