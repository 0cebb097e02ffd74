"""Llama 3.x: bare JSON objects, maybe after a token.

    {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}
    <|python_tag|>{"name": "f", "parameters": {"a": 1}}

Without the token only objects that begin a line and end the output are calls: an answer may well contain JSON.
"""

from __future__ import annotations

from headrace.text.formats.calls import CallSink
from headrace.text.formats.json_calls import read_call
from headrace.text.formats.reader import NotACall, Reader, Reading
from headrace.text.formats.tool_format import ToolFormat

_TOKEN = "<|python_tag|>"


class LlamaCalls(ToolFormat):
    """Consecutive objects."""

    openers = (_TOKEN,)
    bare_openers = ("{",)
    markers = (_TOKEN,)

    def read(self, reader: Reader, sink: CallSink) -> Reading[None]:
        is_bare = not (yield from reader.take(_TOKEN))
        sink.is_unit, sink.is_meant = True, not is_bare
        yield from reader.skip_space()
        while True:
            yield from read_call(reader, sink)
            if not (yield from reader.skip_space()):
                return
            if (yield from reader.take_any((";", ","))) and not (yield from reader.skip_space()):
                return
            if (yield from reader.take(_TOKEN)):
                yield from reader.skip_space()
            if (yield from reader.peek()) != "{":
                break
        if is_bare and sink.is_text is None:
            raise NotACall  # something else follows: an answer that contains JSON
        reader.pos = sink.done
