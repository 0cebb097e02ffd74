"""Expands a JSON schema into alternatives, each a list of plain subschemas that all apply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from headrace.grammar.patterns import is_found

Alternative = tuple[Mapping[str, Any], ...]
"""Subschemas without references and combinators, all of which apply."""

MAX_ALTERNATIVES = 64
"""Alternatives of one schema. What matches one of the first matches the schema, so the others can be dropped."""

COMBINING = ("$ref", "allOf", "anyOf", "oneOf")

_MAX_DEPTH = 16

# A schema written by hand may misuse a keyword. Only strict tools are refused for that.
_FORMS: Mapping[str, type] = {
    **dict.fromkeys(("properties", "patternProperties"), Mapping),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "enum"), list),
    **dict.fromkeys(("minLength", "maxLength", "minProperties", "maxProperties"), int),
    **dict.fromkeys(("pattern", "format", "$ref"), str),
}

_ALL_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_TYPES_OF_VALUES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}

# The type that a subschema without one is about: a value of another type would match, but is never meant.
_HINTS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("properties", "additionalProperties", "patternProperties", "required"), frozenset({"object"})),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems"), frozenset({"array"})),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), frozenset({"integer", "number"})),
}


def alternatives(schema: Any, root: Any) -> tuple[Alternative, ...]:
    """The alternatives of a schema, none if nothing matches. root: the whole schema, for references.

    `oneOf` counts as `anyOf`: whether its branches exclude each other is not checked. Keywords with invalid values are
    ignored.
    """
    return tuple(_alternatives(schema, root, _MAX_DEPTH))


def types_of(option: Alternative) -> frozenset[str]:
    """The JSON types of a value, `integer` separate from `number`."""
    found = _ALL_TYPES
    for part in option:
        named = _types_of_part(part)
        found = frozenset(each for each in found if each in named or (each == "integer" and "number" in named))
    return found


@dataclass(frozen=True, slots=True)
class Shape:
    """One alternative of an object."""

    option: Alternative

    @property
    def names(self) -> tuple[str, ...]:
        """Listed or required properties, in order."""
        listed = [name for part in self.option for name in part.get("properties") or {}]
        return tuple(dict.fromkeys((*listed, *self.required)))

    @property
    def required(self) -> tuple[str, ...]:
        """The properties that must be given."""
        return tuple(dict.fromkeys(name for part in self.option for name in part.get("required") or ()))

    def schema_of(self, name: str) -> Any:
        """A property's schema; False if it is forbidden."""
        schemas = [each for part in self.option for each in _schemas_of(part, name)]
        limits = [each for each in schemas if each is not True]
        if any(each is False for each in limits):
            return False
        return (limits[0] if len(limits) == 1 else {"allOf": limits}) if limits else True


def object_shapes(schema: Any, root: Any) -> tuple[Shape, ...]:
    """The alternatives that allow an object."""
    return tuple(Shape(option) for option in alternatives(schema, root) if "object" in types_of(option))


def _alternatives(schema: Any, root: Any, depth: int) -> list[Alternative]:
    if schema is False or not depth:
        return []
    if not isinstance(schema, Mapping):
        return [()]
    schema = {name: value for name, value in schema.items() if _makes_sense(name, value)}
    found: list[Alternative] = [({name: value for name, value in schema.items() if name not in COMBINING},)]
    for choices in _choices(schema, root, depth - 1):
        found = list(islice((option + choice for option in found for choice in choices), MAX_ALTERNATIVES))
    return found


def _makes_sense(keyword: str, value: Any) -> bool:
    if keyword == "type":
        named = [value] if isinstance(value, str) else value
        return isinstance(named, list) and all(isinstance(each, str) and each in _ALL_TYPES for each in named)
    if keyword == "required":
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    return isinstance(value, _FORMS.get(keyword, object))


def _choices(schema: Mapping[str, Any], root: Any, depth: int) -> Iterator[Sequence[Alternative]]:
    """The alternatives of each combinator in a schema."""
    if "$ref" in schema:
        yield _alternatives(_resolved(schema["$ref"], root), root, depth)
    for each in schema.get("allOf", ()):
        yield _alternatives(each, root, depth)
    for name in ("anyOf", "oneOf"):
        if name in schema:
            yield [option for each in schema[name] for option in _alternatives(each, root, depth)]


def _resolved(reference: str, root: Any) -> Any:
    """The target of a reference within the schema; True, which allows anything, if there is none."""
    found = root
    for step in reference.removeprefix("#").split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or key not in found:
            return True
        found = found[key]
    return found


def _types_of_part(part: Mapping[str, Any]) -> frozenset[str]:
    named = part.get("type")
    values = [part["const"]] if "const" in part else part.get("enum")
    if named is not None:
        types = frozenset({named} if isinstance(named, str) else named)
    elif values is not None:
        types = frozenset("null" if value is None else _TYPES_OF_VALUES[type(value)] for value in values)
    else:
        types = next((hinted for keyword, hinted in _HINTS.items() if keyword in part), _ALL_TYPES)
    return types | {"null"} if part.get("nullable") is True else types


def _schemas_of(part: Mapping[str, Any], name: str) -> Iterator[Any]:
    """A subschema's schemas for a property."""
    listed = part.get("properties") or {}
    patterns = [each for pattern, each in (part.get("patternProperties") or {}).items() if is_found(pattern, name)]
    if name in listed:
        yield listed[name]
    yield from patterns
    if name not in listed and not patterns:
        yield part.get("additionalProperties", True)
