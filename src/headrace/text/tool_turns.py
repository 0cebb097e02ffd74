"""Adapts tool calls and their results to a chat template.

Clients send calls in one form, templates differ: some concatenate arguments as text, some accept one call per turn,
some require ids in a certain form, some know no calls or no tools at all. Probing finds what a template accepts; what
it doesn't render is written into the text of messages.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from headrace.text.tool_results import in_call_order, paired_results
from headrace.text.written_numbers import parse_written
from headrace.tool_calls.syntaxes import CallSyntax
from headrace.types.chat import ChatMessage, TextPart, ToolCall

IdForm = Literal["any", "short", "counted"]

_MAX_DEPTH = 200
"""Nesting of arguments; deeper ones are shown as text. Request bodies have the same limit."""

Try = Callable[[list[dict[str, Any]]], str | None]
"""Renders messages of the template's form with a tool declared; None if the template refuses."""

_TOOLS = "You may call these tools:\n{tools}\n\nTo call some, write nothing but {form}"
_LIST = "a list of calls on one line: [name(argument='value'), other_name()]"
_ELEMENTS = """this, once for each call:
<tool_call>
{"name": "the tool", "arguments": {"its argument": "value"}}
</tool_call>"""
_CALL = '<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
_SHORT_LENGTH = 9
_TOOL_ROLE = re.compile(r"==\s*['\"]tool['\"]")
_ALPHANUMERICS = string.digits + string.ascii_letters

_QUESTION = {"role": "user", "content": "?"}
_VALUES = ("probe of a value", "probe of another")
_MAPPINGS = tuple({"probe_key": value} for value in _VALUES)
_BROKEN = "probe that is no JSON"
_TEXTS = tuple(map(json.dumps, _MAPPINGS))
_IDS: tuple[tuple[IdForm, tuple[str, str]], ...] = (
    ("any", ("call_0123456789abcdef01234567", "call_123456789abcdef012345678")),
    ("short", ("abcdefgh1", "abcdefgh2")),
)
_NAMES = ("probe_tool", "other_tool")
_ANSWER = "probe of a result"

PROBE_TOOLS = tuple(
    {"type": "function", "function": {"name": name, "description": "?", "parameters": {"type": "object"}}}
    for name in _NAMES
)


@dataclass(frozen=True, slots=True)
class ToolTraits:
    """How a chat template accepts calls.

    shows_tools, shows_calls, shows_results: it renders them at all.
    arguments: the form that it expects.
    takes_broken: arguments that are no JSON object are shown as text.
    takes_several: several calls per turn.
    takes_lone_results: a result without a call.
    ids: the required form of ids.
    shows_ids: calls and results have their ids in the prompt.
    takes_thoughts: a call may have thinking and content.
    joins_results: results must be in the turn of their calls, as `tool_responses`.
    """

    shows_tools: bool = True
    shows_calls: bool = True
    shows_results: bool = True
    arguments: Literal["mapping", "text"] = "mapping"
    takes_broken: bool = True
    takes_several: bool = True
    takes_lone_results: bool = True
    ids: IdForm = "any"
    shows_ids: bool = False
    takes_thoughts: bool = True
    joins_results: bool = False


def find_tool_traits(attempt: Try, *, source: str, counts_ids: bool, reasoning_keys: Sequence[str]) -> ToolTraits:
    """Probe a template with short conversations. counts_ids: the family's ids count its calls."""
    shows_tools = _NAMES[0] in (attempt([_QUESTION]) or "")
    shows_lone_results = any(_ANSWER in (attempt(_lone_result(ids)) or "") for _, ids in _IDS)
    for form, ids in _IDS:
        mapping, text = (attempt(_conversation(ids, arguments)) for arguments in (_MAPPINGS[:1], _TEXTS[:1]))
        if not any(_VALUES[0] in (rendered or "") for rendered in (mapping, text)):
            continue
        wants_text = mapping is None or (repr(_MAPPINGS[0]) in mapping and _TEXTS[0] in (text or ""))
        arguments = _TEXTS if wants_text else _MAPPINGS
        return ToolTraits(
            shows_tools=shows_tools,
            shows_results=_ANSWER in (mapping or "") + (text or ""),
            arguments="text" if wants_text else "mapping",
            takes_broken=_BROKEN in (attempt(_conversation(ids, (_BROKEN,))) or ""),
            takes_several=_VALUES[1] in (attempt(_conversation(ids, arguments)) or ""),
            takes_lone_results=shows_lone_results,
            ids="counted" if counts_ids else form,
            # Once for the call and once for its result.
            shows_ids=((mapping or text or "").count(ids[0])) > 1,
            joins_results="tool_responses" in source and _TOOL_ROLE.search(source) is None,
            takes_thoughts=attempt(_conversation(ids, arguments[:1], reasoning_keys)) is not None,
        )
    return ToolTraits(
        shows_tools=shows_tools,
        shows_calls=False,
        shows_results=shows_lone_results,
        takes_lone_results=shows_lone_results,
    )


