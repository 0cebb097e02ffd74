"""Kimi K2: calls in a section; the id names the tool and counts over the whole conversation.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>
    <|tool_calls_section_end|>

The section's markers and the ends may be missing, of a call without arguments their marker, too.
"""

from __future__ import annotations

from headrace.text.formats.arguments import read_arguments
from headrace.text.formats.calls import CallSink
from headrace.text.formats.reader import MAX_NAME, Reader, Reading
from headrace.text.formats.tool_format import ToolFormat

_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_CALL = ("<|tool_call_begin|>", "<|tool_call_end|>")
_ARGUMENTS = "<|tool_call_argument_begin|>"


class KimiCalls(ToolFormat):
    """A section of calls, or calls without one."""

    openers = (_SECTION[0], _CALL[0])
    markers = (*_SECTION, *_CALL, _ARGUMENTS)
    id_style = "counted"

    def read(self, reader: Reader, sink: CallSink) -> Reading[None]:
        yield from reader.take(_SECTION[0])
        yield from reader.skip_space()
        yield from reader.expect(_CALL[0])
        while True:
            sink.is_meant = True
            end = yield from reader.find((_ARGUMENTS, _CALL[1]), MAX_NAME)
            written, reader.pos = reader.text[reader.pos : end].strip(), end
            schema = sink.begin(_name(written, sink), written)
            yield from reader.take(_ARGUMENTS)
            yield from read_arguments(reader, schema, sink.write, (_CALL[1], _SECTION[1], _CALL[0]))
            if (yield from reader.skip_space()):
                yield from reader.close(_CALL[1])
            yield from sink.end()
            if not (yield from reader.skip_space()):
                return
            if not (yield from reader.take(_CALL[0])):
                break
        if (yield from reader.close(_SECTION[1])):
            sink.done = reader.pos


def _name(written: str, sink: CallSink) -> str:
    """The tool's name in an id like `functions.f:0`; a declared name is used unchanged."""
    if sink.declares(written):
        return written
    name, colon, index = written.rpartition(":")
    name = name if colon and index.isdigit() else written
    return name if sink.declares(name) else name.removeprefix("functions.")
