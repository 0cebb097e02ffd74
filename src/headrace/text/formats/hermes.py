"""`<tool_call>` around JSON (Hermes, Qwen2.5, Qwen3, Granite 4) or around XML (Qwen3-Coder, Qwen3.5, Nemotron 3).

    <tool_call>                                        <tool_call>
    {"name": "f", "arguments": {"a": 1}}               <function=f>
    </tool_call>                                       <parameter=a>
                                                       1
                                                       </parameter>
                                                       </function>
                                                       </tool_call>

Models of either kind now and then write the other one's body, so both are read; the second kind sometimes leaves out
the wrapper's opener.
"""

from __future__ import annotations

from headrace.text.formats.calls import CallSink
from headrace.text.formats.json_calls import read_json_body
from headrace.text.formats.reader import Reader, Reading
from headrace.text.formats.tag_cursor import TagSyntax
from headrace.text.formats.tags import TagReader
from headrace.text.formats.tool_format import ToolFormat

_WRAPPER = ("<tool_call>", "</tool_call>")

QWEN_XML = TagSyntax(
    wrapper=_WRAPPER,
    call_open="<function=", name_end=">", call_close="</function>",
    key_open="<parameter=", key_end=">", value_open="", value_close="</parameter>",
    is_framed=True,
)  # fmt: skip


class ToolCallTags(ToolFormat):
    """The wrapper with either body. bare_function: the XML body counts without the wrapper's opener, too."""

    markers = _WRAPPER

    def __init__(self, *, bare_function: bool) -> None:
        self.openers = (_WRAPPER[0], QWEN_XML.call_open) if bare_function else (_WRAPPER[0],)

    def read(self, reader: Reader, sink: CallSink) -> Reading[None]:
        is_wrapped = yield from reader.take(_WRAPPER[0])
        yield from reader.skip_space()
        if (yield from reader.peek()) == "<":
            yield from TagReader(QWEN_XML, reader, sink, is_wrapped=is_wrapped).calls()
            return
        yield from read_json_body(reader, sink)
        if (yield from reader.skip_space()):
            yield from reader.close(_WRAPPER[1])
        sink.done = reader.pos
