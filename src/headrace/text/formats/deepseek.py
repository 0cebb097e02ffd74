"""DeepSeek V3, R1 (JSON in a code fence) and V3.1, V3.2-Exp (bare JSON), in a list.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
```json
{"a": 1}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from headrace.text.formats.arguments import read_arguments
from headrace.text.formats.calls import CallSink
from headrace.text.formats.reader import MAX_NAME, Reader, Reading
from headrace.text.formats.schema import Schema
from headrace.text.formats.tool_format import ToolFormat

_LIST = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_SEPARATOR = "<｜tool▁sep｜>"
_KIND, _FENCES = "function", ("```json", "```")
_ENDS = (_CALL[1], _LIST[1], _CALL[0])


class DeepSeekCalls(ToolFormat):
    """Either form; a call may come without its list's opener."""

    openers = (_LIST[0], _CALL[0])
    markers = (*_LIST, *_CALL, _SEPARATOR)

    def read(self, reader: Reader, sink: CallSink) -> Reading[None]:
        yield from reader.take(_LIST[0])
        yield from reader.skip_space()
        yield from reader.expect(_CALL[0])
        while True:
            sink.is_meant = True
            yield from self._call(reader, sink)
            if not (yield from reader.skip_space()):
                return
            if not (yield from reader.take(_CALL[0])):
                break
        if (yield from reader.close(_LIST[1])):
            sink.done = reader.pos

    def _call(self, reader: Reader, sink: CallSink) -> Reading[None]:
        first = (yield from reader.take_until(_SEPARATOR, MAX_NAME)).strip()
        yield from reader.skip_space()
        if first != _KIND or (yield from reader.peek()) == "{":
            yield from read_arguments(reader, sink.begin(first), sink.write, _ENDS)
        else:
            end = yield from reader.find(("\n", _CALL[1]), MAX_NAME)
            name, reader.pos = reader.text[reader.pos : end].strip(), end
            yield from self._fenced(reader, sink.begin(name), sink)
        if (yield from reader.skip_space()):
            yield from reader.close(_CALL[1])
        yield from sink.end()

    def _fenced(self, reader: Reader, schema: Schema, sink: CallSink) -> Reading[None]:
        """Arguments in a code fence; without arguments the fence may be missing."""
        yield from reader.skip_space()
        yield from reader.take_any(_FENCES)
        yield from read_arguments(reader, schema, sink.write, ("```", *_ENDS))
        if (yield from reader.skip_space()):
            yield from reader.close("```")
