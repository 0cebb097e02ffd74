"""What a tool's JSON schema says about the types of its arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# References that lead to each other are followed this far.
_MAX_DEPTH = 16

_TYPES_OF_VALUES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}

SCALARS = frozenset({"boolean", "integer", "number", "null"})


class Schema:
    """A part of a schema. root: the whole, in which references are looked up."""

    def __init__(self, part: Any, root: Any = None) -> None:
        self._part = part
        self._root = part if root is None else root
        self._branches = tuple(self._alternatives(part, _MAX_DEPTH))
        self.types = self._find_types()

    @property
    def takes_string(self) -> bool:
        """Whether a string is as good as anything."""
        return self.types is None or "string" in self.types

    @property
    def required(self) -> frozenset[str]:
        """Properties that must be given."""
        return frozenset(str(name) for branch in self._branches for name in _listed(branch.get("required")))

    def of_property(self, name: str) -> Schema:
        """The schema of an object's property."""
        for branch in self._branches:
            properties = branch.get("properties")
            if isinstance(properties, Mapping) and name in properties:
                return Schema(properties[name], self._root)
        for branch in self._branches:
            if isinstance(branch.get("additionalProperties"), Mapping):
                return Schema(branch["additionalProperties"], self._root)
        return ANY

    @property
    def items(self) -> Schema:
        """The schema of an array's items."""
        for branch in self._branches:
            if isinstance(branch.get("items"), Mapping):
                return Schema(branch["items"], self._root)
        return ANY

    def lists(self, name: str) -> bool:
        """Whether it is said what this property of an object is."""
        return any(name in (branch.get("properties") or {}) for branch in self._branches)

    def allows(self, name: str) -> bool:
        """Whether an object may well have such a property: it is listed, or others than listed are asked for."""
        lists_any = any(branch.get("properties") for branch in self._branches)
        takes_others = any(branch.get("additionalProperties") for branch in self._branches)
        return self.lists(name) or takes_others or not lists_any

    def _find_types(self) -> frozenset[str] | None:
        """Names of JSON types; None if any will do."""
        found: set[str] = set()
        for branch in self._branches:
            types = _types_of(branch)
            if types is None:
                return None
            found |= types
        return frozenset(found) or None

    def _alternatives(self, part: Any, depth: int) -> Iterator[Mapping[str, Any]]:
        """What the value may be, references resolved."""
        if not isinstance(part, Mapping) or not depth:
            return
        if isinstance(part.get("$ref"), str):
            yield from self._alternatives(self._resolve(part["$ref"]), depth - 1)
            return
        deeper = [each for key in ("anyOf", "oneOf", "allOf") for each in _listed(part.get(key))]
        for each in deeper:
            yield from self._alternatives(each, depth - 1)
        if not deeper or _types_of(part) is not None or "properties" in part:
            yield part

    def _resolve(self, reference: str) -> Any:
        """What a reference within the schema points to; None if nothing."""
        found = self._root
        for step in reference.removeprefix("#").split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, Mapping) else None
        return found


def _types_of(part: Mapping[str, Any]) -> frozenset[str] | None:
    """Types that one part without alternatives names; None if it leaves them open."""
    named = part.get("type")
    values = [part["const"]] if "const" in part else _listed(part.get("enum"))
    if isinstance(named, str):
        types = {named}
    elif isinstance(named, list | tuple):
        types = set(named)
    elif values:
        types = {"null" if value is None else _TYPES_OF_VALUES.get(type(value), "string") for value in values}
    elif "properties" in part or isinstance(part.get("additionalProperties"), Mapping):
        types = {"object"}
    elif "items" in part:
        types = {"array"}
    else:
        return None
    return frozenset(types | {"null"} if part.get("nullable") is True else types)


def _listed(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else ()


ANY = Schema({})
