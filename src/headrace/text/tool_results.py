"""Which call of a conversation each tool result answers, and results in the order of their calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from headrace.errors import InvalidRequest
from headrace.types.chat import ChatMessage, ToolCall


@dataclass(slots=True, eq=False)
class _Call:
    """A call: the id that the client sent, the one it has from here on, and whether a result has been found."""

    sent_id: str
    call: ToolCall
    is_answered: bool = False


def paired_results(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """The conversation with an id on every call, unique within its turn, and each result with its call's id and name.

    Missing and repeated ids are replaced. A result without an id answers the first call of the latest turn that no
    other result answers, and so does one whose id several calls have. A result with an id that no call has is left as
    it is. Raises InvalidRequest, naming the field, for a second result of one call and if no call is left.
    """
    paired = list(messages)
    earlier: list[_Call] = []
    starts = [index for index, message in enumerate(messages) if message.tool_calls]
    num_calls = 0
    for start, end in zip((-1, *starts), (*starts, len(messages)), strict=True):
        turn: list[_Call] = []
        if start >= 0:
            turn = _with_unique_ids(messages[start].tool_calls, num_calls)
            num_calls += len(turn)
            paired[start] = replace(messages[start], tool_calls=tuple(each.call for each in turn))
        results = [index for index in range(start + 1, end) if messages[index].role == "tool"]
        # Those that name their call first, so that none without an id takes it.
        for index in sorted(results, key=lambda index: not messages[index].tool_call_id):
            paired[index] = _answering(messages[index], turn, earlier)
        earlier = [*turn, *earlier]
    return tuple(paired)


def in_call_order(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Results that directly follow a turn of several calls in the order of these; others stay behind them."""
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
    """num_earlier: calls of the conversation before these, which made-up ids count on from."""
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


def _answering(result: ChatMessage, turn: Sequence[_Call], earlier: Sequence[_Call]) -> ChatMessage:
    """The result with the id and the name of its call, one of those of its turn or of an earlier one, latest first."""
    if result.tool_call_id:
        meant = [each for each in (*turn, *earlier) if each.sent_id == result.tool_call_id]
        if not meant:
            return result
        fault = "the call already has a result"
    else:
        meant = list(turn)
        fault = "no call is left that this result could answer; give it the id of its call"
    found = next((each for each in meant if not each.is_answered), None)
    if found is None:
        raise InvalidRequest(f"{result.param}: {fault}", param=result.param)
    found.is_answered = True
    return replace(result, tool_call_id=found.call.id, name=found.call.name)
