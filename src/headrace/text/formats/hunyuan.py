"""Hunyuan's Hy3: GLM's elements in a wrapper, every tag with a suffix from the vocabulary (previews have none).

    <tool_calls:opensource>
    <tool_call:opensource>f<tool_sep:opensource>
    <arg_key:opensource>a</arg_key:opensource>
    <arg_value:opensource>1</arg_value:opensource>
    </tool_call:opensource>
    </tool_calls:opensource>

Its older sister A13B writes `<tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>`.
"""

from __future__ import annotations

from headrace.text.formats.calls import CallSink
from headrace.text.formats.json_calls import read_json_body
from headrace.text.formats.reader import Reader, Reading
from headrace.text.formats.tag_cursor import TagSyntax
from headrace.text.formats.tags import TagReader
from headrace.text.formats.tool_format import ToolFormat


def _syntax(suffix: str) -> TagSyntax:
    return TagSyntax(
        wrapper=(f"<tool_calls{suffix}>", f"</tool_calls{suffix}>"),
        call_open=f"<tool_call{suffix}>", name_end=f"<tool_sep{suffix}>", call_close=f"</tool_call{suffix}>",
        key_open=f"<arg_key{suffix}>", key_end=f"</arg_key{suffix}>",
        value_open=f"<arg_value{suffix}>", value_close=f"</arg_value{suffix}>",
    )  # fmt: skip


_SUFFIXED, _PLAIN = _syntax(":opensource"), _syntax("")


class Hunyuan(ToolFormat):
    """Either generation: the wrapper's body is a list of JSON objects or a sequence of elements."""

    openers = ("<tool_calls:opensource>", "<tool_calls>")
    markers = tuple(tag for syntax in (_SUFFIXED, _PLAIN) for tag in syntax.tags)

    def read(self, reader: Reader, sink: CallSink) -> Reading[None]:
        opener = yield from reader.take_any(self.openers)
        syntax = _SUFFIXED if opener == self.openers[0] else _PLAIN
        yield from reader.skip_space()
        if (yield from reader.peek()) == "<":
            yield from TagReader(syntax, reader, sink, is_wrapped=True).calls()
            return
        yield from read_json_body(reader, sink)
        if (yield from reader.skip_space()):
            yield from reader.close("</tool_calls>")
        sink.done = reader.pos
