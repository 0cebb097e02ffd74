"""Gemma 4: bare keys, and strings between tokens of their own, without escapes.

    <|tool_call>call:f{a:1,b:<|"|>x<|"|>}<tool_call|>

Models at times fall back into JSON's quotes, around keys and strings; both are read. The braces of a call without
arguments may be missing.
"""

from __future__ import annotations

from headrace.text.formats.arguments import write_none
from headrace.text.formats.calls import CallSink
from headrace.text.formats.literals import GEMMA, LiteralReader
from headrace.text.formats.reader import MAX_NAME, NotACall, Reader, Reading
from headrace.text.formats.tool_format import ToolFormat

_OPENER, _CLOSER = "<|tool_call>", "<tool_call|>"


class GemmaCalls(ToolFormat):
    """One call between two tokens."""

    openers = (_OPENER,)
    markers = (_OPENER, _CLOSER, '<|"|>')

    def read(self, reader: Reader, sink: CallSink) -> Reading[None]:
        yield from reader.expect(_OPENER)
        yield from reader.skip_space()
        yield from reader.expect("call:")
        sink.is_meant = True
        end = yield from reader.find(("{", _CLOSER), MAX_NAME)
        name, reader.pos = reader.text[reader.pos : end].strip(), end
        if any(char.isspace() for char in name):
            raise NotACall
        schema = sink.begin(name)
        if (yield from reader.peek()) == "{":
            yield from LiteralReader(reader, sink.write, GEMMA).mapping(schema)
        else:
            write_none(schema, sink.write)
        if (yield from reader.skip_space()):
            yield from reader.close(_CLOSER)
        yield from sink.end()
