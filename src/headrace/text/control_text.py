"""Distinguishes control tokens written by the template from typed ones, through rendering.

The template gets typed text with every spelling of a control token wrapped in two noncharacters. What comes out wrapped
was typed; what comes out bare was written by the template. A template that trims or splits text may separate a wrapper
from its token; a lone one is dropped.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

_OPEN = "\ufdd0"
_CLOSE = "\ufdd1"

EDGE = "\ufdd3"
"""Noncharacter that protects white space at a text's edge from trimming. It is dropped afterwards."""

_MARKS = f"{_OPEN}{_CLOSE}{EDGE}"

UNFINISHED_END = "\ufdd2"
"""Noncharacter that marks the end of an unfinished last message."""


@dataclass(frozen=True, slots=True)
class TextRun:
    """Text of a rendered prompt; typed: it spells a control token but was typed."""

    text: str
    typed: bool


class ControlText:
    def __init__(self, control_tokens: frozenset[str]) -> None:
        control = any_of(control_tokens)
        self._control_tokens = control_tokens
        self._to_wrap: dict[tuple[frozenset[str], bool], re.Pattern[str]] = {}
        self._control = re.compile(control)
        self._wrapped = re.compile(f"{_OPEN}({control}|[{_MARKS}]){_CLOSE}")

    def wrap(self, value: Any, *, bare: frozenset[str] = frozenset()) -> Any:
        """Wrap spellings in a text, or in all texts of nested lists and mappings; those in `bare` stay unwrapped."""
        if isinstance(value, str):
            has_marks = not value.isascii() and any(mark in value for mark in _MARKS)
            pattern = self._pattern(bare, has_marks=has_marks)
            return pattern.sub(lambda match: f"{_OPEN}{match[0]}{_CLOSE}", value)
        if isinstance(value, Mapping):
            return {self.wrap(key, bare=bare): self.wrap(item, bare=bare) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.wrap(item, bare=bare) for item in value]
        return value

    def parts(self, rendered: str) -> tuple[list[TextRun], list[int]]:
        """The rendered text without wrappers, and where in `rendered` each control token of the template ends.

        Runs are in order; adjacent ones may be of one kind.
        """
        runs, ends, start = [], [], 0
        for place in [*_places_of_marks(rendered), len(rendered)]:
            if place < start:  # part of a wrapper
                continue
            runs.append(TextRun(rendered[start:place], typed=False))
            ends += [match.end() for match in self._control.finditer(rendered, start, place)]
            wrapped = self._wrapped.match(rendered, place)
            if wrapped is not None:
                runs.append(TextRun(wrapped[1], typed=True))
            start = place + 1 if wrapped is None else wrapped.end()
        return [run for run in runs if run.text], ends

    def _pattern(self, bare: frozenset[str], *, has_marks: bool) -> re.Pattern[str]:
        """What is wrapped. has_marks: without any in the text, a search for spellings alone is many times faster."""
        key = bare, has_marks
        if key not in self._to_wrap:
            spelled = any_of(self._control_tokens - bare)
            # A typed wrapper character is wrapped too, so that it can't pass for ours.
            self._to_wrap[key] = re.compile(f"{spelled}|[{_MARKS}]" if has_marks else spelled)
        return self._to_wrap[key]


def _places_of_marks(text: str) -> list[int]:
    """Where our characters are. `str.find` is ten times faster than a pattern here."""
    places = []
    for mark in _MARKS:
        place = text.find(mark)
        while place >= 0:
            places.append(place)
            place = text.find(mark, place + 1)
    return sorted(places)


def find_control_tokens(
    added_tokens: Mapping[str, int], special_ids: frozenset[int], chat_template: str
) -> dict[str, int]:
    """Tokens that structure a chat, with their ids: special ones, and added ones in the template's source.

    Of the others, short ones and white space don't count: vocabularies have added tokens for indentation.
    """
    return {
        text: token_id
        for text, token_id in added_tokens.items()
        if token_id in special_ids or (len(text.strip()) > 2 and text in chat_template)
    }


def any_of(texts: Iterable[str]) -> str:
    """A pattern that matches the longest of the texts at a position; of no texts, one that never matches.

    Python tries alternatives one by one, so what they share is written once: `<(?:a|b(?:c)?)` for <a, <b and <bc.
    """
    found = sorted({text for text in texts if text})
    return _branches(found) if found else "(?!)"


def _branches(texts: list[str]) -> str:
    shared = os.path.commonprefix(texts)
    rests = [rest for text in texts if (rest := text[len(shared) :])]
    if not rests:
        return re.escape(shared)
    branches = "|".join(_branches(list(group)) for _, group in groupby(rests, key=lambda rest: rest[0]))
    return f"{re.escape(shared)}(?:{branches}){'?' if len(rests) < len(texts) else ''}"
