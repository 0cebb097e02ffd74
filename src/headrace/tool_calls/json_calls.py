"""Calls as JSON objects with a name and arguments, alone or in a list, and arguments as JSON.

<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]
{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}
<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}]<|END_ACTION|>
<function=f>{"a": 1}</function>
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.tool_calls.calls import CallParser, CallSink
from headrace.tool_calls.literals import JSON, LiteralReader, Write
from headrace.tool_calls.reader import MAX_NAME, SPACE, NotACall, OutOfText, Reader, Reading, run_to_end
from headrace.tool_calls.schema import ANY, Schema

NAME_KEYS = frozenset({"name", "function", "tool_name"})
ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_OTHER_KEYS = frozenset({"id", "type", "index", "tool_call_id"})

_NULL = ("null", "None")
_LLAMA_TOKENS = ("<|python_tag|>", "<|python_start|>")
_LLAMA_END = "<|python_end|>"
_FUNCTION = ("<function=", "</function>")


class JsonCalls(CallParser):
    """Objects or a list of them after a start marker. end_marker: the end of the construct, which may be missing."""

    def __init__(self, start_markers: tuple[str, ...], end_marker: str, markers: tuple[str, ...]) -> None:
        self.start_markers = start_markers
        self.end_marker = end_marker
        self.markers = markers

    def read(self, reader: Reader, sink: CallSink) -> Reading[None]:
        yield from reader.take_any(self.start_markers)
        yield from read_json_body(reader, sink)
        if (yield from reader.skip_space()):
            yield from reader.close(self.end_marker)
        sink.done = reader.pos


class LlamaCalls(CallParser):
    """Consecutive objects without a list, maybe after a token. Llama 4's is closed before or after them.

    Without a token only objects that begin a line and end the output are calls: an answer may well contain JSON.
    """

    start_markers = _LLAMA_TOKENS
    bare_starts = ("{",)
    markers = (*_LLAMA_TOKENS, _LLAMA_END)

    def read(self, reader: Reader, sink: CallSink) -> Reading[None]:
        is_bare = (yield from reader.take_any(_LLAMA_TOKENS)) is None
        sink.is_unit, sink.is_meant = True, not is_bare
        yield from reader.take(_LLAMA_END)
        yield from reader.skip_space()
        while True:
            yield from read_call(reader, sink)
            if not (yield from reader.skip_space()):
                return
            if (yield from reader.take(_LLAMA_END)):
                sink.done = reader.pos
                if not (yield from reader.skip_space()):
                    return
            if (yield from reader.take_any((";", ","))) and not (yield from reader.skip_space()):
                return
            if (yield from reader.take_any(_LLAMA_TOKENS)):
                yield from reader.skip_space()
            if (yield from reader.peek()) != "{":
                break
        if is_bare and sink.is_text is None:
            raise NotACall  # something else follows: an answer that contains JSON
        reader.pos = sink.done


class FunctionCalls(CallParser):
    """Functionary 3.1: an element that names the tool, around its arguments as JSON."""

    start_markers = (_FUNCTION[0],)

    def read(self, reader: Reader, sink: CallSink) -> Reading[None]:
        yield from reader.expect(_FUNCTION[0])
        name = (yield from reader.take_until(">", MAX_NAME)).strip()
        if any(char.isspace() for char in name):
            raise NotACall
        sink.is_meant = (yield from reader.skip_space()) and reader.text[reader.pos] == "{"
        yield from read_arguments(reader, sink.begin(name), sink.write, _FUNCTION[1:])
        if (yield from reader.skip_space()):
            yield from reader.close(_FUNCTION[1])
        yield from sink.end()


def read_json_body(reader: Reader, sink: CallSink) -> Reading[None]:
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
                raise NotACall(None if self._schema is None else "an unknown field of a call")
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


def read_arguments(reader: Reader, schema: Schema, write: Write, ends: Sequence[str] = ()) -> Reading[None]:
    """An object, a string that contains one, or, for a tool without required arguments, null or nothing.

    ends: texts one of which follows if there is nothing; the text's end counts, too, if any are given.
    """
    is_last = not (yield from reader.skip_space())
    if is_last and (not ends or reader.is_cut):
        raise OutOfText
    if is_last or (yield from _comes_next(reader, ends)) or (yield from take_null(reader)):
        write_none(schema, write)
        return
    quote = yield from reader.take_any(JSON.quotes)
    if quote is None:
        yield from LiteralReader(reader, write).mapping(schema)
        return
    text = (yield from LiteralReader(reader, ignore).string_text(quote)).strip(SPACE)
    if not text:
        write_none(schema, write)
        return
    inner = Reader(text, ended=True)
    run_to_end(read_arguments(inner, schema, write))
    if run_to_end(inner.skip_space()):
        raise NotACall("text after the arguments")


def take_null(reader: Reader) -> Reading[bool]:
    """Skip a null instead of arguments, but not a longer word."""
    start = reader.pos
    if (yield from reader.take_any(_NULL)) is None:
        return False
    if (yield from reader.is_done()) or not (reader.text[reader.pos].isalnum() or reader.text[reader.pos] == "_"):
        return True
    reader.pos = start
    return False


def write_none(schema: Schema, write: Write) -> None:
    """Write empty arguments. Raises NotACall if the tool requires some."""
    if schema.required:
        raise NotACall("a call without arguments")
    write("{}")


def ignore(text: str) -> None:
    """Discards text."""


def _comes_next(reader: Reader, literals: Sequence[str]) -> Reading[bool]:
    start = reader.pos
    found = yield from reader.take_any(literals)
    reader.pos = start
    return found is not None
