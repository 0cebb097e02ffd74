"""Calls as JSON objects with a name and arguments, alone or in a list, between markers that differ by family.

<tool_call>          hermes: one object between the markers, newlines around it
{"name": "f", "arguments": {"a": 1}}
</tool_call>
[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]          the others: a list
"""

from __future__ import annotations

from headrace.text.formats.arguments import ignore, read_arguments, write_none
from headrace.text.formats.calls import CallSink
from headrace.text.formats.literals import JSON, LiteralReader
from headrace.text.formats.reader import MAX_NAME, NotACall, OutOfText, Reader, Reading, run_to_end
from headrace.text.formats.schema import ANY, Schema
from headrace.text.formats.tool_format import ToolFormat

NAME_KEYS = frozenset({"name", "function"})
ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_OTHER_KEYS = frozenset({"id", "type", "index"})


class JsonCalls(ToolFormat):
    """Objects or a list of them after an opener. closer: the end of the construct, which may be missing."""

    def __init__(self, openers: tuple[str, ...], closer: str, markers: tuple[str, ...]) -> None:
        self.openers = openers
        self.closer = closer
        self.markers = markers

    def read(self, reader: Reader, sink: CallSink) -> Reading[None]:
        yield from reader.take_any(self.openers)
        yield from read_json_body(reader, sink)
        if (yield from reader.skip_space()):
            yield from reader.close(self.closer)
        sink.done = reader.pos


def read_json_body(reader: Reader, sink: CallSink) -> Reading[None]:
    """A list of call objects, or consecutive objects."""
    sink.is_unit = True
    yield from reader.skip_space()
    sink.is_meant = (yield from reader.peek()) in "[{"
    if reader.text[reader.pos] == "[":
        yield from _list(reader, sink)
        return
    yield from read_call(reader, sink)
    while (yield from reader.skip_space()) and reader.text[reader.pos] == "{":
        yield from read_call(reader, sink)


def read_call(reader: Reader, sink: CallSink) -> Reading[bool]:
    """One call object; false if its last brace is missing, which may be at the text's end."""
    call = _CallObject(reader, sink)
    try:
        yield from reader.expect("{")
        is_closed = yield from call.members()
    except OutOfText:
        if not call.is_complete:
            raise
        is_closed = False  # only the brace is missing
    yield from call.finish()
    return is_closed


def _list(reader: Reader, sink: CallSink) -> Reading[None]:
    yield from reader.expect("[")
    yield from reader.skip_space()
    while True:
        is_closed = yield from read_call(reader, sink)
        try:
            yield from reader.skip_space()
            if (yield from reader.take("]")):
                return
            if not is_closed:
                raise NotACall("a brace is missing")
            yield from reader.expect(",")
        except OutOfText:
            return  # the bracket is missing where the text ends
        yield from reader.skip_space()


class _CallObject:
    """Reads the members of one call object, in any order."""

    def __init__(self, reader: Reader, sink: CallSink) -> None:
        self._reader = reader
        self._sink = sink
        self._schema: Schema | None = None
        self._early: str | None = None
        self._has_arguments = False

    @property
    def is_complete(self) -> bool:
        """Whether the name and the arguments are there."""
        return self._schema is not None and self._has_arguments

    def members(self) -> Reading[bool]:
        """Everything after the opening brace; false if a marker comes where the closing one was due."""
        reader = self._reader
        while True:
            yield from reader.skip_space()
            yield from reader.peek()
            key = yield from LiteralReader(reader, ignore).key()
            if key in NAME_KEYS and self._schema is None:
                yield from self._name()
            elif key in ARGUMENT_KEYS and not self._has_arguments:
                yield from self._arguments()
            elif key in _OTHER_KEYS:
                yield from LiteralReader(reader, ignore).value(ANY)
            else:
                raise NotACall(None if self._schema is None else "a member that no call has")
            yield from reader.skip_space()
            if (yield from reader.take("}")):
                return True
            if self.is_complete and (yield from reader.peek()) in "<[":
                return False
            yield from reader.expect(",")
            yield from reader.skip_space()
            if (yield from reader.take("}")):
                return True

    def finish(self) -> Reading[None]:
        """The end of the object. Raises NotACall if something is missing."""
        if self._schema is None:
            raise NotACall
        if not self._has_arguments:
            if self._schema is ANY:  # another object, such as an answer in JSON
                raise NotACall
            write_none(self._schema, self._sink.write)
        yield from self._sink.end()

    def _name(self) -> Reading[None]:
        reader = self._reader
        yield from reader.skip_space()
        quote = yield from reader.take_any(JSON.quotes)
        if quote is None:
            raise NotACall
        name = yield from LiteralReader(reader, ignore).string_text(quote, MAX_NAME)
        self._schema = self._sink.begin(name)
        if self._early is not None:
            early = Reader(self._early, ended=True)
            run_to_end(read_arguments(early, self._schema, self._sink.write))

    def _arguments(self) -> Reading[None]:
        if self._schema is None:
            # Types are known only with the name, so arguments before it are read again then.
            yield from self._reader.skip_space()
            start = self._reader.pos
            yield from read_arguments(self._reader, ANY, ignore)
            self._early = self._reader.text[start : self._reader.pos]
        else:
            yield from read_arguments(self._reader, self._schema, self._sink.write)
        self._has_arguments = True
