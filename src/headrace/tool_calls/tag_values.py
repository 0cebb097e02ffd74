"""Values between tags: finding their end, and writing them as JSON while they come.

A closing tag that is part of a value, such as one in a file that documents tool calls, is not escaped. So an end marker
counts only if what follows fits: a parameter that the tool has and that has not been given, or the end of the call.
A whole call quoted in a value is balanced out. Where a full closing sequence is followed by prose, the value may go on:
the next such sequence decides, if there is one before another call, the end, or MAX_DOUBT characters. Undecided text is
held back, everything else of a value is passed on at once.

Under a grammar the first end marker ends the value, because that is where the grammar ends it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from headrace.tool_calls.forms import TagSyntax
from headrace.tool_calls.literals import Write, convert, escaped
from headrace.tool_calls.reader import MAX_NAME, NotACall, OutOfText, Reader, Reading, overlap
from headrace.tool_calls.schema import SCALARS, Schema

MAX_DOUBT = 1024

# Longer than any number or word that a value of several types could be.
_MAX_OTHER = 40

_NOT_IN_NAMES = frozenset(" \t\r\n<>{}\"'`")
_BEHIND_KEY = re.compile(r'\s*(string="(true|false)"\s*)?')


class TagCursor:
    """Skips the tags of a syntax.

    is_text: what the latest parameter's tag says of its value; None if nothing.
    """

    def __init__(self, syntax: TagSyntax, reader: Reader) -> None:
        self.syntax = syntax
        self.reader = reader
        self.is_text: bool | None = None

    def is_at_call(self) -> Reading[bool]:
        start = self.reader.pos
        is_call = yield from self.reader.take(self.syntax.call_open)
        self.reader.pos = start
        return is_call

    def open_call(self) -> Reading[str]:
        yield from self.reader.expect(self.syntax.call_open)
        if self.syntax.name_end:
            name = (yield from self.reader.take_until(self.syntax.name_end, MAX_NAME)).strip()
        else:
            yield from self.reader.skip_space()
            name = yield from self._plain_name()
        if not name or _NOT_IN_NAMES & set(name):
            raise NotACall
        return name

    def open_parameter(self) -> Reading[str | None]:
        """Skip the opening of a parameter's value and return the key; None if something else comes."""
        syntax, reader = self.syntax, self.reader
        if not (yield from reader.take(syntax.key_open)):
            return None
        key = (yield from reader.take_until(syntax.key_end, MAX_NAME)).strip()
        if syntax.value_open:
            between = yield from reader.take_until(syntax.value_open, MAX_NAME)
            if (behind := _BEHIND_KEY.fullmatch(between)) is None:
                raise NotACall("a parameter without a value")
            self.is_text = None if behind[2] is None else behind[2] == "true"
        if not key or "\n" in key or "<" in key:
            raise NotACall("a parameter without a name")
        return key

    def begins_call(self) -> Reading[str | None]:
        """What follows a call's opening: a key's start marker or the call's end marker; None if no call begins.

        Reads nothing for good. If the text ends inside the opening, no call begins.
        """
        saved = self.reader.pos
        try:
            yield from self.open_call()
            yield from self.reader.skip_space()
            return (yield from self.reader.take_any((self.syntax.key_open, self.syntax.call_close)))
        except NotACall:
            return None
        finally:
            self.reader.pos = saved

    def _plain_name(self) -> Reading[str]:
        start = self.reader.pos
        while not (yield from self.reader.is_done()):
            if self.reader.text[self.reader.pos] in _NOT_IN_NAMES:
                break
            if self.reader.pos - start > MAX_NAME:
                raise NotACall
            self.reader.pos += 1
        return self.reader.text[start : self.reader.pos]


