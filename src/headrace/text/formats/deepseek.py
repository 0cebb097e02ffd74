"""DeepSeek V3, R1 (JSON in a code fence) and V3.1, V3.2-Exp (bare JSON), in a list.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
```json
{"a": 1}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from headrace.text.formats.calls import CallSink
from headrace.text.formats.literals import LiteralReader
from headrace.text.formats.reader import MAX_NAME, Reader, Reading
from headrace.text.formats.tool_format import ToolFormat

_LIST = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_SEPARATOR = "<｜tool▁sep｜>"


class DeepSeekCalls(ToolFormat):
    """Either form; a call may come without its list's opener."""

    openers = (_LIST[0], _CALL[0])
    markers = (*_LIST, *_CALL, _SEPARATOR)

    def read(self, reader: Reader, sink: CallSink) -> Reading[None]:
        yield from reader.take(_LIST[0])
        yield from reader.skip_space()
        yield from reader.expect(_CALL[0])
        while True:
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
        if (yield from reader.peek()) == "{":
            schema = sink.begin(first)
            yield from LiteralReader(reader, sink.write).mapping(schema)
        else:
            # What came first is the kind of call, always `function`.
            schema = sink.begin((yield from reader.take_until("\n", MAX_NAME)).strip())
            yield from reader.skip_space()
            yield from reader.take("```json")
            yield from reader.skip_space()
            yield from LiteralReader(reader, sink.write).mapping(schema)
            if (yield from reader.skip_space()):
                yield from reader.close("```")
        if (yield from reader.skip_space()):
            yield from reader.close(_CALL[1])
        yield from sink.end()
