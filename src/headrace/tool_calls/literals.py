"""Reads a value spelled as JSON, as Python or as Gemma does, and writes it as JSON incrementally.

Beyond strict JSON it accepts what is unambiguous: bare line breaks in strings, backslashes that escape nothing, `True`
and `None`, a trailing comma. A schema converts a value of another type where nothing is lost: 4711 is "4711" where a
string is wanted, "12" is 12 where an integer is. A number beyond the largest float is none.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace.tool_calls.reader import SPACE, NotACall, Reader, Reading, run_to_end
from headrace.tool_calls.schema import ANY, SCALARS, Schema

Write = Callable[[str], None]

_EXPONENT = r"(?:[eE](?P<exponent>[+-]?[0-9]+))?"
_NUMBER = re.compile(rf"(?P<sign>-?)(?P<whole>0|[1-9][0-9]*)(?:\.(?P<fraction>[0-9]+))?{_EXPONENT}")
_LOOSE_NUMBER = re.compile(rf"(?P<sign>[+-]?)(?P<whole>[0-9]*)(?:\.(?P<fraction>[0-9]*))?{_EXPONENT}")
_WORDS = {"true": "true", "True": "true", "false": "false", "False": "false", "null": "null", "None": "null"}

# JSON's escapes are valid in JSON text; Python has some more.
_JSON_ESCAPES = frozenset('"\\/bfnrt')
_PYTHON_ESCAPES = {
    "\n": "", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r",
    "t": "\t", "v": "\v",
}  # fmt: skip
_NUM_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}

MAX_HELD_TEXT = 1 << 16
"""Characters of a string that is held back until its end, because its meaning is known only then."""

MAX_ZEROS = 400
"""Zeros that an exponent may add to an integer; no tool means more by a few characters."""

_MAX_EXPONENT = 8
_MAX_SCALAR = 400
_MAX_DEPTH = 64
_MAX_KEY = 400


@dataclass(frozen=True, slots=True)
class Spelling:
    """How values are written.

    quotes: string delimiters, and whose escape rules apply: None if a backslash is an ordinary character.
    bare: keys and strings may be unquoted.
    brackets: what begins a sequence, and its end.
    """

    quotes: Mapping[str, str | None]
    bare: bool = False
    brackets: tuple[tuple[str, str], ...] = (("[", "]"),)


# Apostrophes are no quotes in JSON: such strings are meant as Python.
_JSON_QUOTES = {'"': "json", "'": "python"}

JSON = Spelling(_JSON_QUOTES)
PYTHON = Spelling(dict.fromkeys(('"""', "'''", '"', "'"), "python"), brackets=(("[", "]"), ("(", ")")))
GEMMA = Spelling({'<|"|>': None, **_JSON_QUOTES}, bare=True)
FUNCTION_GEMMA = Spelling({"<escape>": None, **_JSON_QUOTES}, bare=True)


