"""What a model that knows nothing writes under a JSON schema fits it, as jsonschema sees it."""

from __future__ import annotations

import functools
import ipaddress
import json
import re
import uuid
from collections.abc import Callable
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from grammar.random_answers import random_answer
from grammar.schemas import SCHEMAS

import headrace
from headrace.errors import InvalidRequest
from headrace.grammar.compile import OutputForm, compile_output
from headrace.grammar.factory import ConstraintFactory
from headrace.grammar.schema import compiled_schema, schema_violation
from headrace.grammar.vocabulary import Vocabulary
from headrace.text.tokenizer import Tokenizer
from headrace.types.chat import Structure
from headrace.types.request import ConstraintSpec

MINIATURE = Path(headrace.__file__).parent / "miniature"
STOP = 4072
SEEDS = range(5)

FORMATS: dict[str, Callable[[str], object]] = {
    "date": date.fromisoformat,
    "time": lambda text: time.fromisoformat(_second(text)),
    "date-time": lambda text: datetime.fromisoformat(_second(text)),
    "duration": lambda text: _matches(r"P(?=.)(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=.)(\d+H)?(\d+M)?(\d+S)?)?)", text),
    "email": lambda text: _matches(r"[^@\s]+@[^@\s]+", text),
    "hostname": lambda text: _matches(r"[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*", text),
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
    "uri": lambda text: _matches(r"[A-Za-z][A-Za-z0-9+.-]*:[!-~]*", text),
}


def _matches(pattern: str, text: str) -> None:
    assert re.fullmatch(pattern, text), text


def _second(text: str) -> str:
    """A leap second as the one before it, which Python does not know, and no more digits than it takes."""
    return re.sub(r"(\.\d{6})\d+", r"\1", re.sub(r":60", ":59", text)).upper()


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MINIATURE)


@functools.cache
def factory() -> ConstraintFactory:
    return ConstraintFactory(Vocabulary(tokenizer()))


def answers(structure: Structure) -> list[str]:
    spec = ConstraintSpec(compile_output(OutputForm(structure, None, None, None), factory().vocabulary).grammar)
    stops = frozenset({STOP})
    return [tokenizer().decode(random_answer(factory().begin(spec, stops), tokenizer(), STOP, seed)) for seed in SEEDS]


