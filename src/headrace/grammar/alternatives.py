"""Expands a JSON schema into alternatives, each a list of plain subschemas that all apply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from typing import Any

from headrace.grammar.schema import is_found
from headrace.tool_calls.schema import ALL_TYPES, COMBINING, MAX_DEPTH, References, types_of_part, well_formed_keywords

Alternative = tuple[Mapping[str, Any], ...]
"""Subschemas without references and combinators, all of which apply."""

MAX_ALTERNATIVES = 64
"""Alternatives of one schema. What matches one of the first matches the schema, so the others can be dropped."""


def alternatives(schema: Any, references: References) -> tuple[Alternative, ...]:
    """The alternatives of a schema, none if nothing matches. references: of the whole schema.

    `oneOf` counts as `anyOf`: whether its branches exclude each other is not checked. Keywords with invalid values are
    ignored.
    """
    return tuple(_alternatives(schema, references, MAX_DEPTH))


def types_of(option: Alternative) -> frozenset[str]:
    return reduce(frozenset.intersection, map(types_of_part, option), ALL_TYPES)


@dataclass(frozen=True, slots=True)
class Shape:
    """One alternative of an object."""

    option: Alternative

    @property
    def names(self) -> tuple[str, ...]:
        listed = [name for part in self.option for name in part.get("properties") or {}]
        return tuple(dict.fromkeys((*listed, *self.required)))

    @property
    def required(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for part in self.option for name in part.get("required") or ()))

    def schema_of(self, name: str) -> Any:
        schemas = [each for part in self.option for each in _schemas_of(part, name)]
        limits = [each for each in schemas if each is not True]
        if any(each is False for each in limits):
            return False
        return (limits[0] if len(limits) == 1 else {"allOf": limits}) if limits else True


def object_shapes(schema: Any, references: References) -> tuple[Shape, ...]:
    return tuple(Shape(option) for option in alternatives(schema, references) if "object" in types_of(option))


def _alternatives(schema: Any, references: References, depth: int) -> list[Alternative]:
    if schema is False or not depth:
        return []
    if not isinstance(schema, Mapping):
        return [()]
    schema = well_formed_keywords(schema)
    found: list[Alternative] = [({name: value for name, value in schema.items() if name not in COMBINING},)]
    for choices in _choices(schema, references, depth - 1):
        found = list(islice((option + choice for option in found for choice in choices), MAX_ALTERNATIVES))
    return found


def _choices(schema: Mapping[str, Any], references: References, depth: int) -> Iterator[Sequence[Alternative]]:
    if "$ref" in schema:
        yield _alternatives(references.resolved(schema["$ref"]), references, depth)
    for each in schema.get("allOf", ()):
        yield _alternatives(each, references, depth)
    for name in ("anyOf", "oneOf"):
        if name in schema:
            yield [option for each in schema[name] for option in _alternatives(each, references, depth)]


def _schemas_of(part: Mapping[str, Any], name: str) -> Iterator[Any]:
    listed = part.get("properties") or {}
    patterns = [each for pattern, each in (part.get("patternProperties") or {}).items() if is_found(pattern, name)]
    if name in listed:
        yield listed[name]
    yield from patterns
    if name not in listed and not patterns:
        yield part.get("additionalProperties", True)
