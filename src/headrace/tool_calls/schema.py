"""The types of a tool's arguments in its JSON schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Limit on nested references.
_MAX_DEPTH = 16

_TYPES_OF_VALUES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}

SCALARS = frozenset({"boolean", "integer", "number", "null"})


class Schema:
    """A subschema. root: the whole, for references."""

    def __init__(self, part: Any, root: Any = None) -> None:
        self._part = part
        self._root = part if root is None else root
        self._branches = tuple(self._alternatives(part, _MAX_DEPTH))
        self.types = self._types(part, _MAX_DEPTH) or None

    @property
    def takes_string(self) -> bool:
        """Whether a string is always valid."""
        return self.types is None or "string" in self.types

    @property
    def needs_integer(self) -> bool:
        """Whether a number must be an integer."""
        return self.types is not None and "integer" in self.types and "number" not in self.types

    @property
    def required(self) -> frozenset[str]:
        """Required properties."""
        return frozenset(str(name) for branch in self._branches for name in _listed(branch.get("required")))

    def of_property(self, name: str) -> Schema:
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
        for branch in self._branches:
            if isinstance(branch.get("items"), Mapping):
                return Schema(branch["items"], self._root)
        return ANY

    def lists(self, name: str) -> bool:
        """Whether this property is declared."""
        return any(name in (branch.get("properties") or {}) for branch in self._branches)

    def allows(self, name: str) -> bool:
        """Whether an object may have such a property: it is declared, or undeclared ones are expected."""
        lists_any = any(branch.get("properties") for branch in self._branches)
        takes_others = any(branch.get("additionalProperties") for branch in self._branches)
        return self.lists(name) or name in self.required or takes_others or not lists_any

    def _types(self, part: Any, depth: int) -> frozenset[str] | None:
        """JSON types that a subschema allows; None for any."""
        if not isinstance(part, Mapping) or not depth:
            return None
        all_of = [self._resolve(part["$ref"])] if isinstance(part.get("$ref"), str) else []
        all_of += _listed(part.get("allOf"))
        found = [_types_of(part), *(self._types(each, depth - 1) for each in all_of)]
        for key in ("anyOf", "oneOf"):
            if alternatives := _listed(part.get(key)):
                found.append(_any_of([self._types(each, depth - 1) for each in alternatives]))
        return _each_of(found)

    def _alternatives(self, part: Any, depth: int) -> Iterator[Mapping[str, Any]]:
        """The alternatives of a value, references resolved."""
        if not isinstance(part, Mapping) or not depth:
            return
        deeper = [each for key in ("anyOf", "oneOf", "allOf") for each in _listed(part.get(key))]
        deeper += [self._resolve(part["$ref"])] if isinstance(part.get("$ref"), str) else []
        for each in deeper:
            yield from self._alternatives(each, depth - 1)
        yield part

    def _resolve(self, reference: str) -> Any:
        """The target of a reference within the schema; None if there is none."""
        found = self._root
        for step in reference.removeprefix("#").split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, Mapping) else None
        return found


def _types_of(part: Mapping[str, Any]) -> frozenset[str] | None:
    """Types that one subschema without alternatives names; None if it leaves them open."""
    named = part.get("type")
    values = [part["const"]] if "const" in part else _listed(part.get("enum"))
    # An unknown type name means nothing.
    known = {each for each in ([named] if isinstance(named, str) else _listed(named)) if _is_type(each)}
    if known:
        types = known
    elif values:
        types = {"null" if value is None else _TYPES_OF_VALUES.get(type(value), "string") for value in values}
    elif "properties" in part or isinstance(part.get("additionalProperties"), Mapping):
        types = {"object"}
    elif "items" in part:
        types = {"array"}
    else:
        return None
    return frozenset(types | {"null"} if part.get("nullable") is True else types)


def _is_type(name: object) -> bool:
    return isinstance(name, str) and (name == "null" or name in _TYPES_OF_VALUES.values())


def _any_of(found: Sequence[frozenset[str] | None]) -> frozenset[str] | None:
    """Types that any of several allows."""
    return None if None in found else frozenset[str]().union(*(types for types in found if types is not None))


def _each_of(found: Sequence[frozenset[str] | None]) -> frozenset[str] | None:
    """Types that all of several allow; an integer is a number."""
    known = [types for types in found if types is not None]
    if not known:
        return None
    return frozenset(
        name
        for name in frozenset[str]().union(*known)
        if all(name in types or (name == "integer" and "number" in types) for types in known)
    )


def _listed(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else ()


ANY = Schema({})
