"""JSON schemas: checked and compiled for llguidance, and whether a text matches one."""

from __future__ import annotations

import json
import math
import re
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, lru_cache, partial
from typing import Any
from urllib.parse import quote

import jsonschema
from jsonschema_specifications import REGISTRY
from llguidance import LLMatcher, LLTokenizer

from headrace.errors import InvalidRequest
from headrace.grammar.faults import describe_fault
from headrace.grammar.formats import MOMENTS
from headrace.grammar.patterns import rust_pattern
from headrace.grammar.vocabulary import TokenTable, Vocabulary

WHITE_SPACE = r" |\r?\n[ \t]{0,20}"
"""Between the parts of a JSON text: a space, or a new line and its indentation.

With any white space allowed, some models write spaces without end.
"""

_DIALECTS = (jsonschema.Draft202012Validator, jsonschema.Draft7Validator)
"""Dialects of a schema without `$schema`: the first whose meta-schema it matches."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLES = (
    *("items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"),
    *("contains", "propertyNames", "not", "if", "then", "else"),
)
_BOUNDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
"""Keywords with their signs: with a sign, all are lower bounds."""

_LARGEST = (1 << 63) - (1 << 10)
"""The largest float below what 64 bits hold."""

_DEFINITIONS = ("$schema", "$id", "$defs", "definitions")

_LOCATING_S = 0.5
"""Time limit for locating a fault in the parts of a schema, each of which is compiled separately."""


def compiled_schema(schema: Any, param: str, *, is_checked: bool = False) -> Any:
    """The schema as llguidance takes it. Raises InvalidRequest that names the keyword and its location.

    param: the request field. is_checked: a part of a schema that was checked before. OpenAPI's `nullable` is
    translated.
    """
    if isinstance(schema, Mapping) and "x-guidance" in schema:
        raise InvalidRequest("x-guidance can't be set in a schema", param=param)
    try:
        if not is_checked:
            check_schema(schema, param)
        normal = _with_known_texts(_with_exact_numbers(_normalised(schema), param))
        if (fault := _llguidance_fault(normal)) is not None:
            raise InvalidRequest(_located(normal, fault), param=param)
    except RecursionError as error:
        raise InvalidRequest("the JSON schema is nested too deeply", param=param) from error
    return _with_white_space(normal)


def schema_violation(schema: Any, text: str) -> str | None:
    """Why a text is no JSON value that matches the schema, without quoting either; None if it is one.

    May take time exponential in the schema, and recurse deeply.
    """
    try:
        value = json.loads(text)
    except ValueError:
        return "it is no JSON"
    validator = _bounded(_dialect(schema))(_normalised(schema), registry=REGISTRY)
    found = jsonschema.exceptions.best_match(validator.iter_errors(value))
    return None if found is None else f"it breaks the schema's `{found.validator}`"


@cache
def _bounded(dialect: Any) -> Any:
    """A validator class with bounded regular expressions that fetches no other schemas."""
    changed = {
        "pattern": _check_pattern,
        "patternProperties": _check_pattern_properties,
        "additionalProperties": _check_additional_properties,
    }
    return jsonschema.validators.extend(dialect, changed)


def _check_pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    if isinstance(value, str) and is_found(pattern, value) is False:
        yield jsonschema.ValidationError("the pattern is not found")


def _check_pattern_properties(
    validator: Any, patterns: Mapping[str, Any], value: Any, schema: Any
) -> Iterator[jsonschema.ValidationError]:
    if isinstance(value, Mapping):
        for pattern, part in patterns.items():
            for name, each in value.items():
                if is_found(pattern, name):
                    yield from validator.descend(each, part, path=name, schema_path=pattern)


def _check_additional_properties(
    validator: Any, part: Any, value: Any, schema: Any
) -> Iterator[jsonschema.ValidationError]:
    if isinstance(value, Mapping):
        listed, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        for name, each in value.items():
            if name in listed or any(is_found(pattern, name) for pattern in patterns):
                continue
            if part is False:
                yield jsonschema.ValidationError("a property that the schema does not list")
            else:
                yield from validator.descend(each, part, path=name)


def _dialect(schema: Any) -> Any:
    if isinstance(schema, Mapping) and "$schema" in schema:
        return jsonschema.validators.validator_for(schema, default=_DIALECTS[0])
    return next((dialect for dialect in _DIALECTS if _language_errors(dialect, schema) is None), _DIALECTS[0])


def _language_errors(dialect: Any, schema: Any) -> jsonschema.ValidationError | None:
    language = dialect(dialect.META_SCHEMA, registry=REGISTRY)
    return jsonschema.exceptions.best_match(language.iter_errors(schema))


def check_schema(schema: Any, param: str) -> None:
    """Raise InvalidRequest for an invalid schema."""
    if (error := _language_errors(_dialect(schema), schema)) is not None:
        rule = f"{error.validator} {json.dumps(error.validator_value)}"
        if len(rule) > 100:
            rule = str(error.validator)
        where = _pointer(error.absolute_path)
        raise InvalidRequest(
            f"not a JSON schema: at {where}: it violates the rule `{rule}` of JSON Schema", param=param
        )


def _normalised(schema: Any) -> Any:
    """The schema without meaningless keywords and with `nullable` translated."""
    if not isinstance(schema, Mapping):
        return schema
    changed = _with_subschemas_changed(schema, _normalised)
    if changed.get("uniqueItems") is False:
        del changed["uniqueItems"]
    if isinstance(changed.get("$ref"), str):
        changed["$ref"] = _quoted(changed["$ref"])
    if changed.pop("nullable", None) is True:
        kept = {name: changed.pop(name) for name in _DEFINITIONS if name in changed}
        changed = {**kept, "anyOf": [changed, {"type": "null"}]}
    return changed


def _quoted(reference: str) -> str:
    """A reference with what a URI may not contain percent-encoded: llguidance takes no other."""
    return quote(re.sub("%(?![0-9A-Fa-f]{2})", "%25", reference), safe="!#$%&'()*+,/:;=?@~")


def _with_exact_numbers(schema: Any, param: str) -> Any:
    """The schema with integers as llguidance takes them: floats hold them, and so do 64 bits.

    Bounds become a bit narrower where they must. Raises InvalidRequest where other numbers would have to change.
    """
    for path, part in _parts(schema, ()):
        if isinstance(part, Mapping) and not _can_be_exact(part):
            fault = f"at {_pointer(path)}: a number has too many digits"
            raise InvalidRequest(f"the JSON schema can't be enforced: {fault}", param=param)
    narrowed = _with_narrower_bounds(schema)
    parts = [part for _, part in _parts(narrowed, ())]
    # A bound beside a reference may meet any other: where it leads is not looked up.
    is_joined = any(isinstance(part, Mapping) and "$ref" in part and _BOUNDS.keys() & part.keys() for part in parts)
    return _with_closed_bounds(narrowed, everywhere=_others(parts) if is_joined else None)


def _can_be_exact(part: Mapping[str, Any]) -> bool:
    values = [part.get("const"), part.get("enum"), part.get("multipleOf")]
    bounds = [sign * part[name] for name, sign in _BOUNDS.items() if _is_integer(part.get(name))]
    return all(abs(each) < 1 << 63 and int(float(each)) == each for each in _integers(values)) and all(
        each <= _LARGEST for each in bounds
    )


def _integers(value: Any) -> Iterator[int]:
    if _is_integer(value):
        yield value
    for each in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        yield from _integers(each)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _with_narrower_bounds(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    changed = _with_subschemas_changed(schema, _with_narrower_bounds)
    for name, sign in _BOUNDS.items():
        if _is_integer(changed.get(name)):
            changed[name] = sign * _float_from(max(sign * changed[name], -_LARGEST))
    return changed


def _with_closed_bounds(schema: Any, others: _Others | None = None, everywhere: _Others | None = None) -> Any:
    """The schema without open bounds that llguidance lets through as if they were closed.

    These are whole numbers with less than 1 to another bound away from 0. others: bounds of the whole that this part is
    combined in; None if it is combined with no other. everywhere: bounds that all parts may be combined with.
    """
    if not isinstance(schema, Mapping):
        return schema
    others = everywhere or others or _others([schema])
    combined = {name: schema[name] for name in _COMBINATORS if isinstance(schema.get(name), list | tuple)}
    rest = {name: each for name, each in schema.items() if name not in combined}
    changed = _with_subschemas_changed(rest, partial(_with_closed_bounds, everywhere=everywhere))
    changed |= {
        name: [_with_closed_bounds(each, others, everywhere) for each in parts] for name, parts in combined.items()
    }
    for open_name, name in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if not isinstance(changed.get(open_name), int | float):
            continue
        sign = _BOUNDS[name]
        least = sign * changed[open_name]
        index = bisect_right(others[sign], least)
        gap = others[sign][index] - least if index < len(others[sign]) else 1
        if gap < 1 and least >= 0 and least == int(least):
            # Small beside the gap, and still there in the 15 digits that llguidance reads.
            least += 10.0 ** max(math.floor(math.log10(gap)) - 6, math.floor(math.log10(least or gap)) - 13)
            changed[name] = sign * max(least, sign * changed.get(name, -math.inf * sign))
            del changed[open_name]
    return changed


_Others = Mapping[int, list[float]]
"""For lower bounds (1) the upper ones, for upper ones (-1) the lower ones, each with the sign of the former, sorted."""

_COMBINATORS = ("allOf", "anyOf", "oneOf")


def _others(parts: Iterable[Any]) -> _Others:
    """Of parts and of what they combine."""
    found: dict[int, list[float]] = {1: [], -1: []}
    waiting = list(parts)
    while waiting:
        part = waiting.pop()
        if not isinstance(part, Mapping):
            continue
        for name, sign in _BOUNDS.items():
            if isinstance(part.get(name), int | float):
                found[-sign].append(-sign * part[name])
        for name in _COMBINATORS:
            waiting += part[name] if isinstance(part.get(name), list | tuple) else ()
    return {sign: sorted(bounds) for sign, bounds in found.items()}


def _with_known_texts(schema: Any) -> Any:
    """The schema with patterns as Rust reads them, and with moments as patterns: llguidance knows no leap years."""
    if not isinstance(schema, Mapping):
        return schema
    changed = _with_subschemas_changed(schema, _with_known_texts)
    if isinstance(changed.get("pattern"), str):
        changed["pattern"] = rust_pattern(changed["pattern"])
    if isinstance(changed.get("patternProperties"), Mapping):
        given = changed["patternProperties"]
        patterns = {pattern: rust_pattern(pattern) for pattern in given}
        if len(set(patterns.values())) == len(patterns):
            changed["patternProperties"] = {patterns[pattern]: part for pattern, part in given.items()}
    moment = MOMENTS.get(changed["format"]) if isinstance(changed.get("format"), str) else None
    if moment is not None:
        del changed["format"]
        pattern = {"pattern": f"^{moment}$"}
        changed |= {"allOf": [*changed.get("allOf", ()), pattern]} if "pattern" in changed else pattern
    return changed


def _float_from(number: int) -> int:
    """The least integer from this one on that a float holds."""
    nearest = float(number)
    return int(nearest if nearest >= number else math.nextafter(nearest, math.inf))


def _with_subschemas_changed(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
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


def _llguidance_fault(schema: Any) -> str | None:
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(_with_white_space(schema)))
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    return messages[0] if is_error else None


def _located(schema: Any, fault: str) -> str:
    """The fault, and the innermost subschema that has it alone; `false` counts as valid."""
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema} if schema else {}
    deadline = time.monotonic() + _LOCATING_S
    for path, part in _parts(schema, ()):
        if time.monotonic() > deadline:
            break
        if part is False and path:
            continue
        alone = {**definitions, **part} if isinstance(part, Mapping) and path else part
        if (inner := _llguidance_fault(alone)) is not None:
            return f"the JSON schema can't be enforced: at {_pointer(path)}: {describe_fault(inner)}"
    return f"the JSON schema can't be enforced: {describe_fault(fault)}"


def _parts(schema: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """All subschemas with their paths, inner ones first, and the schema itself."""
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


def _pointer(path: Any) -> str:
    """A path in a schema as a JSON pointer, `/` for the whole."""
    return "/" + "/".join(str(each).replace("~", "~0").replace("/", "~1") for each in path)


def is_found(pattern: str, text: str) -> bool | None:
    """Whether a schema's `pattern` is found in a text; None for a pattern that grammars don't support."""
    compiled = _compiled(pattern)
    if compiled.is_error():
        return None
    matcher = compiled.deep_copy()
    # llguidance's strings have DEL only as an escape
    quoted = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F").encode()
    return matcher.try_consume_tokens(list(quoted)) == len(quoted) and bool(matcher.is_accepting())


@lru_cache(128)
def _compiled(pattern: str) -> LLMatcher:
    schema = {"type": "string", "pattern": rust_pattern(pattern)}
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return LLMatcher(_byte_vocabulary(), grammar, log_level=0)


@cache
def _byte_vocabulary() -> LLTokenizer:
    return Vocabulary(TokenTable(tuple(bytes([byte]) for byte in range(256)), frozenset(), {})).compiled
