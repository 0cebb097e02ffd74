"""Calls as a Python list (Llama 3.2, Llama 4, Gemma 3, LFM2), bare or between tokens.

    [f(a=1, b='x'), g()]
    <|tool_call_start|>[f(a=1, b="x")]<|tool_call_end|>

A bare list must be alone on its line.
"""

from __future__ import annotations

import json

from headrace.tool_calls.calls import CallParser, CallSink
from headrace.tool_calls.json_calls import read_json_body, take_null, write_none
from headrace.tool_calls.literals import PYTHON, LiteralReader
from headrace.tool_calls.reader import MAX_NAME, NotACall, OutOfText, Reader, Reading

_MAX_KEY = 128


class PythonCalls(CallParser):
    """A list of calls between two tokens or without any."""

    bare_starts = ("[",)

    def __init__(self, start_marker: str, end_marker: str) -> None:
        self.start_markers = (start_marker,)
        self.markers = (start_marker, end_marker)
        self._end_marker = end_marker

    def read(self, reader: Reader, sink: CallSink) -> Reading[None]:
        is_bare = not (yield from reader.take(self.start_markers[0]))
        sink.is_unit = True
        yield from reader.skip_space()
        sink.is_meant = not is_bare and (yield from reader.peek()) == "["
        if not is_bare and (yield from _holds_json(reader)):
            yield from read_json_body(reader, sink)
        else:
            yield from _list(reader, sink)
        if not is_bare:
            if (yield from reader.skip_space()):
                yield from reader.close(self._end_marker)
            sink.done = reader.pos
        elif (yield from reader.skip_space(" \t\r")) and reader.text[reader.pos] != "\n" and sink.is_text is None:
            raise NotACall


def _holds_json(reader: Reader) -> Reading[bool]:
    """Whether a list of objects comes, as one template writes calls into the history."""
    ahead = 0
    while (char := (yield from reader.peek(ahead))) in "[ \n":
        ahead += 1
    return char == "{"


def _list(reader: Reader, sink: CallSink) -> Reading[None]:
    yield from reader.expect("[")
    while True:
        yield from reader.skip_space()
        yield from _call(reader, sink)
        try:
            yield from reader.skip_space()
            if (yield from reader.take("]")):
                return
            yield from reader.expect(",")
        except OutOfText:
            return  # the bracket is missing where the text ends


def _call(reader: Reader, sink: CallSink) -> Reading[None]:
    start = reader.pos
    while (char := (yield from reader.peek())).isalnum() or char in "_.-":
        reader.pos += 1
        if reader.pos - start > MAX_NAME:
            raise NotACall
    name = reader.text[start : reader.pos]
    if char != "(" or not name or name[0].isdigit():
        raise NotACall
    reader.pos += 1
    schema = sink.begin(name)
    literals = LiteralReader(reader, sink.write, PYTHON)
    yield from reader.skip_space()
    if (yield from take_null(reader)):
        yield from reader.skip_space()
        yield from reader.expect(")")
        write_none(schema, sink.write)
        yield from sink.end()
        return
    sink.write("{")
    is_first = True
    while not (yield from literals.ends(")", is_first)):
        key = (yield from reader.take_until("=", _MAX_KEY)).strip()
        if not key.isidentifier():
            raise NotACall("arguments need names")
        sink.write(f"{'' if is_first else ', '}{json.dumps(key, ensure_ascii=False)}: ")
        yield from literals.value(schema.of_property(key))
        is_first = False
    sink.write("}")
    yield from sink.end()
