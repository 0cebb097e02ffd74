"""Keep apart what the template writes and what people write, through the rendering of a template.

A template is given people's text with every spelling of a control token wrapped in two noncharacters. What comes
out wrapped was typed; what comes out bare was written by the template. A template that trims or splits text may
part a wrapper from its token; a lone one is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_OPEN = "\ufdd0"
_CLOSE = "\ufdd1"

EDGE = "\ufdd3"
"""Noncharacter that keeps white space at a text's edge from being trimmed by a template. It is dropped afterwards."""

CUT = "\ufdd2"
"""Noncharacter that marks where an unfinished last message ends."""


@dataclass(frozen=True, slots=True)
class Run:
    """Text of a rendered prompt; typed: it spells a control token but was written by a person."""

    text: str
    typed: bool


class ControlText:
    """Wraps and unwraps the spellings of one set of control tokens."""

    def __init__(self, control_tokens: frozenset[str]) -> None:
        longest_first = sorted(control_tokens, key=len, reverse=True)
        control = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._control_tokens = control_tokens
        self._to_wrap: dict[frozenset[str], re.Pattern[str]] = {}
        wrapped = f"{_OPEN}(?P<typed>{control}|[{_OPEN}{_CLOSE}{EDGE}]){_CLOSE}"
        self._parts = re.compile(f"{wrapped}|[{_OPEN}{_CLOSE}{EDGE}]|(?P<control>{control})")

    def wrap(self, value: Any, *, meant: frozenset[str] = frozenset()) -> Any:
        """Wrap spellings in a text, or in all texts of nested lists and mappings; `meant` ones stay bare."""
        if isinstance(value, str):
            return self._pattern(meant).sub(lambda match: f"{_OPEN}{match[0]}{_CLOSE}", value)
        if isinstance(value, Mapping):
            return {self.wrap(key, meant=meant): self.wrap(item, meant=meant) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.wrap(item, meant=meant) for item in value]
        return value

    def runs(self, rendered: str) -> list[Run]:
        """The rendered text without wrappers, in order; neighbours may be of one kind."""
        runs, end = [], 0
        for match in self._parts.finditer(rendered):
            if match["control"] is not None:
                continue
            runs.append(Run(rendered[end : match.start()], typed=False))
            if match["typed"] is not None:
                runs.append(Run(match["typed"], typed=True))
            end = match.end()
        runs.append(Run(rendered[end:], typed=False))
        return [run for run in runs if run.text]

    def control_ends(self, rendered: str) -> list[int]:
        """Where in the rendered text each control token of the template ends."""
        return [match.end() for match in self._parts.finditer(rendered) if match["control"] is not None]

    def _pattern(self, meant: frozenset[str]) -> re.Pattern[str]:
        if meant not in self._to_wrap:
            longest_first = sorted(self._control_tokens - meant, key=len, reverse=True)
            # A character of ours that somebody typed is wrapped too, so that it can't pass for one of ours.
            self._to_wrap[meant] = re.compile("|".join([*map(re.escape, longest_first), f"[{_OPEN}{_CLOSE}{EDGE}]"]))
        return self._to_wrap[meant]


def find_control_tokens(
    added_tokens: Mapping[str, int], special_ids: frozenset[int], chat_template: str
) -> dict[str, int]:
    """Tokens that structure a chat, with their ids: the special ones, and added ones that the template spells out.

    Of the others, short ones and white space don't count: vocabularies have added tokens for indentation.
    """
    return {
        text: token_id
        for text, token_id in added_tokens.items()
        if token_id in special_ids or (len(text.strip()) > 2 and text in chat_template)
    }
