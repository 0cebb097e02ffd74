"""How much JSON may hold, counted in its bytes before any object is made of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headrace.errors import InvalidRequest

MAX_CONTAINERS = 32_768
"""Objects and lists together. The largest body of an agent that was seen has 288."""

MAX_MEMBERS = 131_072
"""Names with a value in all objects together."""

MAX_VALUES = 1_310_720
"""Values in all objects and lists together, of which token ids cost least: enough for 128 prompts of 8,192 ids."""

MAX_DEPTH = 200
"""Of objects and lists in each other: the JSON reader's own limit."""

_SLICE_BYTES = 256 * 1024

_NOT_STRUCTURE = bytes(set(range(256)) - set(b'"[]{},:\\'))


def refuse_too_much(texts: Iterable[bytes], what: str, param: str | None = None) -> None:
    """Raises InvalidRequest if JSON texts hold more than the limits, all together. what: names them in the message.

    Values are counted by the commas between them. Of a text that is not JSON the counts mean nothing.
    """
    num_containers = num_members = num_values = 0
    for structure in (piece for text in texts for piece in _structure(text)):
        num_containers += structure.count(b"{") + structure.count(b"[")
        num_members += structure.count(b":")
        num_values += structure.count(b",")
        for number, most, kind in (
            (num_containers, MAX_CONTAINERS, "objects and lists"),
            (num_members, MAX_MEMBERS, "fields of objects"),
            (num_values, MAX_VALUES, "values"),
        ):
            if number > most:
                raise InvalidRequest(f"{what} must hold at most {most} {kind}", param=param)


def _structure(text: bytes) -> Iterator[bytes]:
    """The characters between the strings of a JSON text that part its values, a slice of the text at a time."""
    is_in_string = False
    for piece in slices(text):
        # Backslashes stand in strings only. Without escaped ones and quotes, every quote begins or ends a string.
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.translate(None, _NOT_STRUCTURE).split(b'"')
        yield b"".join(parts[is_in_string::2])
        is_in_string ^= len(parts) % 2 == 0


def slices(text: bytes) -> Iterator[bytes]:
    """A JSON text in pieces that cut no escaped character in two. Between them other Python threads get their turn."""
    start = 0
    while start < len(text):
        end = start + _SLICE_BYTES
        piece = text[start:end]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            end += 1
        yield text[start:end]
        start = end
