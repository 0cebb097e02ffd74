"""Rules in the Lark syntax that llguidance reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from llguidance import regex_to_lark

ANY_TEXT = r"(?s:.*)"
"""Regular expression of any text. A special token is none."""


class Rules:
    """A grammar that is being written; the rule `start` is the whole of it.

    special_tokens: ids of special tokens by their names. In markers they are written by their ids; a text can't hold
    them.
    """

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special_tokens = special_tokens
        names = "|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True)))
        self._special = re.compile(f"({names})" if names else "(?!)")
        self._lines: list[str] = []
        self._num_named = 0

    def rule(self, body: str, *, name: str = "", lazy: bool = False) -> str:
        """Adds a rule and gives its name; without one it gets one of its own. lazy: matches as little as it can."""
        if not name:
            self._num_named += 1
            name = f"rule_{self._num_named}"
        self._lines.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def marker(self, text: str) -> str:
        """A text in which special tokens are meant."""
        return " ".join(self._pieces(text)) or '""'

    def until(self, closer: str) -> str:
        """Any text up to a marker, and the marker."""
        first, *others = self._pieces(closer)
        if first.startswith("<"):
            return " ".join([regex(ANY_TEXT), first, *others])
        opening = self._special.split(closer)[0]
        return " ".join([self.rule(regex(ANY_TEXT + re.escape(opening)), lazy=True), *others])

    def __str__(self) -> str:
        return "\n".join([*self._lines, ""])

    def _pieces(self, text: str) -> list[str]:
        parts = [part for part in self._special.split(text) if part]
        return [
            f"<[{self._special_tokens[part]}]>" if part in self._special_tokens else literal(part) for part in parts
        ]


def literal(text: str) -> str:
    """A text that has to come as it is."""
    return json.dumps(text, ensure_ascii=False)


def regex(pattern: str) -> str:
    """A text that a regular expression matches as a whole."""
    return f"/{regex_to_lark(pattern, '')}/"


def json_value(schema: Any) -> str:
    """A JSON value that fits a schema."""
    return f"%json {json.dumps(schema)}"