def escaped(text: str) -> str:
    """Text as written inside a JSON string, without the quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class LiteralReader:
    """Reads values; JSON text goes to `write` as soon as it is certain."""

    def __init__(self, reader: Reader, write: Write, spelling: Spelling = JSON) -> None:
        self._reader = reader
        self._write = write
        self._spelling = spelling
        self._brackets = dict(spelling.brackets)
        self._depth = 0

    def value(self, schema: Schema) -> Reading[None]:
        """One value. Raises NotACall for anything else, OutOfText."""
        yield from self._reader.skip_space()
        first = yield from self._reader.peek()
        if first == "{" or first in self._brackets:
            if self._depth == _MAX_DEPTH:
                raise NotACall("values nested too deeply")
            self._depth += 1
            yield from self.mapping(schema) if first == "{" else self._sequence(schema, self._brackets[first])
            self._depth -= 1
        elif (quote := (yield from self._reader.take_any(self._spelling.quotes))) is not None:
            yield from self._string(schema, quote)
        else:
            yield from self._scalar(schema)

    def mapping(self, schema: Schema) -> Reading[None]:
        yield from self._reader.expect("{")
        self._write("{")
        is_first = True
        while not (yield from self.ends("}", is_first)):
            key = yield from self.key()
            self._write(f"{'' if is_first else ', '}{json.dumps(key, ensure_ascii=False)}: ")
            yield from self.value(schema.of_property(key))
            is_first = False
        self._write("}")

    def key(self) -> Reading[str]:
        if (quote := (yield from self._reader.take_any(self._spelling.quotes))) is not None:
            key = yield from self.string_text(quote, _MAX_KEY)
            yield from self._reader.skip_space()
            yield from self._reader.expect(":")
        elif self._spelling.bare:
            key = (yield from self._reader.take_until(":", _MAX_KEY)).strip()
        else:
            raise NotACall("a key without quotes")
        return key

    def string_text(self, quote: str, max_length: int = MAX_HELD_TEXT) -> Reading[str]:
        """The text of a string whose opening quote has been read. Raises NotACall for a longer one."""
        pieces: list[str] = []
        yield from self._string_pieces(quote, pieces.append, self._reader.pos + max_length)
        text: str = json.loads(f'"{"".join(pieces)}"')
        return text

    def _sequence(self, schema: Schema, end_marker: str) -> Reading[None]:
        self._reader.pos += 1
        self._write("[")
        is_first = True
        while not (yield from self.ends(end_marker, is_first)):
            if not is_first:
                self._write(", ")
            yield from self.value(schema.items)
            is_first = False
        self._write("]")

    def ends(self, end_marker: str, is_first: bool) -> Reading[bool]:
        """Whether a collection ends here; otherwise moves to its next item."""
        yield from self._reader.skip_space()
        if (yield from self._reader.take(end_marker)):
            return True
        if is_first:
            return False
        yield from self._reader.expect(",")
        yield from self._reader.skip_space()
        return (yield from self._reader.take(end_marker))

    def _string(self, schema: Schema, quote: str) -> Reading[None]:
        if schema.takes_string:
            self._write('"')
            yield from self._string_pieces(quote, self._write)
            self._write('"')
            return
        text = yield from self.string_text(quote)
        converted = convert(text, schema)
        self._write(json.dumps(text, ensure_ascii=False) if converted is None else converted)

    def _string_pieces(self, quote: str, write: Write, limit: int | None = None) -> Reading[None]:
        """The text between quotes, as written inside a JSON string.

        Raises NotACall for a string that has not ended at the index `limit`.
        """
        escapes = self._spelling.quotes[quote]
        stops = re.compile(re.escape(quote[0]) if escapes is None else re.escape(quote[0]) + r"|\\")
        while True:
            yield from self._reader.peek()
            match = stops.search(self._reader.text, self._reader.pos)
            if limit is not None and (len(self._reader.text) if match is None else match.start()) > limit:
                raise NotACall("a string without an end")
            end = len(self._reader.text) if match is None else match.start()
            if end > self._reader.pos:
                write(escaped(self._reader.text[self._reader.pos : end]))
                self._reader.pos = end
            if match is None:
                continue
            if match[0] == "\\":
                yield from self._escape(escapes, write)
            elif (yield from self._reader.take(quote)):
                return
            else:
                yield from self._reader.peek(len(quote) - 1)  # raises where the text ends in half a quote
                write(escaped(match[0]))
                self._reader.pos += 1

    def _escape(self, escapes: str | None, write: Write) -> Reading[None]:
        reader = self._reader
        letter = yield from reader.peek(1)
        num_digits = _NUM_HEX_DIGITS.get(letter, 0) if escapes == "python" or letter == "u" else 0
        if num_digits:
            yield from reader.peek(1 + num_digits)
            digits = reader.text[reader.pos + 2 : reader.pos + 2 + num_digits]
            if re.fullmatch("[0-9a-fA-F]+", digits) and (code := int(digits, 16)) <= 0x10FFFF:
                write(f"\\u{code:04x}" if code <= 0xFFFF else escaped(chr(code)))
                reader.pos += 2 + num_digits
                return
        elif escapes == "python" and letter in _PYTHON_ESCAPES:
            write(escaped(_PYTHON_ESCAPES[letter]))
            reader.pos += 2
            return
        elif escapes == "json" and letter in _JSON_ESCAPES:
            write("\\" + letter)
            reader.pos += 2
            return
        write("\\\\")  # a backslash that escapes nothing is literal: a pattern or a path
        reader.pos += 1

    def _scalar(self, schema: Schema) -> Reading[None]:
        text = yield from self._scalar_text()
        json_text = _WORDS.get(text)
        only_string = schema.types is not None and not schema.types & (SCALARS - {"null"})
        if json_text is None:
            json_text = _number(text, loose=self._spelling is PYTHON)
            if json_text is not None and schema.needs_integer:
                json_text = _integer(json_text) or json_text
            if json_text is not None and not only_string and not _is_finite(json_text):
                raise NotACall("a number is too large")
        if schema.takes_string and only_string and (text not in _WORDS or _WORDS[text] != "null"):
            # A number or a bare word where the tool wants a string.
            if json_text is not None or (self._spelling.bare and text):
                json_text = json.dumps(text, ensure_ascii=False)
        elif json_text is None and self._spelling.bare and text:
            json_text = convert(text, schema)
        if json_text is None:
            raise NotACall("a value is missing or unreadable")
        self._write(json_text)

    def _scalar_text(self) -> Reading[str]:
        ends = ",]})" if not self._spelling.bare else ",]}"
        reader, start = self._reader, self._reader.pos
        while True:
            char = yield from reader.peek()
            if char in ends or (char in SPACE and not self._spelling.bare):
                return reader.text[start : reader.pos].strip()
            if reader.pos - start > _MAX_SCALAR:
                raise NotACall("a value without an end")
            reader.pos += 1


def convert(text: str, schema: Schema) -> str | None:
    """JSON text of a bare text, of a type that the schema allows; None if there is none.

    A text is a string only if the schema allows one and nothing else fits: `null` where null is allowed is null.
    """
    types, bare = schema.types, text.strip()
    if types is not None and "string" not in types and len(bare) > 1 and bare[0] == bare[-1] == '"':
        bare = bare[1:-1]
    if types is None:
        parsed = parsed_literal(bare, schema) if bare[:1] in ("[", "{") else _WORDS.get(bare) or _finite(_number(bare))
        return parsed or json.dumps(text, ensure_ascii=False)
    word = _WORDS.get(bare) or _WORDS.get(bare.lower())
    if word is not None and ("null" if word == "null" else "boolean") in types:
        return word
    if types & {"integer", "number"}:
        number = _number(bare, loose="string" not in types)
        if number is not None and schema.needs_integer:
            number = _integer(number)
        if (number := _finite(number)) is not None:
            return number
    if (types & {"array"} and bare[:1] == "[") or (types & {"object"} and bare[:1] == "{"):
        parsed = parsed_literal(bare, schema)
        if parsed is not None:
            return parsed
    return json.dumps(text, ensure_ascii=False) if "string" in types else None


def parsed_literal(text: str, schema: Schema = ANY, spelling: Spelling = JSON) -> str | None:
    """JSON text of a text that is exactly one value; None if it isn't."""
    reader, pieces = Reader(text, ended=True), list[str]()
    try:
        run_to_end(LiteralReader(reader, pieces.append, spelling).value(schema))
        is_whole = run_to_end(reader.skip_space()) is False
    except NotACall:
        return None
    return "".join(pieces) if is_whole else None


