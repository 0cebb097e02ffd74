"""Calls delimited by special tokens, each syntax in its own way.

deepseek  <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
          ```json
          {"a": 1}
          ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
          <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
kimi      <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}
          <|tool_call_end|><|tool_calls_section_end|>
mistral   [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "Ab3dEf9hI"}]
          [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]aB9zQ1xY2[ARGS]{}
gemma     <|tool_call>call:f{a:1,b:<|"|>x<|"|>}<tool_call|>
          <start_function_call>call:f{a:1,b:<escape>x<escape>}<end_function_call>
harmony   <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
"""

from __future__ import annotations

import re
from abc import abstractmethod

from headrace.tool_calls.calls import CallParser, CallSink
from headrace.tool_calls.json_calls import read_arguments, read_json_body, write_none
from headrace.tool_calls.literals import LiteralReader, Spelling
from headrace.tool_calls.reader import MAX_NAME, NotACall, OutOfText, Reader, Reading
from headrace.tool_calls.schema import Schema

_DEEPSEEK_LIST = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
_KIND, _FENCES = "function", ("```json", "```")
_DEEPSEEK_ENDS = (_DEEPSEEK_CALL[1], _DEEPSEEK_LIST[1], _DEEPSEEK_CALL[0])

_KIMI_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
# Some outputs have the singular; vLLM's parser accepts both.
_KIMI_OTHER_SECTION = ("<|tool_call_section_begin|>", "<|tool_call_section_end|>")
_KIMI_CALL = ("<|tool_call_begin|>", "<|tool_call_end|>")
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_KIMI_ENDS = (_KIMI_CALL[1], _KIMI_SECTION[1], _KIMI_OTHER_SECTION[1], _KIMI_CALL[0])

_MISTRAL_START = "[TOOL_CALLS]"
_MISTRAL_ID = "[CALL_ID]"
_MISTRAL_ARGUMENTS = "[ARGS]"
_MISTRAL_ID_LENGTH = 9

MESSAGE = "<|message|>"
END_MARKERS = ("<|end|>", "<|call|>", "<|return|>")
MAX_HEADER = 400

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class GroupedCalls(CallParser):
    """Calls between two markers each, in a group between two others, of which all but a call's first may be missing.

    groups: spellings of the group's markers.
    """

    groups: tuple[tuple[str, str], ...]
    call: tuple[str, str]

    def read(self, reader: Reader, sink: CallSink) -> Reading[None]:
        yield from reader.take_any([start for start, _ in self.groups])
        yield from reader.skip_space()
        yield from reader.expect(self.call[0])
        while True:
            sink.is_meant = True
            yield from self._read_call(reader, sink)
            if (yield from reader.skip_space()):
                yield from reader.close(self.call[1])
            yield from sink.end()
            if not (yield from reader.skip_space()):
                return
            if not (yield from reader.take(self.call[0])):
                break
        if (yield from reader.close(*(end for _, end in self.groups))):
            sink.done = reader.pos

    @abstractmethod
    def _read_call(self, reader: Reader, sink: CallSink) -> Reading[None]:
        """Read a call between its markers."""


class DeepSeekCalls(GroupedCalls):
    """DeepSeek V3, R1 (in a code fence) and V3.1, V3.2-Exp."""

    groups, call = (_DEEPSEEK_LIST,), _DEEPSEEK_CALL
    start_markers = (_DEEPSEEK_LIST[0], _DEEPSEEK_CALL[0])
    markers = (*_DEEPSEEK_LIST, *_DEEPSEEK_CALL, _DEEPSEEK_SEPARATOR)

    def _read_call(self, reader: Reader, sink: CallSink) -> Reading[None]:
        first = (yield from reader.take_until(_DEEPSEEK_SEPARATOR, MAX_NAME)).strip()
        yield from reader.skip_space()
        if first != _KIND or (yield from reader.peek()) == "{":
            yield from read_arguments(reader, sink.begin(first), sink.write, _DEEPSEEK_ENDS)
        else:
            end = yield from reader.find(("\n", _DEEPSEEK_CALL[1]), MAX_NAME)
            name, reader.pos = reader.text[reader.pos : end].strip(), end
            yield from self._fenced(reader, sink.begin(name), sink)

    def _fenced(self, reader: Reader, schema: Schema, sink: CallSink) -> Reading[None]:
        """Arguments in a code fence; without arguments the fence may be missing."""
        yield from reader.skip_space()
        yield from reader.take_any(_FENCES)
        yield from read_arguments(reader, schema, sink.write, ("```", *_DEEPSEEK_ENDS))
        if (yield from reader.skip_space()):
            yield from reader.close("```")


