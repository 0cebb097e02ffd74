"""The types of values that a JSON schema allows, for parsers and grammars."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cached_property, reduce
from typing import Any
from urllib.parse import unquote, urljoin

_TYPE_NAMES = ("array", "boolean", "integer", "null", "number", "object", "string")
ALL_TYPES = frozenset(_TYPE_NAMES)
SCALARS = frozenset({"boolean", "integer", "number", "null"})
COMBINING = ("$ref", "allOf", "anyOf", "oneOf")

MAX_DEPTH = 16
"""Nesting of combinators and references, beyond which nothing is looked up."""

_TYPES_OF_VALUES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}

_FORMS: Mapping[str, type] = {
    **dict.fromkeys(("properties", "patternProperties"), Mapping),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "enum"), list),
    **dict.fromkeys(("minLength", "maxLength", "minProperties", "maxProperties"), int),
    **dict.fromkeys(("pattern", "format", "$ref"), str),
}

# Keywords with subschemas by names of any kind, and those whose values are no subschemas.
MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
VALUES = ("const", "enum", "default", "examples")

# The type that a subschema without one is about: a value of another type would match, but is never meant.
_HINTS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("properties", "additionalProperties", "patternProperties", "required"), frozenset({"object"})),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems"), frozenset({"array"})),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), frozenset({"integer", "number"})),
}


def well_formed_keywords(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that have values of the right form, and of types the known ones: a schema may be written by hand."""
    kept = {name: value for name, value in schema.items() if name != "type" and _is_well_formed(name, value)}
    named = schema.get("type")
    if isinstance(named, list):
        named = [each for each in named if each in _TYPE_NAMES] or None
    return {"type": named, **kept} if isinstance(named, list) or named in _TYPE_NAMES else kept


def types_of_part(part: Mapping[str, Any]) -> frozenset[str]:
    """JSON types that well-formed keywords allow, combinators aside; all if they leave them open.

    `integer` is among them wherever `number` is.
    """
    named = part.get("type")
    values = [part["const"]] if "const" in part else part.get("enum")
    if named is not None:
        types = frozenset([named] if isinstance(named, str) else named)
    elif values is not None:
        types = frozenset("null" if value is None else _TYPES_OF_VALUES.get(type(value), "string") for value in values)
    else:
        types = next((hinted for keyword, hinted in _HINTS.items() if keyword in part), ALL_TYPES)
    if "number" in types:
        types |= {"integer"}
    return types | {"null"} if part.get("nullable") is True else types


def document_id(schema: Any) -> str:
    """The address that a schema gives itself as a separate document; empty if it gives none."""
    own = schema.get("$id") if isinstance(schema, Mapping) else None
    return own.partition("#")[0] if isinstance(own, str) else ""


