"""Finds the end of a value between tags.

A closing tag that is part of a value, such as one in a file that documents tool calls, is not escaped. So a closer
counts only if what follows fits: a parameter that the tool has and that has not been given, or the closers of the call.
A whole call quoted in a value is balanced out. Where a full closing sequence is followed by prose, the value may go on:
the next such sequence decides, if there is one before another call, the end, or MAX_DOUBT characters. Undecided text is
held back, everything else of a value is passed on at once.

Under a grammar the first closer ends the value, because that is where the grammar ends it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.text.formats.reader import NotACall, OutOfText, Reading
from headrace.text.formats.tag_cursor import TagCursor
from headrace.text.formats.values import TextValue
from headrace.text.stop_strings import overlap

MAX_DOUBT = 1024


@dataclass(frozen=True, slots=True)
class _Doubt:
    """The value may have ended at index `at`. is_quoted: it has only if no other end comes."""

    at: int
    is_quoted: bool


class ValueEnd:
    """Finds the end of one value.

    fits: whether a parameter of some name may come next; None under a grammar.
    """

    def __init__(self, cursor: TagCursor, fits: Callable[[str], bool] | None) -> None:
        self._cursor = cursor
        self._reader = cursor.reader
        self._syntax = cursor.syntax
        self._fits = fits
        self._closer = cursor.syntax.value_close
        self._tags = (self._closer,) if fits is None else (self._closer, cursor.syntax.call_open)
        self._told = cursor.reader.pos
        self._depth = 0
        self._doubt: _Doubt | None = None

    def find(self, value: TextValue) -> Reading[None]:
        """Read the value and its closer. Raises OutOfText if it doesn't end."""
        search = self._reader.settled = self._reader.pos
        while True:
            at = yield from self._next_tag(search, value)
            if at is None:  # the text ends, or the value was undecided for long enough
                if self._doubt is None:
                    self._tell(len(self._reader.text), value)
                    raise OutOfText
                if not self._doubt.is_quoted or (len(self._reader.text) <= self._deadline and self._reader.ended):
                    self._end(self._doubt.at, value)
                    return
                self._doubt = None
                continue
            if self._fits is None:
                self._end(at, value)
                return
            is_closer = self._reader.text.startswith(self._closer, at)
            end = yield from (self._closer_at(at) if is_closer else self._call_at(at))
            if end is not None:
                self._end(end, value)
                return
            search = at + 1

    @property
    def _deadline(self) -> int:
        assert self._doubt is not None
        return self._doubt.at + MAX_DOUBT

    def _next_tag(self, search: int, value: TextValue) -> Reading[int | None]:
        """Index of the next closer of a value or opener of a call; None where the text or the limit ends."""
        reader, tags = self._reader, self._tags
        while True:
            found = [at for at in (reader.text.find(tag, search) for tag in tags) if at >= 0]
            first = min(found, default=None)
            if self._doubt is None:
                num_open = max(overlap(reader.text, tag) for tag in tags) if first is None else 0
                self._tell(len(reader.text) - num_open if first is None else first, value)
            elif (first is None and len(reader.text) > self._deadline + max(map(len, tags))) or (
                first is not None and first > self._deadline
            ):
                return None
            if first is not None or reader.ended:
                return first
            search = max(search, len(reader.text) - max(map(len, tags)) + 1)
            yield

    def _call_at(self, at: int) -> Reading[int | None]:
        """What the opening of a call means: the value's end if it is undecided, else one more to balance out."""
        self._reader.pos = at
        behind = yield from self._cursor.begins_call()
        if behind is not None and self._doubt is not None and not self._doubt.is_quoted:
            return self._doubt.at
        self._depth += behind == self._syntax.key_open  # one without values has no closer
        return None

    def _closer_at(self, at: int) -> Reading[int | None]:
        """Index of the value's end if this closer makes it certain."""
        reader = self._reader
        reader.pos = at + len(self._closer)
        is_quoted = self._depth > 0
        try:
            if not is_quoted and (yield from self._parameter_follows()):
                return at
            reader.pos = at + len(self._closer)
            is_end, is_certain = yield from self._call_ends()
        except OutOfText:
            is_end = is_certain = True
        except NotACall:
            return None
        self._depth -= is_quoted
        if is_end and is_certain and not is_quoted:
            return at
        if is_end:
            self._doubt = _Doubt(at, is_quoted)
        return None

    def _parameter_follows(self) -> Reading[bool]:
        yield from self._reader.skip_space()
        try:
            key = yield from self._cursor.open_parameter()
        except NotACall as problem:
            if isinstance(problem, OutOfText):
                raise
            return False
        return key is not None and self._fits is not None and self._fits(key)

    def _call_ends(self) -> Reading[tuple[bool, bool]]:
        """Whether all closers of the call follow, and whether what follows them is conclusive.

        Raises NotACall if not even its first closer does.
        """
        reader, syntax = self._reader, self._syntax
        yield from reader.skip_space()
        yield from reader.expect(syntax.call_close)
        is_closed = syntax.wrapper is None
        if syntax.wrapper is not None and (yield from reader.skip_space()):
            is_closed = yield from reader.take(syntax.wrapper[1])
        openers = (syntax.call_open, *(syntax.wrapper or ())[:1])
        is_last = not (yield from reader.skip_space())
        is_certain = is_last or (yield from reader.take_any(openers)) is not None
        return is_closed or is_certain, is_certain

    def _tell(self, end: int, value: TextValue) -> None:
        """Pass on text up to an index."""
        text = self._reader.text
        # The newline before a closer belongs to it.
        if self._syntax.is_framed and end > self._told and text[end - 1] == "\n":
            end -= 1
        if end > self._told:
            value.add(text[self._told : end])
            self._told = self._reader.settled = end

    def _end(self, at: int, value: TextValue) -> None:
        """The value ends at an index; its closer follows."""
        self._tell(at, value)
        self._reader.pos = at + len(self._closer)
        self._reader.settled = None