class KimiCalls(GroupedCalls):
    """Kimi K2: the id names the tool and counts over the whole conversation.

    The marker of a call's arguments may be missing if there are none.
    """

    groups, call = (_KIMI_SECTION, _KIMI_OTHER_SECTION), _KIMI_CALL
    start_markers = (_KIMI_SECTION[0], _KIMI_OTHER_SECTION[0], _KIMI_CALL[0])
    markers = (*_KIMI_SECTION, *_KIMI_OTHER_SECTION, *_KIMI_CALL, _KIMI_ARGUMENTS)

    def _read_call(self, reader: Reader, sink: CallSink) -> Reading[None]:
        end = yield from reader.find((_KIMI_ARGUMENTS, _KIMI_CALL[1]), MAX_NAME)
        written, reader.pos = reader.text[reader.pos : end].strip(), end
        schema = sink.begin(_kimi_name(written, sink), written)
        yield from reader.take(_KIMI_ARGUMENTS)
        yield from read_arguments(reader, schema, sink.write, _KIMI_ENDS)


def _kimi_name(written: str, sink: CallSink) -> str:
    """The tool's name in an id like `functions.f:0`; a declared name is used unchanged."""
    if sink.declares(written):
        return written
    name, colon, index = written.rpartition(":")
    name = name if colon and index.isdigit() else written
    return name if sink.declares(name) else name.removeprefix("functions.")


class MistralCalls(CallParser):
    """A list of JSON objects (7B v0.3, Nemo), or a marker before each call. `[ARGS]` may vanish in detokenising."""

    start_markers = (_MISTRAL_START,)
    markers = (_MISTRAL_START, _MISTRAL_ID, _MISTRAL_ARGUMENTS)

    def read(self, reader: Reader, sink: CallSink) -> Reading[None]:
        yield from reader.expect(_MISTRAL_START)
        yield from reader.skip_space()
        if (yield from reader.peek()) in "[{":
            yield from read_json_body(reader, sink)
            return
        name = yield from self._name(reader, sink)
        if any(char.isspace() for char in name):
            raise NotACall
        written_id = None
        if (yield from reader.take(_MISTRAL_ID)):
            yield from reader.peek(_MISTRAL_ID_LENGTH)
            written_id = reader.text[reader.pos : reader.pos + _MISTRAL_ID_LENGTH]
            reader.pos += _MISTRAL_ID_LENGTH
        yield from reader.take(_MISTRAL_ARGUMENTS)
        schema = sink.begin(name, written_id)
        yield from read_arguments(reader, schema, sink.write, (_MISTRAL_START,))
        yield from sink.end()

    def _name(self, reader: Reader, sink: CallSink) -> Reading[str]:
        """The name before the arguments or their marker; after a declared tool's name the text may end."""
        start = reader.pos
        try:
            end = yield from reader.find((_MISTRAL_ID, _MISTRAL_ARGUMENTS, "{", _MISTRAL_START), MAX_NAME)
        except OutOfText:
            end = len(reader.text)
            if reader.is_cut or not sink.declares(reader.text[start:].strip()):
                raise
        reader.pos = end
        return reader.text[start:end].strip()


class GemmaCalls(CallParser):
    """Gemma 4 and FunctionGemma: bare keys, and strings between special tokens, without escapes.

    Models at times fall back into JSON's quotes, around keys and strings; both are read. The braces of a call without
    arguments may be missing.
    """

    def __init__(self, start_marker: str, end_marker: str, spelling: Spelling) -> None:
        self.start_markers = (start_marker,)
        self.markers = (start_marker, end_marker, *(quote for quote in spelling.quotes if quote.startswith("<")))
        self._end_marker = end_marker
        self._spelling = spelling

    def read(self, reader: Reader, sink: CallSink) -> Reading[None]:
        yield from reader.expect(self.start_markers[0])
        yield from reader.skip_space()
        yield from reader.expect("call:")
        sink.is_meant = True
        end = yield from reader.find(("{", self._end_marker), MAX_NAME)
        name, reader.pos = reader.text[reader.pos : end].strip(), end
        if any(char.isspace() for char in name):
            raise NotACall
        schema = sink.begin(name)
        if (yield from reader.peek()) == "{":
            yield from LiteralReader(reader, sink.write, self._spelling).mapping(schema)
        else:
            write_none(schema, sink.write)
        if (yield from reader.skip_space()):
            yield from reader.close(self._end_marker)
        yield from sink.end()


class HarmonyCall(CallParser):
    """gpt-oss: a message to a tool, from its header on. See `text/harmony.py` for the other messages."""

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
    match = _RECIPIENT.search(header)
    return None if match is None else match[1]
