"""A JSON schema taken apart: the ways of fitting it, each a list of plain parts that hold together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from headrace.grammar.patterns import is_found

Way = tuple[Mapping[str, Any], ...]
"""Parts without references and combinations, all of which hold."""

MAX_WAYS = 64
"""Of one schema. What fits one of the first of them fits the schema, so that the others can be done without."""

COMBINING = ("$ref", "allOf", "anyOf", "oneOf")

_MAX_DEPTH = 16

# Whoever writes a schema by hand may get a keyword wrong. Only strict tools are refused for that.
_FORMS: Mapping[str, type] = {
    **dict.fromkeys(("properties", "patternProperties"), Mapping),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "enum"), list),
    **dict.fromkeys(("minLength", "maxLength", "minProperties", "maxProperties"), int),
    **dict.fromkeys(("pattern", "format", "$ref"), str),
}

_ALL_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_TYPES_OF_VALUES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}

# What a part that names no type is about: a value of another type would fit, but nobody means it.
_HINTS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("properties", "additionalProperties", "patternProperties", "required"), frozenset({"object"})),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems"), frozenset({"array"})),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), frozenset({"integer", "number"})),
}


def ways(schema: Any, root: Any) -> tuple[Way, ...]:
    """The ways of fitting a schema, none if nothing can. root: the whole, in which references are looked up.

    Of `oneOf` as of `anyOf`: whether its branches exclude each other is not looked at. Keywords whose values make no
    sense are left out.
    """
    return tuple(_ways(schema, root, _MAX_DEPTH))


def types_of(way: Way) -> frozenset[str]:
    """JSON types that a value may have, `integer` beside `number`."""
    found = _ALL_TYPES
    for part in way:
        named = _types_of_part(part)
        found = frozenset(each for each in found if each in named or (each == "integer" and "number" in named))
    return found


@dataclass(frozen=True, slots=True)
class Shape:
    """What an object may be, one way of it."""

    way: Way

    @property
    def names(self) -> tuple[str, ...]:
        """Properties that are listed or required, in their order."""
        listed = [name for part in self.way for name in part.get("properties") or {}]
        return tuple(dict.fromkeys((*listed, *self.required)))

    @property
    def required(self) -> tuple[str, ...]:
        """Properties that must be given."""
        return tuple(dict.fromkeys(name for part in self.way for name in part.get("required") or ()))

    def schema_of(self, name: str) -> Any:
        """What a property may be; False if it may not be given."""
        schemas = [each for part in self.way for each in _schemas_of(part, name)]
        limits = [each for each in schemas if each is not True]
        if any(each is False for each in limits):
            return False
        return (limits[0] if len(limits) == 1 else {"allOf": limits}) if limits else True


def object_shapes(schema: Any, root: Any) -> tuple[Shape, ...]:
    """The ways in which an object fits a schema."""
    return tuple(Shape(way) for way in ways(schema, root) if "object" in types_of(way))


def _ways(schema: Any, root: Any, depth: int) -> list[Way]:
    if schema is False or not depth:
        return []
    if not isinstance(schema, Mapping):
        return [()]
    schema = {name: value for name, value in schema.items() if _makes_sense(name, value)}
    found: list[Way] = [({name: value for name, value in schema.items() if name not in COMBINING},)]
    for choices in _choices(schema, root, depth - 1):
        found = list(islice((way + choice for way in found for choice in choices), MAX_WAYS))
    return found


def _makes_sense(keyword: str, value: Any) -> bool:
    if keyword == "type":
        named = [value] if isinstance(value, str) else value
        return isinstance(named, list) and all(isinstance(each, str) and each in _ALL_TYPES for each in named)
    if keyword == "required":
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    return isinstance(value, _FORMS.get(keyword, object))


def _choices(schema: Mapping[str, Any], root: Any, depth: int) -> Iterator[Sequence[Way]]:
    """For each combination that a schema names the ways of fitting it."""
    if "$ref" in schema:
        yield _ways(_resolved(schema["$ref"], root), root, depth)
    for each in schema.get("allOf", ()):
        yield _ways(each, root, depth)
    for name in ("anyOf", "oneOf"):
        if name in schema:
            yield [way for each in schema[name] for way in _ways(each, root, depth)]


def _resolved(reference: str, root: Any) -> Any:
    """What a reference within the schema points to; True, which takes anything, if that can't be found."""
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
    """What one part says of a property."""
    listed = part.get("properties") or {}
    patterns = [each for pattern, each in (part.get("patternProperties") or {}).items() if is_found(pattern, name)]
    if name in listed:
        yield listed[name]
    yield from patterns
    if name not in listed and not patterns:
        yield part.get("additionalProperties", True)
