"""Values between tags: finding their end, and writing them as JSON while they come.

A closing tag that is part of a value, such as one in a file that documents tool calls, is not escaped. So an end marker
counts only if what follows fits: a parameter that the tool has and that has not been given, or the end of the call.
A whole call quoted in a value is balanced out. Where a full closing sequence is followed by prose, the value may go on:
the next such sequence decides, if there is one before another call, the end, or MAX_DOUBT characters. Undecided text is
held back, everything else of a value is passed on at once.

Models forget end markers. A line that begins with the start of a parameter that the tool declares and that has not been
given ends the value (in a syntax without newlines between its tags, such a start anywhere), unless the next end marker
fits in no other way than as that parameter's, quoted: then, or if it precedes that very parameter, the value goes on.
The end markers of the call end a value, too, if the next call or nothing follows; if prose does, only where no other
end comes. The next call may also follow an end marker at once.

Under a grammar the first end marker ends the value, because that is where the grammar ends it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from headrace.tool_calls.forms import MAYBE_NEWLINE, TagSyntax
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

    def precedes_call(self) -> Reading[bool]:
        """Whether another call begins here, with its wrapper if each has one. Reads nothing for good."""
        saved, syntax = self.reader.pos, self.syntax
        try:
            yield from self.reader.skip_space()
            if syntax.wrapper is not None and syntax.wraps_each:
                if not (yield from self.reader.take(syntax.wrapper[0])):
                    return False
                yield from self.reader.skip_space()
            return (yield from self.begins_call()) is not None
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
class _EndPlace:
    """The value may end at index `at`, what follows its end marker begins at `behind`.

    is_weak: it ends there only if no other end comes.
    """

    at: int
    behind: int
    is_weak: bool = False


@dataclass(frozen=True, slots=True)
class _Unclosed:
    """A parameter begins although the value has no end marker."""

    end: _EndPlace
    key: str


class ValueEnd:
    """Finds the end of one value.

    fits: whether a parameter of some name may come next; None under a grammar.
    is_due: whether the tool declares a parameter of some name that has not been given.
    """

    def __init__(self, cursor: TagCursor, fits: Callable[[str], bool] | None, is_due: Callable[[str], bool]) -> None:
        syntax = cursor.syntax
        self._cursor = cursor
        self._reader = cursor.reader
        self._syntax = syntax
        self._fits = fits
        self._is_due = is_due
        self._end_marker = syntax.value_close
        tags: tuple[str, ...] = (self._end_marker,)
        if fits is not None:
            followers = (syntax.key_open, syntax.call_close)
            tags += (syntax.call_open, *(f"\n{tag}" for tag in followers))
            tags += followers if syntax.newline == MAYBE_NEWLINE else ()
        self._tags = tags
        self._longest_tag = max(map(len, tags))
        self._any_tag = re.compile("|".join(map(re.escape, tags)))
        self._passed_on = cursor.reader.pos
        self._depth = 0
        self._calls_end = 0  # index behind the latest call, or end markers of one, that the value contains
        self._doubt: _EndPlace | None = None
        self._unclosed: _Unclosed | None = None

    def find(self, value: TextValue) -> Reading[None]:
        """Read the value and its end marker, if it has one. Raises OutOfText if it doesn't end."""
        self._reader.settled = self._reader.pos
        search = self._reader.pos - bool(self._syntax.frame)  # that newline may precede a tag
        while True:
            tag = yield from self._next_tag(search, value)
            if tag is not None:
                search = tag.start() + (2 if tag[0][0] == "\n" else 1)
                end = yield from self._end_at(tag)
            else:  # the text ends, or the value was undecided for long enough
                end = self._end_without_tag()
                if end is None and self._doubt is None:
                    self._pass_on(len(self._reader.text), value)
                    raise OutOfText
                self._doubt = None
            if end is not None:
                self._pass_on(end.at, value)
                self._reader.pos = end.behind
                self._reader.settled = None
                return

    def _next_tag(self, search: int, value: TextValue) -> Reading[re.Match[str] | None]:
        """The next tag that may mean something; None where the text or the limit ends."""
        reader = self._reader
        while True:
            tag = self._any_tag.search(reader.text, search)
            deadline = self._deadline
            if deadline is None:
                num_open = max(overlap(reader.text, tag) for tag in self._tags) if tag is None else 0
                self._pass_on(len(reader.text) - num_open if tag is None else tag.start(), value)
            elif len(reader.text) > deadline + self._longest_tag if tag is None else tag.start() > deadline:
                return None
            if tag is not None or reader.ended:
                return tag
            search = max(search, len(reader.text) - self._longest_tag + 1)
            yield

    @property
    def _deadline(self) -> int | None:
        """Index up to which text is held back; None if the value certainly goes on."""
        if self._doubt is not None:
            return self._doubt.at + MAX_DOUBT
        return None if self._unclosed is None else self._unclosed.end.at + MAX_DOUBT

    def _end_without_tag(self) -> _EndPlace | None:
        doubt, deadline = self._doubt, self._deadline
        if doubt is None:
            return None if self._unclosed is None else self._unclosed.end
        is_over = self._reader.ended and deadline is not None and len(self._reader.text) <= deadline
        return doubt if is_over or not doubt.is_weak else None

    def _end_at(self, tag: re.Match[str]) -> Reading[_EndPlace | None]:
        """The value's end if this tag makes it certain."""
        at = tag.start()
        if tag[0] == self._end_marker:
            return (yield from self._end_marker_at(at))
        if tag[0] == self._syntax.call_open:
            return (yield from self._call_at(at))
        at += tag[0][0] == "\n"
        if not self._depth and self._doubt is None and at >= self._calls_end:
            if tag[0].endswith(self._syntax.key_open):
                yield from self._key_at(at)
            else:
                return (yield from self._call_close_at(at))
        return None

    def _call_at(self, at: int) -> Reading[_EndPlace | None]:
        """What the opening of a call means: the value's end if it is undecided, else one more to balance out."""
        self._reader.pos = at
        behind = yield from self._cursor.begins_call()
        if behind is not None and self._doubt is not None and not self._doubt.is_weak:
            return self._doubt
        if behind == self._syntax.key_open:
            self._depth += 1
        elif behind is not None:  # a call without values has no end marker of one
            self._calls_end = self._reader.text.index(behind, at) + len(behind)
        return None

    def _key_at(self, at: int) -> Reading[None]:
        try:
            key = yield from self._key_of_parameter_at(at)
        except OutOfText:
            return
        if self._unclosed is None and key is not None and self._is_due(key):
            self._unclosed = _Unclosed(self._end_before(at), key)

    def _call_close_at(self, at: int) -> Reading[_EndPlace | None]:
        self._reader.pos = at
        is_closed, is_certain = yield from self._call_ends()
        end = self._end_before(at) if self._unclosed is None else self._unclosed.end
        if is_certain and not (self._reader.is_cut and not is_closed):
            return end
        if is_closed:
            self._doubt = replace(end, is_weak=True)
        return None

    def _end_before(self, at: int) -> _EndPlace:
        """An end without a marker, before a tag; a newline before that belongs to it."""
        has_newline = not self._syntax.frame and self._reader.text[at - 1] == "\n"
        return _EndPlace(at - has_newline, at)

    def _end_marker_at(self, at: int) -> Reading[_EndPlace | None]:
        """The value's end if this end marker makes it certain."""
        reader = self._reader
        end = _EndPlace(at, at + len(self._end_marker))
        if self._fits is None:
            return end
        is_quoted = self._depth > 0
        try:
            if not is_quoted:
                key = yield from self._key_of_parameter_at(end.behind)
                if key is not None and self._fits(key):
                    return end if self._unclosed is None or self._unclosed.key == key else self._unclosed.end
                reader.pos = end.behind
                if (yield from self._cursor.precedes_call()):
                    return end if self._unclosed is None else self._unclosed.end
            reader.pos = end.behind
            is_closed, is_certain = yield from self._call_ends()
        except OutOfText:
            is_closed = is_certain = True
        except NotACall:
            if not is_quoted:
                self._unclosed = None
            return None
        self._depth -= is_quoted
        if self._unclosed is not None:
            end = self._unclosed.end
        if is_certain and not is_quoted:
            return end
        if is_closed or is_certain:
            self._doubt = replace(end, is_weak=is_quoted)
        return None

    def _key_of_parameter_at(self, at: int) -> Reading[str | None]:
        """Raises OutOfText if the text ends there."""
        self._reader.pos = at
        yield from self._reader.skip_space()
        try:
            return (yield from self._cursor.open_parameter())
        except NotACall as problem:
            if isinstance(problem, OutOfText):
                raise
            return None

    def _call_ends(self) -> Reading[tuple[bool, bool]]:
        """Whether all end markers of the call follow, and whether what follows them is conclusive.

        Raises NotACall if not even its first end marker does.
        """
        reader, syntax = self._reader, self._syntax
        yield from reader.skip_space()
        yield from reader.expect(syntax.call_close)
        self._calls_end = reader.pos
        is_closed = syntax.wrapper is None
        if syntax.wrapper is not None and (yield from reader.skip_space()):
            is_closed = yield from reader.take(syntax.wrapper[1])
        start_markers = (syntax.call_open, *(syntax.wrapper or ())[:1])
        is_last = not (yield from reader.skip_space())
        return is_closed, is_last or (yield from reader.take_any(start_markers)) is not None

    def _pass_on(self, end: int, value: TextValue) -> None:
        text = self._reader.text
        # The newline before an end marker belongs to it.
        if self._syntax.frame and end > self._passed_on and text[end - 1] == self._syntax.frame:
            end -= 1
        if end > self._passed_on:
            value.add(text[self._passed_on : end])
            self._passed_on = self._reader.settled = end
