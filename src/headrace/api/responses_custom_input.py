"""The text that a model gives a custom tool: out of the JSON of its arguments, as it comes."""

from __future__ import annotations

import re

from pydantic_core import from_json

from headrace.api.json_body import without_half_pairs
from headrace.api.responses_tools import INPUT

_BEGINNING = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')

# What a JSON text holds between two places where it may be cut: plain characters, a pair of surrogates, a character by
# its number, any other escape. Half a pair is read at the end.
_PIECE = re.compile(
    r'[^"\\]+|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|\\[^u]'
)


class CustomInput:
    """Arguments in, text out.

    text: what was given out. Arguments that are not the one text asked for are given out as they are, at the end.
    """

    def __init__(self) -> None:
        self.text = ""
        self._arguments = ""
        self._read = 0
        self._is_open = False

    def push(self, arguments: str) -> str:
        """The text that a piece of the arguments adds; may be empty."""
        self._arguments += arguments
        if not self._is_open:
            beginning = _BEGINNING.match(self._arguments)
            if beginning is None:
                return ""
            self._is_open = True
            self._read = beginning.end()
        added = []
        while (piece := _PIECE.match(self._arguments, self._read)) is not None:
            self._read = piece.end()
            added.append(_plain(piece[0]))
        return self._give("".join(added))

    def finish(self) -> str:
        """The rest of the text, once all arguments are there."""
        whole = _whole(self._arguments)
        # Of a text that was cut off, or stands there twice, what was given out stays.
        return self._give(whole[len(self.text) :] if whole.startswith(self.text) else "")

    def _give(self, text: str) -> str:
        self.text += text
        return text


def _plain(piece: str) -> str:
    if "\\" not in piece:
        return piece
    try:
        return str(from_json(f'"{piece}"'))
    except ValueError:
        return piece


def _whole(arguments: str) -> str:
    try:
        value = from_json(without_half_pairs(arguments.encode()))
    except ValueError:
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
