"""What a schema allows of texts that are written without quotes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llguidance import LLMatcher

from headrace.grammar.alternatives import Alternative, types_of
from headrace.grammar.formats import MOMENTS
from headrace.grammar.lark import ANY_TEXT, regex
from headrace.grammar.patterns import rust_pattern

_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"

FORMATS = {
    **MOMENTS,
    "email": r"[A-Za-z0-9._+-]{1,64}@[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63}){1,4}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "uri": r"[a-z][a-z0-9+.-]*:[!-~]+",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
}
"""Formats of texts without quotes, each narrower than its standard where that is simpler."""

_NUMBER = r"\s*-?[0-9][0-9.eE+-]*\s*"
_LIKE = {
    "boolean": r"\s*[tTfF][rRaA][uUlL][eEsS][eE]?\s*",
    "integer": _NUMBER,
    "null": r"\s*[nN]([uU][lL][lL]|[oO][nN][eE])\s*",
    "number": _NUMBER,
}
"""Texts that may be read as a value of another type, and some more."""

_UNLIKE = {
    "array": rf"\s*([^\s\[]{ANY_TEXT})?",
    "object": rf"\s*([^\s{{]{ANY_TEXT})?",
}
"""Texts that are not read as a value of a type, or nearly all of these."""

_FOR_TEXTS_ONLY = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "type", "nullable"),
        *("$comment", "$schema", "$id", "$defs", "definitions", "minLength", "maxLength", "pattern", "format"),
    }
)
"""Keywords that don't limit a value that is no text."""

_BRACKETS = ("array", "object")
"""Types whose values begin with one, and may quote anything."""


@dataclass(frozen=True, slots=True)
class RawText:
    """A text that is written without quotes.

    values: the only ones, None for any. min_length, max_length: in characters. patterns: each matches it as a whole.
    excluded: patterns of which none does.
    """

    values: tuple[str, ...] | None = None
    min_length: int = 0
    max_length: int | None = None
    patterns: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()

    @property
    def is_free(self) -> bool:
        return self == RawText()


@dataclass(frozen=True, slots=True)
class RawValue:
    """A value that may be a text without quotes.

    texts: those of its values that are texts.
    rest: the schema of its other values, None if there are none or they look like texts anyway.
    has_brackets: other values may begin with a bracket, and no text does.
    unenforced: keywords that the texts are not held to.
    """

    texts: tuple[RawText, ...]
    rest: Any
    has_brackets: bool
    unenforced: tuple[str, ...]


def raw_value(found: Sequence[Alternative]) -> RawValue | None:
    """A value that matches one of several alternatives; None if none of them allows a text."""
    textual = [option for option in found if "string" in types_of(option)]
    if not textual:
        return None
    limited = frozenset(each for option in found if _limits_others(option) for each in types_of(option)) - {"string"}
    read = [_text(option, limited) for option in textual]
    texts = tuple(dict.fromkeys(text for text, _ in read if text.values != ()))
    if any(text.is_free for text in texts):
        texts = (RawText(),)
    rest = [option for option in found if types_of(option) - {"string"}]
    unenforced = tuple(name for _, names in read for name in names)
    if texts == (RawText(),) or not rest:
        return RawValue(texts, None, False, unenforced)
    if has_brackets(rest):
        return RawValue(without_brackets(texts), _without_texts(rest), True, unenforced)
    return RawValue(texts, _without_texts(rest), False, unenforced)


def has_brackets(found: Sequence[Alternative]) -> bool:
    return any(not types_of(option).isdisjoint(_BRACKETS) for option in found)


def without_brackets(texts: Sequence[RawText]) -> tuple[RawText, ...]:
    unlike = (_unlike(text, _BRACKETS) for text in texts)
    return tuple(text for text in unlike if text.values != ())


def _unlike(text: RawText, types: Iterable[str]) -> RawText:
    """The texts that don't look like a value of one of the types."""
    patterns = tuple(_UNLIKE[each] for each in types if each in _UNLIKE)
    excluded = tuple(dict.fromkeys(_LIKE[each] for each in types if each in _LIKE))
    if text.values is None:
        return replace(
            text,
            patterns=tuple(dict.fromkeys((*text.patterns, *patterns))),
            excluded=tuple(dict.fromkeys((*text.excluded, *excluded))),
        )
    fitting = [value for value in text.values if all(re.fullmatch(each, value) for each in patterns)]
    return replace(text, values=tuple(v for v in fitting if not any(re.fullmatch(each, v) for each in excluded)))


def _limits_others(option: Alternative) -> bool:
    """Whether the schema limits more than the type of a value that is no text."""
    return bool(types_of(option) - {"string"}) and any(set(part) - _FOR_TEXTS_ONLY for part in option)


def _without_texts(found: Sequence[Alternative]) -> Any:
    return {"anyOf": [{"allOf": [{"type": sorted(types_of(option) - {"string"})}, *option]} for option in found]}


def _text(option: Alternative, limited: frozenset[str]) -> tuple[RawText, list[str]]:
    """What an option allows as text, and the keywords that can't be enforced. limited: types it must not look like."""
    patterns: list[str] = []
    unenforced: list[str] = []
    for part in option:
        for keyword, pattern in _patterns(part):
            if pattern is None or _is_no_regex(pattern):
                unenforced.append(keyword)
            else:
                patterns.append(pattern)
    values = _values(option)
    if values is not None:
        return _unlike(RawText(values=values), sorted(limited)), []
    least = max((part.get("minLength", 0) for part in option), default=0)
    most = min((part["maxLength"] for part in option if "maxLength" in part), default=None)
    return _unlike(RawText(None, least, most, tuple(patterns)), sorted(limited)), unenforced


def _values(option: Alternative) -> tuple[str, ...] | None:
    lists = [[part["const"]] if "const" in part else part["enum"] for part in option if {"const", "enum"} & part.keys()]
    if not lists:
        return None
    first, *further = lists
    return tuple(each for each in first if isinstance(each, str) and all(each in listed for listed in further))


def _patterns(part: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """Keywords of a part that are regular expressions of a whole text; None for an unknown one."""
    found: list[tuple[str, str | None]] = []
    if "pattern" in part:
        found.append(("pattern", _searched(part["pattern"])))
    if "format" in part:
        found.append(("format", FORMATS.get(part["format"])))
    return found


def _searched(pattern: str) -> str:
    """The regular expression of whole texts in which a pattern is found; its anchors exclude text beside it."""
    pattern = rust_pattern(pattern)
    is_first, is_last = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[is_first : len(pattern) - is_last]
    return f"{'' if is_first else ANY_TEXT}({inner}){'' if is_last else ANY_TEXT}"


def _is_no_regex(pattern: str) -> bool:
    lark = f"start: {regex(pattern, ascii_classes='dw')}"
    return LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_lark(lark))[0]
