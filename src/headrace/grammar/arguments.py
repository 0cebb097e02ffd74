"""The allowed arguments of one tool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from urllib.parse import unquote

from headrace.errors import InvalidRequest
from headrace.grammar.alternatives import Alternative, Shape, alternatives, object_shapes
from headrace.grammar.raw_text import RawText, has_brackets, raw_value, without_brackets
from headrace.grammar.schema import check_schema, compiled_schema
from headrace.tool_calls.schema import COMBINING, MAPS, VALUES, References, document_id
from headrace.types.chat import ToolDefinition

_FIELD = "tools"
_ANY_OBJECT = {"type": "object"}

# The whole schema's name when a part refers into it.
_ROOT = "headrace:whole"

# Object keywords that can't be enforced where properties are written one by one.
_OF_THE_WHOLE_OBJECT = (
    "const",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "enum",
    "if",
    "not",
    "propertyNames",
)


# Object keywords that allow further properties than those listed.
_ALLOW_UNLISTED = {*COMBINING, "additionalProperties", "patternProperties"}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument.

    schema: its values, as llguidance takes it.
    raw: unquoted texts, if any;
    rest: other values, None for none.
    has_brackets: JSON that begins with a bracket is allowed, and no text that does.
    """

    name: str
    is_required: bool
    schema: Any
    raw: tuple[RawText, ...]
    rest: Any
    has_brackets: bool


