"""Mistral: a list of JSON objects (7B v0.3, Nemo), or name and arguments with a marker before each call (later ones).

    [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "Ab3dEf9hI"}]
    [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]aB9zQ1xY2[ARGS]{}

`[ARGS]` may vanish in detokenising. Ids are nine letters or digits, and templates refuse others.
"""

from __future__ import annotations

from headrace.text.formats.arguments import read_arguments
from headrace.text.formats.calls import CallSink
from headrace.text.formats.json_calls import read_json_body
from headrace.text.formats.reader import MAX_NAME, NotACall, OutOfText, Reader, Reading
from headrace.text.formats.tool_format import ToolFormat

_OPENER = "[TOOL_CALLS]"
_ID = "[CALL_ID]"
_ARGUMENTS = "[ARGS]"
_LENGTH_OF_ID = 9


class MistralCalls(ToolFormat):
    """Either form."""

    openers = (_OPENER,)
    markers = (_OPENER, _ID, _ARGUMENTS)
    id_style = "short"

    def read(self, reader: Reader, sink: CallSink) -> Reading[None]:
        yield from reader.expect(_OPENER)
        yield from reader.skip_space()
        if (yield from reader.peek()) in "[{":
            yield from read_json_body(reader, sink)
            return
        name = yield from self._name(reader, sink)
        if any(char.isspace() for char in name):
            raise NotACall
        written_id = None
        if (yield from reader.take(_ID)):
            yield from reader.peek(_LENGTH_OF_ID)
            written_id = reader.text[reader.pos : reader.pos + _LENGTH_OF_ID]
            reader.pos += _LENGTH_OF_ID
        yield from reader.take(_ARGUMENTS)
        schema = sink.begin(name, written_id)
        yield from read_arguments(reader, schema, sink.write, (_OPENER,))
        yield from sink.end()

    def _name(self, reader: Reader, sink: CallSink) -> Reading[str]:
        """The name before the arguments or their marker; after a declared tool's name the text may end."""
        start = reader.pos
        try:
            end = yield from reader.find((_ID, _ARGUMENTS, "{", _OPENER), MAX_NAME)
        except OutOfText:
            end = len(reader.text)
            if reader.is_cut or not sink.declares(reader.text[start:].strip()):
                raise
        reader.pos = end
        return reader.text[start:end].strip()
