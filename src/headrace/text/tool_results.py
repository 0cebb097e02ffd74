"""Matches tool results with their calls, and orders them by these."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from headrace.errors import InvalidRequest
from headrace.types.chat import ChatMessage, ToolCall


@dataclass(slots=True, eq=False)
class _Call:
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
    open_calls: dict[str, deque[_Call]] = {}
    starts = [index for index, message in enumerate(messages) if message.tool_calls]
    num_calls = 0
    for start, end in zip((-1, *starts), (*starts, len(messages)), strict=True):
        turn: list[_Call] = []
        if start >= 0:
            turn = _with_unique_ids(messages[start].tool_calls, num_calls)
            num_calls += len(turn)
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


def _with_unique_ids(calls: Sequence[ToolCall], num_earlier: int) -> list[_Call]:
    """num_earlier: calls earlier in the conversation, from which generated ids count on."""
    taken = {call.id for call in calls}
    seen: set[str] = set()
    unique: list[_Call] = []
    for number, call in enumerate(calls, start=num_earlier):
        call_id = call.id
        if not call_id or call_id in seen:
            call_id = f"call_{number}"
            while call_id in taken:
                call_id += "_"
            taken.add(call_id)
        seen.add(call_id)
        unique.append(_Call(call.id, call if call_id == call.id else replace(call, id=call_id)))
    return unique


def _answering(result: ChatMessage, candidates: deque[_Call]) -> ChatMessage:
    """The result with the id and name of the first of these calls without one; removes those that have one."""
    while candidates:
        found = candidates.popleft()
        if not found.is_answered:
            found.is_answered = True
            return replace(result, tool_call_id=found.call.id, name=found.call.name)
    fault = "the call already has a result" if result.tool_call_id else "there is no call without a result"
    raise InvalidRequest(f"{result.param}: {fault}", param=result.param)
