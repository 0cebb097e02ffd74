"""JSON schemas: what of them can be held to, and whether a text fits one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jsonschema
from llguidance import LLMatcher

from headrace.errors import InvalidRequest

WHITE_SPACE = r" |\r?\n[ \t]{0,20}"
"""Between the parts of a JSON text: a space, or a new line and its indentation.

With any white space allowed, a model that has nothing to say writes spaces for ever.
"""

_DIALECTS = (jsonschema.Draft202012Validator, jsonschema.Draft7Validator)
"""How a schema that doesn't say its own dialect is read: the first of which it is one."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLES = (
    *("items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"),
    *("contains", "propertyNames", "not", "if", "then", "else"),
)
_DEFINITIONS = ("$schema", "$id", "$defs", "definitions")

_MOST_PLACES = 2000
"""Parts of a schema that are looked at to say where it is at fault."""


def compiled_schema(schema: Any, param: str, *, is_checked: bool = False) -> Any:
    """The schema as llguidance takes it. Raises InvalidRequest that names the keyword and where it stands.

    param: the field that it came in. is_checked: it is a part of what is known to be a schema. `nullable` of OpenAPI is
    put in JSON schema's own words.
    """
    if isinstance(schema, Mapping) and "x-guidance" in schema:
        raise InvalidRequest("x-guidance can't be set in a schema", param=param)
    try:
        if not is_checked:
            check_schema(schema, param)
        normal = _normalised(schema)
        if (fault := _fault(normal)) is not None:
            raise InvalidRequest(_located(normal, fault), param=param)
    except RecursionError as error:
        raise InvalidRequest("the JSON schema is nested too deeply", param=param) from error
    return _with_white_space(normal)


def misfit(schema: Any, text: str) -> str | None:
    """Why a text is no JSON value that fits the schema; None if it is one."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"it is no JSON: {error}"
    found = jsonschema.exceptions.best_match(_validator(schema)(_normalised(schema)).iter_errors(value))
    return None if found is None else f"{found.message} (at {found.json_path})"


def _validator(schema: Any) -> Any:
    if isinstance(schema, Mapping) and "$schema" in schema:
        return jsonschema.validators.validator_for(schema, default=_DIALECTS[0])
    for dialect in _DIALECTS:
        if dialect(dialect.META_SCHEMA).is_valid(schema):
            return dialect
    return _DIALECTS[0]


def check_schema(schema: Any, param: str) -> None:
    """Raises InvalidRequest if it is no schema."""
    try:
        _validator(schema).check_schema(schema)
    except jsonschema.SchemaError as error:
        where = _pointer(error.absolute_path)
        raise InvalidRequest(f"not a JSON schema: at {where}: {error.message}", param=param) from error


def _normalised(schema: Any) -> Any:
    """Without keywords that say nothing, and with `nullable` in JSON schema's own words."""
    if not isinstance(schema, Mapping):
        return schema
    changed = _changed(schema, _normalised)
    if changed.get("uniqueItems") is False:
        del changed["uniqueItems"]
    if changed.pop("nullable", None) is True:
        kept = {name: changed.pop(name) for name in _DEFINITIONS if name in changed}
        changed = {**kept, "anyOf": [changed, {"type": "null"}]}
    return changed


def _changed(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The schema with each schema directly inside it changed."""
    changed = dict(schema)
    for name, value in schema.items():
        if name in _MAPS and isinstance(value, Mapping):
            changed[name] = {key: change(part) for key, part in value.items()}
        elif name in _LISTS and isinstance(value, list | tuple):
            changed[name] = [change(part) for part in value]
        elif name in _SINGLES:
            changed[name] = change(value)
    return changed


def _with_white_space(schema: Any) -> Any:
    if schema is True:
        schema = {}
    return {**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE}} if isinstance(schema, Mapping) else schema


def _fault(schema: Any) -> str | None:
    """What llguidance has to say against a schema."""
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(_with_white_space(schema)))
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    return messages[0] if is_error else None


def _located(schema: Any, fault: str) -> str:
    """The fault, and the innermost part of the schema that has it by itself; `false` is no fault of its own."""
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema} if schema else {}
    for place, (path, part) in enumerate(_parts(schema, ())):
        if place == _MOST_PLACES:
            break
        if part is False and path:
            continue
        alone = {**definitions, **part} if isinstance(part, Mapping) and path else part
        if (inner := _fault(alone)) is not None:
            return f"the JSON schema can't be enforced: at {_pointer(path)}: {_in_words(inner)}"
    return f"the JSON schema can't be enforced: {_in_words(fault)}"


def _parts(schema: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """All schemas inside a schema with their paths, inner ones first, and itself."""
    if isinstance(schema, Mapping):
        for name, value in schema.items():
            if name in _MAPS and isinstance(value, Mapping):
                for key, part in value.items():
                    yield from _parts(part, (*path, name, key))
            elif name in _LISTS and isinstance(value, list | tuple):
                for index, part in enumerate(value):
                    yield from _parts(part, (*path, name, index))
            elif name in _SINGLES:
                yield from _parts(value, (*path, name))
    yield path, schema


def _in_words(fault: str) -> str:
    prefix = "Unimplemented keys: "
    if fault.startswith(prefix):
        return f"the keyword {', '.join(json.loads(fault.removeprefix(prefix)))} is not supported"
    return " ".join(fault.split())


def _pointer(path: Any) -> str:
    """A place in a schema as a JSON pointer, `/` for the whole."""
    return "/" + "/".join(str(each).replace("~", "~0").replace("/", "~1") for each in path)
