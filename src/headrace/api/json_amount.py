"""Limits on JSON, checked on the bytes before any object is made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headrace.errors import InvalidRequest

MAX_CONTAINERS = 32_768
"""Objects and lists. The largest body seen from an agent has 288."""

MAX_MEMBERS = 131_072
"""Name-value pairs in all objects."""

MAX_VALUES = 1_310_720
"""Values in all objects and lists. Token ids are the cheapest: enough for 128 prompts of 8,192 ids."""

MAX_DEPTH = 200
"""Nesting of objects and lists: the JSON parser's limit."""

_SLICE_BYTES = 256 * 1024

_NOT_STRUCTURE = bytes(set(range(256)) - set(b'"[]{},:\\'))


def refuse_too_much(texts: Iterable[bytes], what: str, param: str | None = None) -> None:
    """Raise InvalidRequest if JSON texts together exceed the limits. what: names them in the message.

    Values are counted by their commas. The counts mean nothing for a text that is not JSON.
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
    """The characters outside of strings, in slices."""
    is_in_string = False
    for piece in slices(text):
        # Backslashes occur in strings only. Once escaped ones are removed, every quote begins or ends a string.
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.translate(None, _NOT_STRUCTURE).split(b'"')
        yield b"".join(parts[is_in_string::2])
        is_in_string ^= len(parts) % 2 == 0


def slices(text: bytes) -> Iterator[bytes]:
    """Split a JSON text without cutting an escape sequence; between slices other Python threads can run."""
    start = 0
    while start < len(text):
        end = start + _SLICE_BYTES
        piece = text[start:end]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            end += 1
        yield text[start:end]
        start = end