class TextValue:
    """One value, of which text comes in pieces. A string goes on at once; another type is known only as a whole."""

    def __init__(self, schema: Schema, write: Write) -> None:
        self._schema = schema
        self._write = write
        self._held = ""
        self._is_string = schema.types == frozenset({"string"})
        if self._is_string:
            write('"')

    def add(self, text: str) -> None:
        if self._is_string:
            if text:
                self._write(escaped(text))
            return
        self._held += text
        if self._schema.takes_string and not self._may_be_other():
            self._is_string = True
            self._write('"' + escaped(self._held))
            self._held = ""

    def close(self) -> str | None:
        """The value is over. One that fits no type is written as a string; returns what is wrong with it then."""
        if self._is_string:
            self._write('"')
            return None
        converted = convert(self._held, self._schema)
        self._write(json.dumps(self._held, ensure_ascii=False) if converted is None else converted)
        return f"a value is no {' or '.join(sorted(self._schema.types or ()))}" if converted is None else None

    def _may_be_other(self) -> bool:
        types, begun = self._schema.types, self._held.strip()
        if types is None or types & {"array", "object"}:
            return not begun or begun[0] in "[{" or len(begun) <= _MAX_OTHER
        return not begun or (bool(types & SCALARS) and len(begun) <= _MAX_OTHER)


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
        self._end_marker = cursor.syntax.value_close
        self._tags = (self._end_marker,) if fits is None else (self._end_marker, cursor.syntax.call_open)
        self._passed_on = cursor.reader.pos
        self._depth = 0
        self._doubt: _Doubt | None = None

    def find(self, value: TextValue) -> Reading[None]:
        """Read the value and its end marker. Raises OutOfText if it doesn't end."""
        search = self._reader.settled = self._reader.pos
        while True:
            at = yield from self._next_tag(search, value)
            if at is None:  # the text ends, or the value was undecided for long enough
                if self._doubt is None:
                    self._pass_on(len(self._reader.text), value)
                    raise OutOfText
                if not self._doubt.is_quoted or (len(self._reader.text) <= self._deadline and self._reader.ended):
                    self._finish(self._doubt.at, value)
                    return
                self._doubt = None
                continue
            if self._fits is None:
                self._finish(at, value)
                return
            is_end_marker = self._reader.text.startswith(self._end_marker, at)
            end = yield from (self._end_marker_at(at) if is_end_marker else self._call_at(at))
            if end is not None:
                self._finish(end, value)
                return
            search = at + 1

    @property
    def _deadline(self) -> int:
        assert self._doubt is not None
        return self._doubt.at + MAX_DOUBT

    def _next_tag(self, search: int, value: TextValue) -> Reading[int | None]:
        """Index of the next end marker of a value or start marker of a call; None where the text or the limit ends."""
        reader, tags = self._reader, self._tags
        while True:
            found = [at for at in (reader.text.find(tag, search) for tag in tags) if at >= 0]
            first = min(found, default=None)
            if self._doubt is None:
                num_open = max(overlap(reader.text, tag) for tag in tags) if first is None else 0
                self._pass_on(len(reader.text) - num_open if first is None else first, value)
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
        self._depth += behind == self._syntax.key_open  # one without values has no end marker
        return None

    def _end_marker_at(self, at: int) -> Reading[int | None]:
        """Index of the value's end if this end marker makes it certain."""
        reader = self._reader
        reader.pos = at + len(self._end_marker)
        is_quoted = self._depth > 0
        try:
            if not is_quoted and (yield from self._parameter_follows()):
                return at
            reader.pos = at + len(self._end_marker)
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
        """Whether all end markers of the call follow, and whether what follows them is conclusive.

        Raises NotACall if not even its first end marker does.
        """
        reader, syntax = self._reader, self._syntax
        yield from reader.skip_space()
        yield from reader.expect(syntax.call_close)
        is_closed = syntax.wrapper is None
        if syntax.wrapper is not None and (yield from reader.skip_space()):
            is_closed = yield from reader.take(syntax.wrapper[1])
        start_markers = (syntax.call_open, *(syntax.wrapper or ())[:1])
        is_last = not (yield from reader.skip_space())
        is_certain = is_last or (yield from reader.take_any(start_markers)) is not None
        return is_closed or is_certain, is_certain

    def _pass_on(self, end: int, value: TextValue) -> None:
        text = self._reader.text
        # The newline before an end marker belongs to it.
        if self._syntax.frame and end > self._passed_on and text[end - 1] == self._syntax.frame:
            end -= 1
        if end > self._passed_on:
            value.add(text[self._passed_on : end])
            self._passed_on = self._reader.settled = end

    def _finish(self, at: int, value: TextValue) -> None:
        self._pass_on(at, value)
        self._reader.pos = at + len(self._end_marker)
        self._reader.settled = None
