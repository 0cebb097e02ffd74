"""Rules in the Lark syntax that llguidance reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark

ANY_TEXT = r"(?s:.*)"
"""Regular expression of any text. A special token is none."""

MAYBE_NEWLINE, MAYBE_SPACE, DIGITS = "\ue000", "\ue001", "\ue002"
"""Stand in a marker for what is not always the same."""

_PLACEHOLDERS = {MAYBE_NEWLINE: r"\n?", MAYBE_SPACE: " ?", DIGITS: "[0-9]{1,4}"}


class Rules:
    """A grammar that is being written.

    special_tokens: ids of special tokens by their names. In markers they are written by their ids; a text can't hold
    them. json_values: see OutputGuarantees; whoever writes rules of calls adds to them.
    """

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special_tokens = special_tokens
        names = "|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True)))
        self._special = re.compile(f"({names}{'|' if names else ''}[{''.join(_PLACEHOLDERS)}])")
        self._names: dict[tuple[str, str], str] = {}
        self.json_values: set[tuple[str, str]] = set()

    def rule(self, body: str, *, lazy: bool = False) -> str:
        """Adds a rule and gives its name. lazy: matches as little as it can."""
        return self._named("rule", f"[lazy]: {body}" if lazy else f": {body}")

    def terminal(self, body: str) -> str:
        """Adds what is matched as one regular expression, and gives its name."""
        return self._named("TEXT", f": {body}")

    def text_of(self, start: str) -> str:
        """The grammar, of which this rule is the whole."""
        lines = [f"{name}{body}" for (_, body), name in self._names.items()]
        return "\n".join([*lines, f"start: {start}", ""])

    def _named(self, kind: str, body: str) -> str:
        """The same body has the same name each time: calls of several syntaxes share what they hold."""
        return self._names.setdefault((kind, body), f"{kind}_{len(self._names)}")

    def marker(self, text: str) -> str:
        """A text in which special tokens are meant."""
        return " ".join(map(self._piece, self._parts(text))) or '""'

    def text(self, pattern: str = ANY_TEXT, *, refused: Sequence[str] = ()) -> str:
        """A text that a regular expression matches as a whole, and none of the refused ones."""
        if not refused:
            return regex(pattern)
        return self.terminal(" & ".join([regex(pattern), *(f"~{regex(each)}" for each in refused)]))

    def until(self, closer: str, *, refused: Sequence[str] = ()) -> str:
        """Any text up to a marker, and the marker. refused: regular expressions of texts that it may not be.

        If there are special tokens in the marker, it may not come in other tokens either: a reader could not tell.
        """
        first, special = self.split(closer)
        if not special:
            return self.rule(self.text(ANY_TEXT + exactly(first), refused=refused), lazy=True)
        text = self.text(refused=(containing(closer), *refused))
        return f"{self.terminal(f'{text} {literal(first)}') if first else text} {special}"

    def split(self, marker: str) -> tuple[str, str]:
        """The text that a marker begins with, and what follows from its first special token on as part of a rule."""
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
    """A text that has to come as it is."""
    return json.dumps(text, ensure_ascii=False)


def exactly(text: str) -> str:
    """The regular expression of one text."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&~-]", r"\\\g<0>", text).replace("\n", r"\n")


def containing(text: str) -> str:
    """The regular expression of texts with a text in them."""
    return ANY_TEXT + exactly(text) + ANY_TEXT


def regex(pattern: str, *, ascii_classes: str = "") -> str:
    """A text that a regular expression matches as a whole. ascii_classes: of `dws`, those that know ASCII only."""
    return f"/{regex_to_lark(pattern, ascii_classes)}/"


def json_value(schema: Any) -> str:
    """A JSON value that fits a schema."""
    return f"%json {json.dumps(schema)}"
