"""Calls whose arguments stand unescaped between tags."""

from __future__ import annotations

import json

from headrace.text.formats.arguments import take_null
from headrace.text.formats.calls import CallSink
from headrace.text.formats.literals import LiteralReader
from headrace.text.formats.reader import NotACall, OutOfText, Reader, Reading
from headrace.text.formats.schema import ANY, Schema
from headrace.text.formats.tag_cursor import TagCursor, TagSyntax
from headrace.text.formats.value_end import ValueEnd
from headrace.text.formats.values import TextValue

TEXT = Schema({"type": "string"})


class TagReader:
    """Reads the calls of one construct, from the first call's opener on. is_wrapped: after the wrapper's opener."""

    def __init__(self, syntax: TagSyntax, reader: Reader, sink: CallSink, *, is_wrapped: bool) -> None:
        self._syntax = syntax
        self._reader = reader
        self._sink = sink
        self._is_wrapped = is_wrapped
        self._cursor = TagCursor(syntax, reader)
        self._schema = ANY
        self._given: set[str] = set()

    def calls(self) -> Reading[None]:
        """All calls up to the wrapper's closer, which may be missing; one call where there is no wrapper."""
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
        is_between = True
        try:
            if not self._schema.required:
                yield from self._skip_nothing()
            while (yield from reader.skip_space()) and (key := (yield from self._cursor.open_parameter())) is not None:
                is_between = False
                yield from self._parameter(key)
                is_between = True
            yield from reader.expect(self._syntax.call_close)
        except OutOfText:
            # At the text's end only closers may be missing.
            if not is_between or not self._schema.required <= self._given:
                raise
            reader.pos = len(reader.text)
        sink.write("}")
        yield from sink.end()

    def _skip_nothing(self) -> Reading[None]:
        """Skip what models write instead of no arguments."""
        if (yield from self._reader.skip_space()) and not (yield from self._reader.take("{}")):
            yield from take_null(self._reader)

    def _parameter(self, key: str) -> Reading[None]:
        if key in self._given:
            raise NotACall("a parameter comes twice")
        self._sink.write(f"{', ' if self._given else ''}{json.dumps(key, ensure_ascii=False)}: ")
        self._given.add(key)
        schema = self._schema.of_property(key) if self._schema.lists(key) else self._unlisted(key)
        yield from self._value(schema, is_json=self._sink.is_json(key))

    def _unlisted(self, key: str) -> Schema:
        """The schema of an undeclared parameter: as the tool says of others, else a text."""
        schema = self._schema.of_property(key)
        return TEXT if schema is ANY else schema

    def _value(self, schema: Schema, *, is_json: bool) -> Reading[None]:
        """Read a value and its closer. is_json: it is certainly JSON if it begins with a bracket."""
        if is_json or (schema.types is not None and schema.types <= {"array", "object", "null"}):
            start = self._reader.pos
            if (yield from self._reader.skip_space()) and self._reader.text[self._reader.pos] in "[{":
                yield from LiteralReader(self._reader, self._sink.write).value(schema)
                yield from self._reader.skip_space()
                yield from self._reader.expect(self._syntax.value_close)
                return
            self._reader.pos = start
        if self._syntax.is_framed:
            yield from self._reader.take("\n")
        value = TextValue(schema, self._sink.write)
        yield from ValueEnd(self._cursor, None if self._sink.is_constrained else self._fits).find(value)
        if (violation := value.close()) is not None:
            if not self._sink.is_committed:
                raise NotACall(violation, breaks_schema=True)
            self._sink.note_schema_violation(violation)

    def _fits(self, key: str) -> bool:
        return key not in self._given and self._schema.allows(key)
