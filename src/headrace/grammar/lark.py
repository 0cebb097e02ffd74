"""Rules in the Lark syntax that llguidance reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark

from headrace.tool_calls.forms import DIGITS, MAYBE_NEWLINE, MAYBE_SPACE

ANY_TEXT = r"(?s:.*)"
"""Regular expression of any text, which contains no special token."""

_PLACEHOLDERS = {MAYBE_NEWLINE: r"\n?", MAYBE_SPACE: " ?", DIGITS: "[0-9]{1,4}"}


class Rules:
    """A grammar under construction.

    special_tokens: ids of special tokens by name. Markers refer to them by id; text can't contain them. json_values:
    see OutputGuarantees; rules of calls add to them.
    """

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special_tokens = special_tokens
        names = "|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True)))
        self._special = re.compile(f"({names}{'|' if names else ''}[{''.join(_PLACEHOLDERS)}])")
        self._names: dict[tuple[str, str], str] = {}
        self.json_values: set[tuple[str, str]] = set()

    def rule(self, body: str, *, lazy: bool = False) -> str:
        """Add a rule and return its name. lazy: matches as little as possible."""
        return self._named("rule", f"[lazy]: {body}" if lazy else f": {body}")

    def terminal(self, body: str) -> str:
        return self._named("TEXT", f": {body}")

    def to_lark(self, start: str) -> str:
        lines = [f"{name}{body}" for (_, body), name in self._names.items()]
        return "\n".join([*lines, f"start: {start}", ""])

    def _named(self, kind: str, body: str) -> str:
        """Equal bodies share a name: calls of several syntaxes share their contents."""
        return self._names.setdefault((kind, body), f"{kind}_{len(self._names)}")

    def marker(self, text: str) -> str:
        """A text in which special tokens are recognised."""
        return " ".join(map(self._piece, self._parts(text))) or '""'

    def text(self, pattern: str = ANY_TEXT, *, refused: Sequence[str] = ()) -> str:
        if not refused:
            return regex(pattern)
        return self.terminal(" & ".join([regex(pattern), *(f"~{regex(each)}" for each in refused)]))

    def until(self, end_marker: str, *, refused: Sequence[str] = ()) -> str:
        """Any text up to a marker, and the marker. refused: regular expressions of forbidden texts.

        Special tokens in the marker may not be spelled in other tokens either: the parser could not tell.
        """
        first, special = self.split(end_marker)
        if not special:
            return self.rule(self.text(ANY_TEXT + regex_of_text(first), refused=refused), lazy=True)
        text = self.text(refused=(regex_containing(end_marker), *refused))
        return f"{self.terminal(f'{text} {literal(first)}') if first else text} {special}"

    def split(self, marker: str) -> tuple[str, str]:
        """The plain text at a marker's start, and the rest, from its first special token on, as part of a rule."""
        parts = self._parts(marker)
        has_text = self._special.fullmatch(parts[0]) is None
        return (parts[0] if has_text else ""), " ".join(map(self._piece, parts[has_text:]))

    def _parts(self, text: str) -> list[str]:
        return [part for part in self._special.split(text) if part]

    def _piece(self, part: str) -> str:
        if part in _PLACEHOLDERS:
            return regex(_PLACEHOLDERS[part])
        return f"<[{self._special_tokens[part]}]>" if part in self._special_tokens else literal(part)


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def regex_of_text(text: str) -> str:
    return re.sub(r"[\\.+*?()|\[\]{}^$#&~-]", r"\\\g<0>", text).replace("\n", r"\n")


def regex_containing(text: str) -> str:
    return ANY_TEXT + regex_of_text(text) + ANY_TEXT


def regex(pattern: str, *, ascii_classes: str = "") -> str:
    """A text that a regular expression matches as a whole. ascii_classes: of `dws`, those that know ASCII only."""
    return f"/{regex_to_lark(pattern, ascii_classes)}/"


def json_value(schema: Any) -> str:
    return f"%json {json.dumps(schema)}"