class References:
    """The targets of references within a whole schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._base = document_id(root)

    def resolved(self, reference: str) -> Any:
        """The target; True, which allows anything, if there is none."""
        address, _, fragment = reference.partition("#")
        fragment = unquote(fragment)
        document = _joined(self._base, address)
        if fragment and not fragment.startswith("/"):
            return self._named.get(f"{document}#{fragment}", True)
        found = self._root if self.is_root(address) else self._named.get(document, True)
        for step in fragment.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and key in found:
                found = found[key]
            elif isinstance(found, list) and re.fullmatch("[0-9]{1,9}", key) and int(key) < len(found):
                found = found[int(key)]
            else:
                return True
        return found

    def is_root(self, address: str) -> bool:
        """Whether the part of a reference before its `#` means the whole schema."""
        return not address or _joined(self._base, address) == self._base

    @cached_property
    def _named(self) -> dict[str, Any]:
        """Documents in the schema by address, and subschemas by address and anchor."""
        found: dict[str, Any] = {}
        waiting: list[tuple[str, Any]] = [("", self._root)]
        while waiting:
            address, part = waiting.pop()
            if isinstance(part, list):
                waiting += [(address, each) for each in part]
            elif isinstance(part, Mapping):
                if own := document_id(part):
                    address = _joined(address, own)
                    found.setdefault(address, part)
                for anchor in _anchors(part):
                    found.setdefault(f"{address}#{anchor}", part)
                for name, value in part.items():
                    if name in MAPS and isinstance(value, Mapping):
                        waiting += [(address, each) for each in value.values()]
                    elif name not in VALUES:
                        waiting.append((address, value))
        return found


def _joined(base: str, address: str) -> str:
    try:
        return urljoin(base, address)
    except ValueError:  # of an IPv6 address
        return address


def _anchors(part: Mapping[str, Any]) -> list[str]:
    named = [part.get("$anchor"), part.get("$dynamicAnchor")]
    # Draft 7 has no anchors but ids that are fragments.
    if isinstance(own := part.get("$id"), str) and own.startswith("#"):
        named.append(own[1:])
    return [each for each in named if isinstance(each, str)]


class Schema:
    """A subschema of a tool's arguments, as parsers use it. references: of the whole; None for
    the whole itself.

    types: None for any; without `integer` where there is `number`.
    """

    def __init__(self, part: Any, references: References | None = None) -> None:
        self._references = References(part) if references is None else references
        self._branches: list[Mapping[str, Any]] = []
        self._types_of_references: dict[str, frozenset[str] | None] = {}
        types = self._read(part, MAX_DEPTH)
        if not types or types == ALL_TYPES:
            self.types = None
        else:
            self.types = types - {"integer"} if "number" in types else types

    @property
    def takes_string(self) -> bool:
        return self.types is None or "string" in self.types

    @property
    def needs_integer(self) -> bool:
        return self.types is not None and "integer" in self.types

    @property
    def required(self) -> frozenset[str]:
        return frozenset(name for branch in self._branches for name in branch.get("required", ()))

    @property
    def property_names(self) -> frozenset[str]:
        return frozenset(name for branch in self._branches for name in branch.get("properties", ()))

    def of_property(self, name: str) -> Schema:
        for branch in self._branches:
            if name in branch.get("properties", ()):
                return Schema(branch["properties"][name], self._references)
        for branch in self._branches:
            if isinstance(branch.get("additionalProperties"), Mapping):
                return Schema(branch["additionalProperties"], self._references)
        return ANY

    @property
    def items(self) -> Schema:
        for branch in self._branches:
            if isinstance(branch.get("items"), Mapping):
                return Schema(branch["items"], self._references)
        return ANY

    def declares(self, name: str) -> bool:
        return name in self.property_names

    def allows(self, name: str) -> bool:
        """Whether an object may have such a property: it is declared, or undeclared ones are expected."""
        declares_any = any(branch.get("properties") for branch in self._branches)
        takes_others = any(branch.get("additionalProperties") for branch in self._branches)
        return self.declares(name) or name in self.required or takes_others or not declares_any

    def _read(self, part: Any, depth: int) -> frozenset[str] | None:
        """The types that a subschema allows; None if they are not known. Adds its branches, inner ones first."""
        if not depth:
            return None
        if not isinstance(part, Mapping):
            return frozenset() if part is False else ALL_TYPES
        part = well_formed_keywords(part)
        found = [self._read(each, depth - 1) for each in part.get("allOf", ())]
        for name in ("anyOf", "oneOf"):
            if name in part:
                options = _known(self._read(each, depth - 1) for each in part[name])
                found.append(frozenset().union(*options) if options else None)
        if "$ref" in part:
            found.append(self._read_reference(part["$ref"], depth - 1))
        self._branches.append(part)
        own, known = types_of_part(part), _known(found)
        return None if own == ALL_TYPES and found and not known else reduce(frozenset.intersection, known, own)

    def _read_reference(self, reference: str, depth: int) -> frozenset[str] | None:
        """As `_read`, once for each reference: many in a circle would take exponential time."""
        if reference not in self._types_of_references:
            self._types_of_references[reference] = None
            self._types_of_references[reference] = self._read(self._references.resolved(reference), depth)
        return self._types_of_references[reference]


def _known(found: Iterable[frozenset[str] | None]) -> list[frozenset[str]]:
    return [types for types in found if types is not None]


def _is_well_formed(keyword: str, value: Any) -> bool:
    if keyword == "required":
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    return isinstance(value, _FORMS.get(keyword, object))


ANY = Schema({})
