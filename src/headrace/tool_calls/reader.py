"""Incremental text for parsers written as if all of it were there.

A parser is a generator. It reads through the methods here with `yield from`; where the text ends for now, they yield
until there is more. No decision may depend on where the text was split, so all methods depend on the text and on
whether it has ended, never on how much of it happens to be there.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Sequence
from typing import AnyStr, TypeVar

T = TypeVar("T")

Reading = Generator[None, None, T]
"""A reading in progress; each yielded `None` asks for more text."""

SPACE = " \t\r\n"

MAX_NAME = 320
"""Characters in which a name must end: the longest tool name in a request plus its surroundings."""


class NotACall(Exception):
    """What is being read is no call. reason: its fault, None for mere prose.

    breaks_schema: a value has a type that the schema does not allow.
    """

    def __init__(self, reason: str | None = None, *, breaks_schema: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.breaks_schema = breaks_schema


class OutOfText(NotACall):
    """The text ended too early."""

    def __init__(self) -> None:
        super().__init__("the output ends inside the call")


class Reader:
    """A text, the position in it, and whether it has ended.

    is_cut: it ended at a limit. settled: a parser that reads ahead of `pos` sets how far it has read for good.
    """

    def __init__(self, text: str = "", *, ended: bool = False) -> None:
        self.text = text
        self.pos = 0
        self.is_cut = False
        self.settled: int | None = None
        self._waiting = ""
        self._has_ended = ended
        self._limit: int | None = None

    @property
    def ended(self) -> bool:
        return self._has_ended and not self._waiting

    @property
    def safe_pos(self) -> int:
        return self.pos if self.settled is None else self.settled

    @property
    def num_unread(self) -> int:
        return len(self.text) - self.safe_pos + len(self._waiting)

    @property
    def is_at_limit(self) -> bool:
        return bool(self._waiting)

    def push(self, text: str) -> None:
        if self._limit is None:
            self.text += text
        else:
            self._waiting += text
            self._admit()

    def end(self, *, cut: bool) -> None:
        self._has_ended = True
        self.is_cut = cut

    def set_limit(self, limit: int | None) -> None:
        """Hold back text from this index of `text` on; None lifts the limit."""
        self._limit = limit
        if limit is not None and limit < len(self.text):
            self.text, self._waiting = self.text[:limit], self.text[limit:] + self._waiting
        self._admit()

    def trim(self) -> None:
        """Drop what has been read; indices into `text` change."""
        if self.pos:
            self.text = self.text[self.pos :]
            self.pos = 0

    def peek(self, ahead: int = 0) -> Reading[str]:
        """The next character, or the one `ahead` of it. Raises OutOfText."""
        while self.pos + ahead >= len(self.text):
            if self.ended:
                raise OutOfText
            yield
        return self.text[self.pos + ahead]

    def is_done(self) -> Reading[bool]:
        while self.pos >= len(self.text):
            if self.ended:
                return True
            yield
        return False

    def skip_space(self, space: str = SPACE) -> Reading[bool]:
        """Skip white space; false if the text ends there."""
        while not (yield from self.is_done()):
            if self.text[self.pos] not in space:
                return True
            self.pos += 1
        return False

    def take_any(self, literals: Collection[str]) -> Reading[str | None]:
        """Skip the longest of the literals that comes next and return it; None if none does."""
        while True:
            rest = self.text[self.pos : self.pos + max(map(len, literals), default=0)]
            if self.ended or not any(len(rest) < len(each) and each.startswith(rest) for each in literals):
                found = max((each for each in literals if rest.startswith(each)), key=len, default=None)
                self.pos += len(found or "")
                return found
            yield

    def take(self, literal: str) -> Reading[bool]:
        return (yield from self.take_any((literal,))) is not None

    def close(self, *end_markers: str) -> Reading[bool]:
        """Skip one of several end markers if it comes next, or a part of it at the text's end."""
        if (yield from self.take_any(end_markers)) is not None:
            return True
        rest = self.text[self.pos :]
        if not rest or not any(end_marker.startswith(rest) for end_marker in end_markers):
            return False
        self.pos = len(self.text)
        return True

    def expect(self, literal: str) -> Reading[None]:
        """Skip a literal. Raises OutOfText, and NotACall if something else comes."""
        if not (yield from self.take(literal)):
            if literal.startswith(self.text[self.pos :]):
                raise OutOfText
            raise NotACall(f"{literal!r} is missing")

    def find(self, literals: Sequence[str], max_length: int) -> Reading[int]:
        """Index of the first of the literals. Raises OutOfText, and NotACall if none comes within max_length
        characters."""
        start = self.pos
        while True:
            found = [at for at in (self.text.find(each, start, start + max_length) for each in literals) if at >= 0]
            longest = max(map(len, literals))
            if found and (self.ended or len(self.text) - min(found) >= longest):
                return min(found)
            if len(self.text) - start >= max_length + longest:
                raise NotACall
            if self.ended:
                raise OutOfText
            yield

    def take_until(self, literal: str, max_length: int) -> Reading[str]:
        """Text up to a literal, which is skipped too. Raises as `find`."""
        end = yield from self.find((literal,), max_length)
        text, self.pos = self.text[self.pos : end], end + len(literal)
        return text

    def _admit(self) -> None:
        room = len(self._waiting) if self._limit is None else max(self._limit - len(self.text), 0)
        self.text, self._waiting = self.text + self._waiting[:room], self._waiting[room:]


def run_to_end(reading: Reading[T]) -> T:
    while True:
        try:
            next(reading)
        except StopIteration as stop:
            result: T = stop.value
            return result


def overlap(text: AnyStr, marker: AnyStr) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def first_of(text: AnyStr, markers: Iterable[AnyStr], start: int = 0) -> tuple[int, AnyStr | None]:
    """Index of the first marker, and the longest that begins there; the text's length and None if there is none."""
    found = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker, start)) >= 0]
    if not found:
        return len(text), None
    at, _, marker = min(found)
    return at, marker
