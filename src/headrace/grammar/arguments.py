"""What the arguments of one tool may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from headrace.errors import InvalidRequest
from headrace.grammar.raw_text import RawText, has_brackets, raw_value, without_brackets
from headrace.grammar.schema import check_schema, compiled_schema
from headrace.grammar.ways import COMBINING, Shape, Way, object_shapes, ways
from headrace.types.chat import ToolDefinition

_FIELD = "tools"
_ANY_OBJECT = {"type": "object"}

# Under this name the whole schema stands beside one of its parts that refers into it.
_ROOT = "headrace:whole"

# Keywords of an object that can't be held to where its properties are written one by one.
_OF_THE_WHOLE = ("const", "dependencies", "dependentRequired", "dependentSchemas", "enum", "if", "not", "propertyNames")


# Keywords of an object by which further properties than those listed may be given.
_OPENING = {*COMBINING, "additionalProperties", "patternProperties"}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument.

    schema: what it may be, as llguidance takes it. raw: texts that it may be without quotes, if any; rest: what it may
    be beside those, None for nothing. has_brackets: that may be JSON which begins with a bracket, as none of the texts.
    """

    name: str
    is_required: bool
    schema: Any
    raw: tuple[RawText, ...]
    rest: Any
    has_brackets: bool


class Arguments:
    """Of one tool. A tool that isn't strict is held to its schema as far as that can be, then to any JSON.

    Raises InvalidRequest if they can be no object, and so do its methods; also if a strict tool can't be held to them.
    """

    def __init__(self, tool: ToolDefinition) -> None:
        self._tool = tool
        self._root = dict(tool.parameters)
        self._is_schema = self._check()
        self._ways: dict[Callable[[str], bool], tuple[tuple[Parameter, ...], ...]] = {}
        self._shapes = object_shapes(self._root, self._root)
        if not self._shapes:
            raise self._refused("its parameters can be no object")

    @property
    def name(self) -> str:
        return self._tool.name

    def whole(self) -> Any:
        """All arguments as one JSON object."""
        if not self._is_schema:
            return compiled_schema(_ANY_OBJECT, _FIELD)
        # Beside a reference llguidance takes nothing if that leads back to where it stands.
        schema = self._root if "$ref" in self._root else {**self._root, "type": "object"}
        if "properties" in schema and not _OPENING & schema.keys():
            unlisted = {name: True for name in schema.get("required") or () if name not in schema["properties"]}
            schema = {**schema, "properties": {**schema["properties"], **unlisted}, "additionalProperties": False}
        return self._compiled(schema, _ANY_OBJECT)

    def ways(self, can_be_key: Callable[[str], bool]) -> tuple[tuple[Parameter, ...], ...]:
        """Lists of arguments, one of which is written argument by argument, in the order of the schema.

        Arguments that the schema neither lists nor requires are none: nobody could say of what type they are.
        can_be_key: whether a name can be written; an argument whose name can't is left out.
        """
        if (found := self._ways.get(can_be_key)) is None:
            found = self._ways[can_be_key] = self._found_ways(can_be_key)
        return found

    def _found_ways(self, can_be_key: Callable[[str], bool]) -> tuple[tuple[Parameter, ...], ...]:
        if self._tool.strict:
            # Says what no grammar can enforce, and makes sure that branches of oneOf exclude each other.
            self.whole()
        found = [self._parameters(shape, can_be_key) for shape in self._shapes]
        possible = [each for each in found if each is not None]
        if not possible:
            raise self._refused("no arguments that fit can be written in the syntax of the model's calls")
        # One may be free text in one way and JSON in another: where a value ends must not depend on that.
        json_names = {each.name for way in possible for each in way if each.has_brackets}
        return tuple(tuple(_told_apart(each) if each.name in json_names else each for each in way) for way in possible)

    def _parameters(self, shape: Shape, can_be_key: Callable[[str], bool]) -> tuple[Parameter, ...] | None:
        """None if something that is required can't be given."""
        given = []
        for name in shape.names:
            schema, is_required = shape.schema_of(name), name in shape.required
            fitting = ways(schema, self._root)
            if fitting and can_be_key(name):
                given.append(self._parameter(name, schema, fitting, is_required))
            elif is_required:
                return None
        if self._tool.strict:
            self._check_whole(shape, given)
        return tuple(given)

    def _check_whole(self, shape: Shape, given: list[Parameter]) -> None:
        num_required = sum(each.is_required for each in given)
        for part in shape.way:
            found = [name for name in _OF_THE_WHOLE if name in part]
            found += ["minProperties"] if part.get("minProperties", 0) > num_required else []
            found += ["maxProperties"] if part.get("maxProperties", len(given)) < len(given) else []
            if found:
                raise self._refused(f"{found[0]} can't be enforced where arguments are written one by one")

    def _parameter(self, name: str, schema: Any, fitting: Sequence[Way], is_required: bool) -> Parameter:
        raw = raw_value(fitting)
        if raw is not None and raw.unenforced and self._tool.strict:
            where = f"the {raw.unenforced[0]} of {name}"
            raise self._refused(f"{where} can't be enforced where texts stand without quotes")
        whole = self._compiled(self._alone(schema), True)
        if raw is None:
            return Parameter(name, is_required, whole, (), whole, has_brackets(fitting))
        rest = None if raw.rest is None else self._compiled(self._alone(raw.rest), True)
        return Parameter(name, is_required, whole, raw.texts, rest, raw.has_brackets)

    def _alone(self, schema: Any) -> Any:
        """A part of the schema that stands by itself: what it refers to comes along."""
        moved = _with_references_moved(schema)
        if moved == schema:
            return schema
        return {**moved, "$defs": {**moved.get("$defs", {}), _ROOT: self._moved_root}}

    @cached_property
    def _moved_root(self) -> Any:
        # An identifier would make it a document of its own, in which references lead elsewhere.
        return _with_references_moved(
            {name: each for name, each in self._root.items() if name not in ("$id", "$schema")}
        )

    def _check(self) -> bool:
        """Whether the parameters are a JSON schema; those of a strict tool have to be."""
        try:
            check_schema(self._root, _FIELD)
        except InvalidRequest as error:
            if self._tool.strict:
                raise self._refused(error.message) from error
            return False
        return True

    def _compiled(self, schema: Any, loose: Any) -> Any:
        try:
            return compiled_schema(schema, _FIELD, is_checked=self._is_schema)
        except InvalidRequest as error:
            if self._tool.strict:
                raise self._refused(error.message) from error
            return compiled_schema(loose, _FIELD)

    def _refused(self, why: str) -> InvalidRequest:
        return InvalidRequest(f"the tool {self.name}: {why}", param=_FIELD)


def _told_apart(parameter: Parameter) -> Parameter:
    return replace(parameter, raw=without_brackets(parameter.raw), has_brackets=True)


def _with_references_moved(schema: Any) -> Any:
    """The schema with every reference into the whole leading to where the whole stands beside a part."""
    if isinstance(schema, Mapping):
        moved = {name: _with_references_moved(each) for name, each in schema.items()}
        target = moved.get("$ref")
        if isinstance(target, str) and (target == "#" or target.startswith("#/")):
            moved["$ref"] = f"#/$defs/{_ROOT}{target.removeprefix('#')}"
        return moved
    if isinstance(schema, list | tuple):
        return [_with_references_moved(each) for each in schema]
    return schema
