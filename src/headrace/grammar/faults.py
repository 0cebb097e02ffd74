"""The border to llguidance: its panics and errors, without the grammars, schemas and inner state that they quote."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from llguidance import LLParserLimits

from headrace.errors import GenerationFailed

P = ParamSpec("P")
Result = TypeVar("Result")

LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=100_000,
    verbose_errors=False,
)
"""Of one grammar: a mask takes 12 ms at most (of 250,000 tokens), and what masks have cost is kept in 60 MB at most."""


def panics_translated(call: Callable[P, Result]) -> Callable[P, Result]:
    """The call, with a panic of the library (no Exception) translated to GenerationFailed."""

    @wraps(call)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Result:
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            if isinstance(error, Exception) or type(error).__module__ != "pyo3_runtime":
                raise
        # The panic's text may quote the grammar.
        raise GenerationFailed("the grammar library failed")

    return wrapped


_KEYWORDS = frozenset(
    {
        *("additionalItems", "additionalProperties", "allOf", "anyOf", "const", "contains", "dependencies"),
        *("dependentRequired", "dependentSchemas", "else", "enum", "exclusiveMaximum", "exclusiveMinimum", "format"),
        *("if", "items", "maxContains", "maxItems", "maxLength", "maxProperties", "maximum", "minContains"),
        *("minItems", "minLength", "minProperties", "minimum", "multipleOf", "not", "oneOf", "pattern"),
        *("patternProperties", "prefixItems", "properties", "propertyNames", "required", "then", "type"),
        *("unevaluatedItems", "unevaluatedProperties", "uniqueItems", "$dynamicRef", "$recursiveRef", "$ref"),
    }
)

_UNSUPPORTED = "a keyword is not supported"
_UNSATISFIABLE = "nothing can fit it"
_NAMING = {
    _UNSUPPORTED: "the keyword {} is not supported",
    _UNSATISFIABLE: "nothing can fit it because of {}",
}

_PHRASES = (
    ("Unimplemented keys", _UNSUPPORTED),
    (
        "only supported when all keys",
        "minProperties and maxProperties are only supported where every listed property is required",
    ),
    ("oneOf constraints", "oneOf is only supported if no two of its schemas can hold at once"),
    ("not disjoint", "two patternProperties that can match the same name (they are not disjoint) are not supported"),
    ("Unknown format", "the format is not supported"),
    ("does not exist", "a $ref leads nowhere"),
    ("not present in a registry", "a $ref leads out of the schema"),
    ("schema is false", "the schema is false: nothing can fit it"),
    ("Unsatisfiable", _UNSATISFIABLE),
    ("look-around", "look-around (look-ahead, look-behind) is not supported"),
    ("lookaround", "look-around (look-ahead, look-behind, word borders) is not supported"),
    ("hex escape", "a lone surrogate is not text"),
    ("too many digits", "a number has too many digits"),
    ("too big", "it is too large"),
    ("too large", "a number is too large"),
    ("too many", "it is too large"),
    ("too deeply", "it is nested too deeply"),
    ("no start rule", "there is no rule called start"),
    ("circular reference", "a terminal refers to itself"),
    ("unknown special token", "the model has no such special token"),
    ("unknown grammar", "there is no such grammar"),
    ("unknown name", "a rule refers to one that does not exist"),
    ("uppercase", "& and ~ are for terminals only, whose names are written in uppercase"),
    ("range end", "a range ends before it begins"),
    ("regex parse error", "a regular expression can't be read"),
    ("invalid regex", "a regular expression can't be read"),
    ("Failed to generate regex", "the range of numbers is not supported"),
    ("failed to parse", "it is no JSON"),
    ("lexer error", "it can't be read"),
    ("Expected", "it can't be read"),
)
"""The phrase for a part of an error's text, the most specific first."""

_PLACE = re.compile(r"(?:at )?([0-9]{1,9})\(([0-9]{1,9})\):")
_REASON = re.compile(r"^error: ([a-zA-Z][a-zA-Z ,<='-]{0,120})$", re.MULTILINE)
"""The last line of an error of Rust's `regex`, whose words don't depend on the expression."""


def describe_fault(error: str, *, has_lines: bool = False) -> str:
    """The fault without any of the client's text. has_lines: the error counts lines of the client's text."""
    phrase = next((known for part, known in _PHRASES if part in error), "it can't be compiled")
    if found := _REASON.search(error):
        phrase = f"{phrase}: {found[1]}" if "look" not in phrase else phrase
    keywords = [word for word in dict.fromkeys(re.findall(r"[$A-Za-z]+", error)) if word in _KEYWORDS]
    if keywords and phrase in _NAMING:
        phrase = _NAMING[phrase].format(", ".join(keywords[:8]))
    place = _PLACE.match(error) if has_lines else None
    return phrase if place is None else f"line {place[1]}, column {place[2]}: {phrase}"