def fit_tool_turns(messages: tuple[ChatMessage, ...], traits: ToolTraits) -> tuple[ChatMessage, ...]:
    """The conversation with its calls and results as the template accepts them. Every content is one text or empty."""
    fitted = _with_ids(matched_results(messages, traits), traits.ids)
    if not traits.takes_thoughts:
        fitted = tuple(_with_thoughts_joined(message) for message in fitted)
    if not traits.shows_calls:
        fitted = tuple(_with_calls_as_text(message) for message in fitted)
    fitted = _with_results_as_text(fitted, traits)
    return fitted if traits.takes_several else tuple(_one_call_a_turn(fitted))


def matched_results(messages: Sequence[ChatMessage], traits: ToolTraits) -> tuple[ChatMessage, ...]:
    """The conversation with results that have the ids and names of their calls, in the order of the calls unless the
    prompt shows ids. Raises InvalidRequest."""
    paired = paired_results(messages)
    return paired if traits.shows_ids and traits.takes_several else in_call_order(paired)


def with_results_joined(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of a template's form, with text results moved into the turn of their calls."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        turn = joined[-1] if joined else {}
        if message["role"] == "tool" and "tool_calls" in turn and isinstance(message["content"], str):
            response = {"name": message.get("name", "unknown"), "response": message["content"]}
            joined[-1] = {**turn, "tool_responses": [*turn.get("tool_responses", ()), response]}
        else:
            joined.append(message)
    return joined


def tools_note(tools: Sequence[dict[str, Any]], syntax: CallSyntax | None) -> ChatMessage:
    """A system message that describes the tools and how to call them."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    form = _LIST if syntax is not None and syntax.asked_as == "list" else _ELEMENTS
    return ChatMessage("system", (TextPart(_TOOLS.format(tools=listed, form=form)),))


def call_arguments(text: str, traits: ToolTraits) -> Any:
    """A call's arguments as the template expects them; no text means no arguments. For numbers see `parse_written`."""
    text = text if text.strip() else "{}"
    try:
        parsed = parse_written(text)
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict) and not _is_deep(parsed):
        return parsed if traits.arguments == "mapping" else text
    return text if traits.takes_broken or traits.arguments == "text" else {"arguments": text}


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [each for values in inner for each in values if isinstance(each, dict | list)]
        if not level:
            return False
    return True


def _conversation(ids: Sequence[str], arguments: Sequence[Any], thoughts: Sequence[str] = ()) -> list[dict[str, Any]]:
    """A question, one call per arguments, and their results. thoughts: fields with thinking."""
    content: dict[str, Any] = {"content": "?", **dict.fromkeys(thoughts, "So.")} if thoughts else {"content": ""}
    calls, results = [], []
    for call_id, name, each in zip(ids, _NAMES, arguments, strict=False):
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": each}})
        results.append({"role": "tool", "content": _ANSWER, "tool_call_id": call_id, "name": name})
    return [_QUESTION, {"role": "assistant", **content, "tool_calls": calls}, *results]


def _lone_result(ids: Sequence[str]) -> list[dict[str, Any]]:
    result = {"role": "tool", "content": _ANSWER, "tool_call_id": ids[0], "name": _NAMES[0]}
    return [_QUESTION, {"role": "assistant", "content": "?"}, result]


def _with_ids(messages: tuple[ChatMessage, ...], form: IdForm) -> tuple[ChatMessage, ...]:
    if form == "any":
        return messages
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
    text = _text(message)
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
    text = "\n".join(part for part in (_text(message), *written) if part)
    return replace(message, content=(TextPart(text),), tool_calls=())


def _with_results_as_text(messages: tuple[ChatMessage, ...], traits: ToolTraits) -> tuple[ChatMessage, ...]:
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
    """Every call in a separate turn, with its results after it."""
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


def _text(message: ChatMessage) -> str:
    return "\n".join(part.text for part in message.content if isinstance(part, TextPart))