class Arguments:
    """Arguments of one tool. A tool that isn't strict is held to its schema as far as possible, else to any JSON.

    Raises InvalidRequest if they allow no object, or if a strict tool can't be enforced; its methods raise likewise.
    """

    def __init__(self, tool: ToolDefinition) -> None:
        self._tool = tool
        self._root = dict(tool.parameters)
        self._references = References(self._root)
        self._is_schema = self._check()
        self._alternatives: dict[Callable[[str], bool], tuple[tuple[Parameter, ...], ...]] = {}
        self._shapes = object_shapes(self._root, self._references)
        if not self._shapes:
            raise self._refused("its parameters allow no object")

    @property
    def name(self) -> str:
        return self._tool.name

    def object_schema(self) -> Any:
        if not self._is_schema:
            return compiled_schema(_ANY_OBJECT, _FIELD)
        # llguidance accepts nothing beside a recursive reference.
        schema = self._root if "$ref" in self._root else {**self._root, "type": "object"}
        if "properties" in schema and not _ALLOW_UNLISTED & schema.keys():
            unlisted = {name: True for name in schema.get("required") or () if name not in schema["properties"]}
            schema = {**schema, "properties": {**schema["properties"], **unlisted}, "additionalProperties": False}
        return self._compiled(schema, _ANY_OBJECT)

    def alternatives(self, can_be_key: Callable[[str], bool]) -> tuple[tuple[Parameter, ...], ...]:
        """Lists of arguments, one of which is written argument by argument, in the schema's order.

        Arguments that the schema neither lists nor requires are not allowed, because their type would be unknown.
        can_be_key: whether a name can be written; others are left out.
        """
        if (found := self._alternatives.get(can_be_key)) is None:
            found = self._alternatives[can_be_key] = self._find_alternatives(can_be_key)
        return found

    def _find_alternatives(self, can_be_key: Callable[[str], bool]) -> tuple[tuple[Parameter, ...], ...]:
        if self._tool.strict:
            # Rejects what no grammar can enforce, and checks that branches of oneOf exclude each other.
            self.object_schema()
        found = [self._parameters(shape, can_be_key) for shape in self._shapes]
        possible = [each for each in found if each is not None]
        if not possible:
            raise self._refused("no valid arguments can be written in the model's call syntax")
        # One may be free text in one alternative and JSON in another: where a value ends must not depend on that.
        json_names = {each.name for option in possible for each in option if each.has_brackets}
        return tuple(
            tuple(_without_bracketed_texts(each) if each.name in json_names else each for each in option)
            for option in possible
        )

    def _parameters(self, shape: Shape, can_be_key: Callable[[str], bool]) -> tuple[Parameter, ...] | None:
        """None if a required property is impossible."""
        given = []
        for name in shape.names:
            schema, is_required = shape.schema_of(name), name in shape.required
            fitting = alternatives(schema, self._references)
            if fitting and can_be_key(name):
                given.append(self._parameter(name, schema, fitting, is_required))
            elif is_required:
                return None
        if self._tool.strict:
            self._check_whole(shape, given)
        return tuple(given)

    def _check_whole(self, shape: Shape, given: list[Parameter]) -> None:
        num_required = sum(each.is_required for each in given)
        for part in shape.option:
            found = [name for name in _OF_THE_WHOLE_OBJECT if name in part]
            found += ["minProperties"] if part.get("minProperties", 0) > num_required else []
            found += ["maxProperties"] if part.get("maxProperties", len(given)) < len(given) else []
            if found:
                raise self._refused(f"{found[0]} can't be enforced where arguments are written one by one")

    def _parameter(self, name: str, schema: Any, fitting: Sequence[Alternative], is_required: bool) -> Parameter:
        raw = raw_value(fitting)
        if raw is not None and raw.unenforced and self._tool.strict:
            where = f"the {raw.unenforced[0]} of {name}"
            raise self._refused(f"{where} can't be enforced where texts stand without quotes")
        whole = self._compiled(self._with_definitions(schema), True)
        if raw is None:
            return Parameter(name, is_required, whole, (), whole, has_brackets(fitting))
        rest = None if raw.rest is None else self._compiled(self._with_definitions(raw.rest), True)
        return Parameter(name, is_required, whole, raw.texts, rest, raw.has_brackets)

    def _with_definitions(self, schema: Any) -> Any:
        """A part of the schema with everything it refers to."""
        moved, references = self._with_references_moved(schema)
        if not references:
            return schema
        return {**moved, "$defs": {**moved.get("$defs", {}), _ROOT: self._definition_of_root}}

    @cached_property
    def _definition_of_root(self) -> Any:
        # An `$id` would make it a separate document with its own references.
        rest = {name: each for name, each in self._root.items() if name not in ("$id", "$schema")}
        return self._with_references_moved(rest)[0]

    def _with_references_moved(self, schema: Any) -> tuple[Any, list[str]]:
        """The schema with its references into the whole as references to `_ROOT`, and all of its references."""
        references: list[str] = []

        def moved(part: Any) -> Any:
            if isinstance(part, Mapping):
                if document_id(part):
                    # Its references are its own.
                    references.append(document_id(part))
                    return part
                changed = {name: moved_keyword(name, each) for name, each in part.items()}
                if isinstance(own_id := changed.get("$id"), str):
                    # Draft 7's spelling of an anchor, which a part without `$schema` can't have.
                    del changed["$id"]
                    changed |= {"$anchor": own_id[1:]} if own_id[1:] else {}
                if isinstance(target := changed.get("$ref"), str):
                    references.append(target)
                    changed["$ref"] = self._moved_reference(target)
                return changed
            return [moved(each) for each in part] if isinstance(part, list | tuple) else part

        def moved_keyword(name: str, value: Any) -> Any:
            if name in VALUES:
                return value
            if name in MAPS and isinstance(value, Mapping):
                return {each: moved(part) for each, part in value.items()}
            return moved(value)

        return moved(schema), references

    def _moved_reference(self, target: str) -> str:
        address, _, fragment = target.partition("#")
        if not self._references.is_root(address):
            return target
        is_pointer = not fragment or unquote(fragment).startswith("/")
        return f"#/$defs/{_ROOT}{fragment}" if is_pointer else f"#{fragment}"

    def _check(self) -> bool:
        """Whether the parameters are a JSON schema; a strict tool's must be."""
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


def _without_bracketed_texts(parameter: Parameter) -> Parameter:
    return replace(parameter, raw=without_brackets(parameter.raw), has_brackets=True)
