"""Values that stand between tags as bare text, written as JSON while they come."""

from __future__ import annotations

import json

from headrace.text.formats.literals import Write, convert, escaped
from headrace.text.formats.schema import SCALARS, Schema

# Longer than any number or word that a value of several types could be.
_MAX_OTHER = 40


class TextValue:
    """One value, of which text comes in pieces. A string goes on at once; another type is known only as a whole."""

    def __init__(self, schema: Schema, write: Write) -> None:
        self._schema = schema
        self._write = write
        self._held = ""
        self._is_string = schema.types == frozenset({"string"})
        if self._is_string:
            write('"')

    def add(self, text: str) -> None:
        if self._is_string:
            if text:
                self._write(escaped(text))
            return
        self._held += text
        if self._schema.takes_string and not self._may_be_other():
            self._is_string = True
            self._write('"' + escaped(self._held))
            self._held = ""

    def close(self) -> str | None:
        """The value is over. One that fits no type is written as a string; returns what is wrong with it then."""
        if self._is_string:
            self._write('"')
            return None
        converted = convert(self._held, self._schema)
        self._write(json.dumps(self._held, ensure_ascii=False) if converted is None else converted)
        return f"a value is no {' or '.join(sorted(self._schema.types or ()))}" if converted is None else None

    def _may_be_other(self) -> bool:
        """Whether what is held may become a value that is no string."""
        types, begun = self._schema.types, self._held.strip()
        if types is None or types & {"array", "object"}:
            return not begun or begun[0] in "[{" or len(begun) <= _MAX_OTHER
        return not begun or (bool(types & SCALARS) and len(begun) <= _MAX_OTHER)