def _number(text: str, *, loose: bool = False) -> str | None:
    """JSON text of a number, with all of its digits; loose: in Python's spelling, and with leading zeros."""
    if _NUMBER.fullmatch(text):
        return text
    parts = _LOOSE_NUMBER.fullmatch(re.sub("(?<=[0-9])_(?=[0-9])", "", text)) if loose else None
    if parts is None or not (parts["whole"] or parts["fraction"]):
        return None
    fraction = "" if parts["fraction"] is None else f".{parts['fraction'] or 0}"
    exponent = "" if parts["exponent"] is None else f"e{parts['exponent']}"
    return f"{parts['sign'].strip('+')}{parts['whole'].lstrip('0') or 0}{fraction}{exponent}"


def _finite(number: str | None) -> str | None:
    return number if number is not None and _is_finite(number) else None


def _is_finite(number: str) -> bool:
    """Whether a JSON reader gets a number, not infinity. Integers may have any size."""
    return number.lstrip("-").isdigit() or math.isfinite(float(number))


def _integer(number: str) -> str | None:
    """The number as an integer without fraction or exponent, 3 for 3.0 and 1000 for 1e3; None if it is no integer.

    None also for more than MAX_ZEROS zeros that are not written out.
    """
    parts = _NUMBER.fullmatch(number)
    assert parts is not None
    exponent = parts["exponent"] or "0"
    if len(exponent) > _MAX_EXPONENT:
        return None
    digits = parts["whole"] + (parts["fraction"] or "")
    num_behind_point = len(parts["fraction"] or "") - int(exponent)
    if num_behind_point < -MAX_ZEROS or (num_behind_point > 0 and digits[-num_behind_point:].strip("0")):
        return None
    digits = digits[:-num_behind_point] if num_behind_point > 0 else digits + "0" * -num_behind_point
    digits = digits.lstrip("0")
    return f"{parts['sign']}{digits}" if digits else "0"
