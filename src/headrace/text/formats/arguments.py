"""Reads a call's arguments written as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.text.formats.literals import JSON, LiteralReader, Write
from headrace.text.formats.reader import SPACE, NotACall, OutOfText, Reader, Reading, run_to_end
from headrace.text.formats.schema import Schema

_NULL = ("null", "None")


def read_arguments(reader: Reader, schema: Schema, write: Write, ends: Sequence[str] = ()) -> Reading[None]:
    """An object, a string that contains one, or, for a tool without required arguments, null or nothing.

    ends: texts one of which follows if there is nothing; the text's end counts, too, if any are given.
    """
    is_last = not (yield from reader.skip_space())
    if is_last and (not ends or reader.is_cut):
        raise OutOfText
    if is_last or (yield from _comes_any(reader, ends)) or (yield from take_null(reader)):
        write_none(schema, write)
        return
    quote = yield from reader.take_any(JSON.quotes)
    if quote is None:
        yield from LiteralReader(reader, write).mapping(schema)
        return
    text = (yield from LiteralReader(reader, ignore).string_text(quote)).strip(SPACE)
    if not text:
        write_none(schema, write)
        return
    inner = Reader(text, ended=True)
    run_to_end(read_arguments(inner, schema, write))
    if run_to_end(inner.skip_space()):
        raise NotACall("arguments with something behind them")


def take_null(reader: Reader) -> Reading[bool]:
    """Skip a null instead of arguments, but not a longer word."""
    start = reader.pos
    if (yield from reader.take_any(_NULL)) is None:
        return False
    if (yield from reader.is_done()) or not (reader.text[reader.pos].isalnum() or reader.text[reader.pos] == "_"):
        return True
    reader.pos = start
    return False


def write_none(schema: Schema, write: Write) -> None:
    """Write empty arguments. Raises NotACall if the tool requires some."""
    if schema.required:
        raise NotACall("a call without arguments")
    write("{}")


def ignore(text: str) -> None:
    """Discards text."""


def _comes_any(reader: Reader, literals: Sequence[str]) -> Reading[bool]:
    """Whether one of the literals comes next; does not skip it."""
    start = reader.pos
    found = yield from reader.take_any(literals)
    reader.pos = start
    return found is not None
