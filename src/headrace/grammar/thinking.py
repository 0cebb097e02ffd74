"""Enforces a thinking budget: once it is used up, only the end marker is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from headrace.errors import GenerationFailed
from headrace.grammar.constraint import DraftMasks, Mask, mask_of
from headrace.grammar.vocabulary import Vocabulary
from headrace.tool_calls.fences import LineTracker
from headrace.tool_calls.reader import first_of, overlap
from headrace.types.request import LateThinking, ThinkingLimit


class _Phase(Enum):
    BEFORE = "nothing but white space has come; thinking may begin"
    THINKING = "inside a block"
    CLOSING = "the end marker is being forced"
    ANSWER = "in an answer in which thinking may begin again"
    OVER = "whatever comes is not thinking"


@dataclass(frozen=True, slots=True)
class _State:
    """The parser's state.

    num_tokens: thinking tokens over all blocks.
    tail: last bytes, which may begin a marker.
    num_closed: tokens of the forced closing so far.
    num_inline: characters of a block whose start marker did not begin a line; None in others.
    lines: of the answer since thinking, without the tail; never changed in place.
    """

    phase: _Phase
    num_tokens: int = 0
    tail: bytes = b""
    num_closed: int = 0
    num_inline: int | None = None
    lines: LineTracker | None = None


class ThinkingBudget:
    """A Constraint that counts thinking tokens over all blocks.

    Marker tokens do not count. A block that begins after the budget is used up is closed at once.
    """

    def __init__(self, limit: ThinkingLimit, vocabulary: Vocabulary) -> None:
        self._limit = limit
        self._vocabulary = vocabulary
        self._start_marker, self._end_marker = limit.start_marker.encode(), limit.end_marker.encode()
        late = limit.late or LateThinking()
        self._bare_calls = frozenset(each.encode() for each in late.bare_call_starts)
        calls = [each.encode() for each in late.call_starts]
        self._markers = (self._start_marker, *calls, *self._bare_calls)
        self._state = self._closed_if_used_up(_State(_Phase.THINKING if limit.is_open else _Phase.BEFORE))

    def num_legal(self, drafts: Sequence[int]) -> int:
        return self.window(drafts).num_legal

    def window(self, drafts: Sequence[int]) -> DraftMasks:
        masks: list[Mask | None] = []
        state = self._state
        for num_legal, draft in enumerate(drafts):
            wanted = self._wanted(state)
            masks.append(self._only(wanted))
            if wanted is not None and draft != wanted:
                masks += [None] * (len(drafts) + 1 - len(masks))
                return DraftMasks(tuple(masks), num_legal)
            state = self._after(state, draft)
        masks.append(self._only(self._wanted(state)))
        return DraftMasks(tuple(masks), len(drafts))

    def accept(self, token_ids: Sequence[int]) -> None:
        """See Constraint. Raises GenerationFailed for a forbidden token."""
        for token_id in token_ids:
            if self._wanted(self._state) not in (None, token_id):
                raise GenerationFailed("thinking continued where it had to end")
            self._state = self._after(self._state, token_id)

    def forced_tokens(self, limit: int) -> tuple[int, ...]:
        if self._state.phase is not _Phase.CLOSING:
            return ()
        return self._limit.closing[self._state.num_closed :][:limit]

    def _wanted(self, state: _State) -> int | None:
        """The only token allowed; None if any is."""
        return self._limit.closing[state.num_closed] if state.phase is _Phase.CLOSING else None

    def _only(self, token_id: int | None) -> Mask | None:
        return None if token_id is None else mask_of((token_id,), self._vocabulary.size)

    def _after(self, state: _State, token_id: int) -> _State:
        if state.phase is _Phase.OVER:
            return state
        if state.phase is _Phase.CLOSING:
            if state.num_closed + 1 < len(self._limit.closing):
                return replace(state, num_closed=state.num_closed + 1)
            return _State(_Phase.BEFORE, state.num_tokens)
        data = self._vocabulary.bytes_of(token_id)
        after = self._read(replace(state, tail=state.tail + data))
        if state.phase is after.phase is _Phase.THINKING:
            after = self._count_thought(replace(after, num_tokens=after.num_tokens + 1), data)
        return self._closed_if_used_up(after)

    def _read(self, state: _State) -> _State:
        if state.phase is _Phase.THINKING:
            _, found, rest = state.tail.partition(self._end_marker)
            if found:
                return self._read(_State(_Phase.BEFORE, state.num_tokens, rest))
            return replace(state, tail=state.tail[max(0, len(state.tail) - len(self._end_marker) + 1) :])
        if state.phase is _Phase.ANSWER:
            return self._read_answer(state)
        begun = state.tail.lstrip()
        if begun.startswith(self._start_marker):
            return self._read(_State(_Phase.THINKING, state.num_tokens, begun[len(self._start_marker) :]))
        if self._start_marker.startswith(begun):
            return replace(state, tail=begun)
        if self._limit.late is None:
            return _State(_Phase.OVER)
        return self._read_answer(replace(state, phase=_Phase.ANSWER, lines=LineTracker()))

    def _read_answer(self, state: _State) -> _State:
        assert state.lines is not None
        lines, rest = state.lines.copy(), state.tail
        while True:
            at, marker = first_of(rest, self._markers)
            if marker is None:
                held = max(overlap(rest, each) for each in self._markers)
                lines.push(_text(rest[: len(rest) - held]))
                return replace(state, tail=rest[len(rest) - held :], lines=lines)
            lines.push(_text(rest[:at]))
            rest = rest[at + len(marker) :]
            if marker == self._start_marker:
                if not lines.may_be_quoted:
                    num_inline = None if lines.begins_line else 0
                    return self._read(_State(_Phase.THINKING, state.num_tokens, rest, num_inline=num_inline))
            elif marker not in self._bare_calls or lines.begins_line:
                return _State(_Phase.OVER)
            lines.push(_text(marker))

    def _count_thought(self, state: _State, data: bytes) -> _State:
        """The state after a thinking token of these bytes; an inline block that gets too long was no thinking."""
        most = None if self._limit.late is None else self._limit.late.max_inline
        if state.num_inline is None or most is None:
            return state
        num_inline = state.num_inline + len(_text(data))
        return _State(_Phase.OVER) if num_inline > most else replace(state, num_inline=num_inline)

    def _closed_if_used_up(self, state: _State) -> _State:
        """Switch to closing if the budget is used up."""
        if state.phase is _Phase.THINKING and state.num_tokens >= self._limit.num_tokens:
            return _State(_Phase.CLOSING, state.num_tokens)
        return state


def _text(data: bytes) -> str:
    """Bytes as text; a character split between tokens becomes replacement characters."""
    return data.decode(errors="replace")
