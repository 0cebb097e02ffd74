"""An end to thinking: after so many tokens its closer is the only thing that may come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from headrace.errors import GenerationFailed
from headrace.grammar.constraint import Mask, Window, mask_of
from headrace.grammar.vocabulary import Vocabulary
from headrace.types.request import LateThinking, ThinkingLimit


class Lines(Protocol):
    """Where in lines and quotes an answer stands."""

    @property
    def begins_line(self) -> bool:
        """Whether the line has nothing but white space so far."""

    @property
    def may_be_quoted(self) -> bool:
        """Whether what comes next stands in a code fence, or in backticks if these are closed."""

    def push(self, text: str) -> None:
        """Go on by some text."""

    def copy(self) -> Lines:
        """One that goes its own way from here."""


class _Phase(Enum):
    BEFORE = "nothing but white space has come; thinking may begin"
    THINKING = "inside a block"
    CLOSING = "the closer is being forced"
    ANSWER = "in an answer in which thinking may begin again"
    OVER = "whatever comes is not thinking"


@dataclass(frozen=True, slots=True)
class _Place:
    """How far a sequence has come.

    num_tokens: of thinking, over all blocks. tail: last bytes, those that may be the beginning of a marker.
    num_closed: tokens of the forced closing that have come. num_inline: characters of a block whose opener did not
    begin a line; None in others. lines: of the answer since thinking, but for the tail; not to be changed.
    """

    phase: _Phase
    num_tokens: int = 0
    tail: bytes = b""
    num_closed: int = 0
    num_inline: int | None = None
    lines: Lines | None = None


class ThinkingBudget:
    """A Constraint: counts tokens of thinking, in one block or in several.

    A token that opens or closes a block does not count. A block that begins where all is used up is closed at once.
    """

    def __init__(self, limit: ThinkingLimit, vocabulary: Vocabulary, lines: Callable[[], Lines]) -> None:
        """lines: makes those of an empty text."""
        self._limit = limit
        self._vocabulary = vocabulary
        self._new_lines = lines
        self._opener, self._closer = limit.opener.encode(), limit.closer.encode()
        late = limit.late or LateThinking()
        self._bare_calls = frozenset(each.encode() for each in late.bare_call_openers)
        calls = [each.encode() for each in late.call_openers]
        self._markers = (self._opener, *calls, *self._bare_calls)
        self._place = self._settled(_Place(_Phase.THINKING if limit.is_open else _Phase.BEFORE))

    @property
    def is_over(self) -> bool:
        """Never: an answer may be anything."""
        return False

    def num_legal(self, drafts: Sequence[int]) -> int:
        return self.window(drafts).num_legal

    def window(self, drafts: Sequence[int]) -> Window:
        masks: list[Mask | None] = []
        place = self._place
        for num_legal, draft in enumerate(drafts):
            wanted = self._wanted(place)
            masks.append(self._only(wanted))
            if wanted is not None and draft != wanted:
                masks += [None] * (len(drafts) + 1 - len(masks))
                return Window(tuple(masks), num_legal)
            place = self._after(place, draft)
        masks.append(self._only(self._wanted(place)))
        return Window(tuple(masks), len(drafts))

    def accept(self, token_ids: Sequence[int]) -> None:
        """See Constraint. Raises GenerationFailed for a token that may not come."""
        for token_id in token_ids:
            if self._wanted(self._place) not in (None, token_id):
                raise GenerationFailed("thinking went on where it had to end")
            self._place = self._after(self._place, token_id)

    def forced_tokens(self, limit: int) -> tuple[int, ...]:
        if self._place.phase is not _Phase.CLOSING:
            return ()
        return self._limit.closing[self._place.num_closed :][:limit]

    def copy(self) -> ThinkingBudget:
        copy = ThinkingBudget(self._limit, self._vocabulary, self._new_lines)
        copy._place = self._place
        return copy

    def _wanted(self, place: _Place) -> int | None:
        """The only token that may come; None if any may."""
        return self._limit.closing[place.num_closed] if place.phase is _Phase.CLOSING else None

    def _only(self, token_id: int | None) -> Mask | None:
        return None if token_id is None else mask_of((token_id,), self._vocabulary.size)

    def _after(self, place: _Place, token_id: int) -> _Place:
        if place.phase is _Phase.OVER:
            return place
        if place.phase is _Phase.CLOSING:
            if place.num_closed + 1 < len(self._limit.closing):
                return replace(place, num_closed=place.num_closed + 1)
            return _Place(_Phase.BEFORE, place.num_tokens)
        data = self._vocabulary.bytes_of(token_id)
        after = self._read(replace(place, tail=place.tail + data))
        if place.phase is after.phase is _Phase.THINKING:
            after = self._thought(replace(after, num_tokens=after.num_tokens + 1), data)
        return self._settled(after)

    def _read(self, place: _Place) -> _Place:
        """The place behind the markers in its tail."""
        if place.phase is _Phase.THINKING:
            _, found, rest = place.tail.partition(self._closer)
            if found:
                return self._read(_Place(_Phase.BEFORE, place.num_tokens, rest))
            return replace(place, tail=place.tail[max(0, len(place.tail) - len(self._closer) + 1) :])
        if place.phase is _Phase.ANSWER:
            return self._read_answer(place)
        begun = place.tail.lstrip()
        if begun.startswith(self._opener):
            return self._read(_Place(_Phase.THINKING, place.num_tokens, begun[len(self._opener) :]))
        if self._opener.startswith(begun):
            return replace(place, tail=begun)
        if self._limit.late is None:
            return _Place(_Phase.OVER)
        return self._read_answer(replace(place, phase=_Phase.ANSWER, lines=self._new_lines()))

    def _read_answer(self, place: _Place) -> _Place:
        assert place.lines is not None
        lines, rest = place.lines.copy(), place.tail
        while True:
            at, marker = _first(rest, self._markers)
            if marker is None:
                held = _overlap(rest, self._markers)
                lines.push(_text(rest[: len(rest) - held]))
                return replace(place, tail=rest[len(rest) - held :], lines=lines)
            lines.push(_text(rest[:at]))
            rest = rest[at + len(marker) :]
            if marker == self._opener:
                if not lines.may_be_quoted:
                    num_inline = None if lines.begins_line else 0
                    return self._read(_Place(_Phase.THINKING, place.num_tokens, rest, num_inline=num_inline))
            elif marker not in self._bare_calls or lines.begins_line:
                return _Place(_Phase.OVER)
            lines.push(_text(marker))

    def _thought(self, place: _Place, data: bytes) -> _Place:
        """The place once a token of these bytes counts as thinking; an inline block that gets too long was none."""
        most = None if self._limit.late is None else self._limit.late.max_inline
        if place.num_inline is None or most is None:
            return place
        num_inline = place.num_inline + len(_text(data))
        return _Place(_Phase.OVER) if num_inline > most else replace(place, num_inline=num_inline)

    def _settled(self, place: _Place) -> _Place:
        """Closing, if thinking has used up what it may."""
        if place.phase is _Phase.THINKING and place.num_tokens >= self._limit.num_tokens:
            return _Place(_Phase.CLOSING, place.num_tokens)
        return place


def _first(text: bytes, markers: Sequence[bytes]) -> tuple[int, bytes | None]:
    """The first marker and its index, the longest of several at one place."""
    found = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker)) >= 0]
    if not found:
        return len(text), None
    at, _, marker = min(found)
    return at, marker


def _overlap(text: bytes, markers: Sequence[bytes]) -> int:
    """Bytes at the end that may be the beginning of a marker."""
    most = min(len(text), max(map(len, markers)) - 1)
    return next((size for size in range(most, 0, -1) if any(each.startswith(text[-size:]) for each in markers)), 0)


def _text(data: bytes) -> str:
    """Bytes as text; those of a character that tokens cut in pieces are other characters."""
    return data.decode(errors="replace")
