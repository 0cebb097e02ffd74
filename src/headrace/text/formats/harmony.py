"""A call in gpt-oss' harmony: a message to `functions.NAME`, whose body is JSON. See `text/harmony.py` for the rest."""

from __future__ import annotations

import re

from headrace.text.formats.arguments import read_arguments
from headrace.text.formats.calls import CallSink
from headrace.text.formats.reader import NotACall, Reader, Reading
from headrace.text.formats.tool_format import ToolFormat

MESSAGE = "<|message|>"
END_MARKERS = ("<|end|>", "<|call|>", "<|return|>")
MAX_HEADER = 400

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class HarmonyCall(ToolFormat):
    """A message to a tool, from its header on."""

    markers = ("<|start|>", "<|channel|>", "<|constrain|>", MESSAGE, *END_MARKERS)

    def read(self, reader: Reader, sink: CallSink) -> Reading[None]:
        header = yield from reader.take_until(MESSAGE, MAX_HEADER)
        recipient = recipient_of(header)
        if recipient is None:
            raise NotACall
        schema = sink.begin(recipient.removeprefix("functions."))
        yield from read_arguments(reader, schema, sink.write, (*END_MARKERS, "<|start|>"))
        if (yield from reader.skip_space()):
            yield from reader.close(*END_MARKERS)
        yield from sink.end()


def recipient_of(header: str) -> str | None:
    """The recipient of a message; None for the user."""
    match = _RECIPIENT.search(header)
    return None if match is None else match[1]
