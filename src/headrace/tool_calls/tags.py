"""Calls whose arguments are unescaped text between tags, in a wrapper or without one.

<tool_call>                                        <minimax:tool_call>
<function=f>                                       <invoke name="f">
<parameter=a>                                      <parameter name="a">1</parameter>
1                                                  </invoke>
</parameter>                                       </minimax:tool_call>
</function>
</tool_call>
"""

from __future__ import annotations

import json

from headrace.tool_calls.calls import CallParser, CallSink
from headrace.tool_calls.forms import TagSyntax
from headrace.tool_calls.json_calls import read_json_body, take_null
from headrace.tool_calls.literals import LiteralReader
from headrace.tool_calls.reader import SPACE, NotACall, OutOfText, Reader, Reading
from headrace.tool_calls.schema import ANY, Schema
from headrace.tool_calls.tag_values import TagCursor, TextValue, ValueEnd

TEXT = Schema({"type": "string"})


class TaggedCalls(CallParser):
    """Calls of one of several syntaxes, distinguished by the wrapper.

    takes_bare_calls: a call counts without the wrapper's start marker, too.
    takes_json: the wrapper may contain JSON objects instead.
    """

    def __init__(self, *syntaxes: TagSyntax, takes_bare_calls: bool = False, takes_json: bool = False) -> None:
        self._syntaxes = {_start_marker(syntax): syntax for syntax in syntaxes}
        self._takes_json = takes_json
        bare = (syntaxes[0].call_open,) if takes_bare_calls else ()
        self.start_markers = tuple(dict.fromkeys((*self._syntaxes, *bare)))
        self.markers = tuple(dict.fromkeys(tag for syntax in syntaxes for tag in syntax.tags))

    def read(self, reader: Reader, sink: CallSink) -> Reading[None]:
        start = reader.pos
        start_marker = yield from reader.take_any(self.start_markers)
        syntax = self._syntaxes.get(start_marker or "", next(iter(self._syntaxes.values())))
        is_wrapped = start_marker in self._syntaxes and syntax.wrapper is not None
        if not is_wrapped:
            reader.pos = start
        yield from reader.skip_space()
        if is_wrapped and self._takes_json and (yield from reader.peek()) != "<":
            yield from self._read_json(reader, sink, syntax)
        else:
            yield from TagReader(syntax, reader, sink, is_wrapped=is_wrapped).calls()

    def _read_json(self, reader: Reader, sink: CallSink, syntax: TagSyntax) -> Reading[None]:
        assert syntax.wrapper is not None
        yield from read_json_body(reader, sink)
        if (yield from reader.skip_space()):
            yield from reader.close(syntax.wrapper[1])
        sink.done = reader.pos


def _start_marker(syntax: TagSyntax) -> str:
    return syntax.call_open if syntax.wrapper is None else syntax.wrapper[0]


class TagReader:
    """Reads the calls of one construct, from its first call on. is_wrapped: the wrapper's start marker precedes it."""

    def __init__(self, syntax: TagSyntax, reader: Reader, sink: CallSink, *, is_wrapped: bool) -> None:
        self._syntax = syntax
        self._reader = reader
        self._sink = sink
        self._is_wrapped = is_wrapped
        self._cursor = TagCursor(syntax, reader)
        self._schema = ANY
        self._given: set[str] = set()

    def calls(self) -> Reading[None]:
        """All calls up to the wrapper's end marker, which may be missing; one call where there is no wrapper."""
        reader, wrapper = self._reader, self._syntax.wrapper
        while True:
            yield from self._call()
            if wrapper is None or not (yield from reader.skip_space()):
                return
            if (yield from reader.close(wrapper[1])):
                self._sink.done = reader.pos
                return
            if (yield from self._cursor.begins_call()) is None:
                reader.pos = self._sink.done
                return

    def _call(self) -> Reading[None]:
        reader, sink = self._reader, self._sink
        self._given = set()
        sink.is_meant = self._is_wrapped and (yield from self._cursor.is_at_call())
        self._schema = sink.begin((yield from self._cursor.open_call()))
        sink.write("{")
        tag_at: int | None = reader.pos  # None inside a parameter
        try:
            if not self._schema.required:
                yield from self._skip_empty_arguments()
            while (yield from reader.skip_space()):
                tag_at = reader.pos
                if (key := (yield from self._cursor.open_parameter())) is None:
                    break
                tag_at = None
                yield from self._parameter(key)
                tag_at = reader.pos
            if not (self._schema.required <= self._given and (yield from self._cursor.precedes_call())):
                yield from reader.expect(self._syntax.call_close)
        except OutOfText:
            if tag_at is None or not self._is_complete(reader.text[tag_at:].strip(SPACE)):
                raise
            reader.pos = len(reader.text)
        sink.write("}")
        yield from sink.end()

    def _is_complete(self, rest: str) -> bool:
        """Whether only end markers are missing where the text ends after a parameter and `rest`.

        An output that was cut off could have continued with another parameter of the tool.
        """
        if not (self._schema.required <= self._given and self._syntax.call_close.startswith(rest)):
            return False
        could_go_on = self._syntax.key_open.startswith(rest) and not self._schema.property_names <= self._given
        return not (self._reader.is_cut and could_go_on)

    def _skip_empty_arguments(self) -> Reading[None]:
        if (yield from self._reader.skip_space()) and not (yield from self._reader.take("{}")):
            yield from take_null(self._reader)

    def _parameter(self, key: str) -> Reading[None]:
        if key in self._given:
            raise NotACall("a parameter comes twice")
        self._sink.write(f"{', ' if self._given else ''}{json.dumps(key, ensure_ascii=False)}: ")
        self._given.add(key)
        yield from self._value(self._schema_of(key), is_json=self._sink.is_json(key))

    def _schema_of(self, key: str) -> Schema:
        """Where the schema allows a string and something else, the tag decides if it says so."""
        schema, is_text = self._schema.of_property(key), self._cursor.is_text
        is_unknown = schema is ANY and not self._schema.declares(key)
        return TEXT if (is_unknown and is_text is None) or (is_text and schema.takes_string) else schema

    def _value(self, schema: Schema, *, is_json: bool) -> Reading[None]:
        """Read a value and its end marker. is_json: it is certainly JSON if it begins with a bracket."""
        if is_json or (schema.types is not None and schema.types <= {"array", "object", "null"}):
            start = self._reader.pos
            if (yield from self._reader.skip_space()) and self._reader.text[self._reader.pos] in "[{":
                yield from LiteralReader(self._reader, self._sink.write).value(schema)
                yield from self._reader.skip_space()
                yield from self._end_of_json()
                return
            self._reader.pos = start
        if self._syntax.frame:
            yield from self._reader.take(self._syntax.frame)
        value = TextValue(schema, self._sink.write)
        yield from ValueEnd(self._cursor, None if self._sink.is_constrained else self._fits, self._is_due).find(value)
        if (violation := value.close()) is not None:
            if not self._sink.is_committed:
                raise NotACall(violation, breaks_schema=True)
            self._sink.note_schema_violation(violation)

    def _end_of_json(self) -> Reading[None]:
        """Skip the end marker of a value whose end is known without it."""
        start = self._reader.pos
        if (yield from self._reader.take_any((self._syntax.key_open, self._syntax.call_close))) is None:
            yield from self._reader.expect(self._syntax.value_close)
        else:
            self._reader.pos = start

    def _is_due(self, key: str) -> bool:
        return key not in self._given and self._schema.declares(key)

    def _fits(self, key: str) -> bool:
        return key not in self._given and self._schema.allows(key)