def openapi_free(schema: Any) -> Any:
    """`nullable` as a union, written here once more."""
    if isinstance(schema, list):
        return [openapi_free(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    rest = {name: openapi_free(value) for name, value in schema.items() if name != "nullable"}
    return {"anyOf": [rest, {"type": "null"}]} if schema.get("nullable") is True else rest


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_answer_fits_its_schema(name: str) -> None:
    schema = SCHEMAS[name]
    for text in answers(Structure("json_schema", schema)):
        value = json.loads(text)
        jsonschema.validate(value, openapi_free(schema))
        if isinstance(schema, dict) and "format" in schema:
            FORMATS[schema["format"]](value)
        assert schema_violation(schema, text) is None


def test_any_object_is_an_object() -> None:
    assert all(isinstance(json.loads(text), dict) for text in answers(Structure("json_object")))


def test_objects_keep_the_order_of_their_properties() -> None:
    for text in answers(Structure("json_schema", SCHEMAS["an order"])):
        assert list(json.loads(text)) == ["id", "lines", "paid", "total"]


REFUSED: dict[str, tuple[Any, str, str]] = {
    "not": ({"properties": {"a": {"not": {"type": "string"}}}}, "not", "/properties/a"),
    "if": ({"if": {"type": "string"}, "then": {"minLength": 1}}, "if", "/"),
    "uniqueItems": ({"items": {"type": "array", "uniqueItems": True}}, "uniqueItems", "/items"),
    "contains": ({"anyOf": [{}, {"type": "array", "contains": {}}]}, "contains", "/anyOf/1"),
    "propertyNames": ({"propertyNames": {"pattern": "a"}}, "propertyNames", "/"),
    "dependentRequired": ({"dependentRequired": {"a": ["b"]}}, "dependentRequired", "/"),
    "dependentSchemas": ({"dependentSchemas": {"a": {}}}, "dependentSchemas", "/"),
    "unevaluatedProperties": ({"unevaluatedProperties": False}, "unevaluatedProperties", "/"),
    "unevaluatedItems": ({"unevaluatedItems": False}, "unevaluatedItems", "/"),
    "$dynamicRef": ({"$dynamicRef": "#a"}, "$dynamicRef", "/"),
    "a format": (
        {"$defs": {"a~b": {"type": "string", "format": "iri"}}, "$ref": "#/$defs/a~b"},
        "format",
        "/$defs/a~0b",
    ),
    "a look-ahead": ({"properties": {"a/b": {"type": "string", "pattern": "(?=a)"}}}, "look-ahead", "/properties/a~1b"),
    "oneOf that may overlap": ({"oneOf": [{"minLength": 3}, {"maxLength": 5}]}, "oneOf", "/"),
    "counted optional ones": ({"properties": {"a": {}}, "minProperties": 2}, "maxProperties", "/"),
    "overlapping patterns": (
        {"patternProperties": {"^a": {"type": "null"}, "b$": {"type": "string"}}},
        "disjoint",
        "/",
    ),
    "a remote reference": ({"items": {"$ref": "https://example.org/a"}}, "out of the schema", "/items"),
    "no such definition": ({"items": {"$ref": "#/$defs/a"}}, "leads nowhere", "/items"),
    "nothing fits": (
        {"type": "array", "items": {"type": "integer", "minimum": 5, "maximum": 3}, "minItems": 1},
        "maximum",
        "/",
    ),
    "false": (False, "false", "/"),
    "an id that no float holds": (
        {"properties": {"id": {"enum": [1, 1234567890123456789]}}},
        "digits",
        "/properties/id",
    ),
    "such a number inside of a const": ({"const": {"a": [2**53 + 1]}}, "digits", "/"),
    "a const beyond 64 bits": ({"const": -(2**63)}, "digits", "/"),
    "a lower bound beyond 64 bits": ({"type": "integer", "minimum": 2**63}, "digits", "/"),
    "an upper bound beyond 64 bits": ({"type": "integer", "exclusiveMaximum": -(2**70)}, "digits", "/"),
    "a factor that no float holds": ({"type": "integer", "multipleOf": 2**53 + 1}, "digits", "/"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused_by_keyword_and_place(name: str) -> None:
    schema, keyword, place = REFUSED[name]
    with pytest.raises(InvalidRequest) as refused:
        compiled_schema(schema, "response_format")
    assert refused.value.param == "response_format"
    assert keyword in refused.value.message
    assert f"at {place}" in refused.value.message


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"type": "strin"}}}, "/properties/a/type"),
        ({"required": "a"}, "/required"),
        ({"items": {"minLength": -1}}, "/items/minLength"),
        ({"type": "integer", "exclusiveMinimum": True}, "/exclusiveMinimum"),
    ],
)
def test_what_is_no_schema_is_refused_with_its_place(schema: Any, place: str) -> None:
    with pytest.raises(InvalidRequest, match=f"not a JSON schema: at {place}:"):
        compiled_schema(schema, "response_format")


def test_a_schema_that_is_nested_without_end_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(20_000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        compiled_schema(schema, "response_format")


def test_settings_of_the_compiler_cannot_be_slipped_in() -> None:
    with pytest.raises(InvalidRequest, match="x-guidance"):
        compiled_schema({"not": {}, "x-guidance": {"lenient": True}}, "response_format")


def test_white_space_comes_to_an_end() -> None:
    spec = ConstraintSpec(
        compile_output(OutputForm(Structure("json_object"), None, None, None), factory().vocabulary).grammar
    )
    constraint = factory().begin(spec, frozenset({STOP}))
    constraint.accept(tokenizer().encode("{\n" + 20 * " "))
    assert constraint.window(tokenizer().encode('"a"')).num_legal > 0
    assert constraint.window(tokenizer().encode(" ")).num_legal == 0


@pytest.mark.parametrize(
    ("text", "word"),
    [('{"a": 1', "JSON"), ('{"a": "x"}', "type"), ("{}", "required"), ('{"a": 1} and more', "JSON")],
)
def test_a_text_that_does_not_fit_is_found_out(text: str, word: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    reason = schema_violation(schema, text)
    assert reason is not None
    assert word in reason
