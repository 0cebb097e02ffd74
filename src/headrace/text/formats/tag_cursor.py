"""Skips the tags of syntaxes whose arguments stand unescaped between tags."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.text.formats.reader import MAX_NAME, NotACall, Reader, Reading

_NOT_IN_NAMES = frozenset(" \t\r\n<>{}\"'`")
_BEHIND_KEY = re.compile(r'\s*(string="(true|false)"\s*)?')


@dataclass(frozen=True, slots=True)
class TagSyntax:
    """The tags of one syntax.

    wrapper: opens and closes a group of calls, None if there is none.
    call_open, name_end, call_close: around a call; with an empty `name_end` a tag or a newline ends the name.
    key_open, key_end, value_open, value_close: around a parameter; `value_open` is empty where the key's end is enough.
    is_framed: one newline on each side of a value belongs to the tags.
    """

    wrapper: tuple[str, str] | None
    call_open: str
    name_end: str
    call_close: str
    key_open: str
    key_end: str
    value_open: str
    value_close: str
    is_framed: bool = False

    @property
    def tags(self) -> tuple[str, ...]:
        """All texts that may be tokens of a vocabulary."""
        ends = (self.call_open, self.name_end, self.call_close, self.key_open, self.key_end)
        whole = (*(self.wrapper or ()), *ends, self.value_open, self.value_close)
        return tuple(tag for tag in whole if tag.startswith("<") and tag.endswith(">"))


class TagCursor:
    def __init__(self, syntax: TagSyntax, reader: Reader) -> None:
        self.syntax = syntax
        self.reader = reader

    def is_at_call(self) -> Reading[bool]:
        """Whether a call's opener comes next; does not skip it."""
        start = self.reader.pos
        is_call = yield from self.reader.take(self.syntax.call_open)
        self.reader.pos = start
        return is_call

    def open_call(self) -> Reading[str]:
        """Skip a call's opening and return its name."""
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
            if not _BEHIND_KEY.fullmatch(between):
                raise NotACall("a parameter without a value")
        if not key or "\n" in key or "<" in key:
            raise NotACall("a parameter without a name")
        return key

    def begins_call(self) -> Reading[str | None]:
        """What follows a call's opening: a key's opener or the call's closer; None if no call begins.

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
