"""Extracts a custom tool's text from the JSON of its arguments, incrementally."""

from __future__ import annotations

import re

from pydantic_core import from_json

from headrace.api.json_body import without_half_pairs
from headrace.api.responses_tools import INPUT

_BEGINNING = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')

# What may stand between two cuts of a JSON string: plain characters, a surrogate pair, a numeric escape, any other
# escape. A lone surrogate is read at the end.
_PIECE = re.compile(
    r'[^"\\]+|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|\\[^u]'
)


class CustomInput:
    """Arguments in, text out.

    text: given out so far. Arguments of another form are given out unchanged, at the end.
    """

    def __init__(self) -> None:
        self.text = ""
        self._arguments = ""
        self._read = 0
        self._is_open = False

    def push(self, arguments: str) -> str:
        """The text that more of the arguments adds; may be empty."""
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
        # If the text was cut off or occurs twice, what was given out stays.
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
