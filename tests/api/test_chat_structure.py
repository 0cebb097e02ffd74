"""The form that a chat's answer must have, as bodies say it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.api.openai_chat import read_chat_completion
from headrace.errors import InvalidRequest, UnsupportedField
from headrace.types.chat import ChatRequest, Structure
from headrace.types.model import ModelTraits

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
NAMED = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}


def read(**fields: Any) -> ChatRequest:
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}], **fields}).encode()
    return read_chat_completion(body, ModelTraits()).request


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Structure("json_object")),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, Structure("json_schema", SCHEMA)),
        ({"response_format": NAMED}, Structure("json_schema", SCHEMA)),
        ({"structured_outputs": {"json": SCHEMA}}, Structure("json_schema", SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Structure("json_schema", SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, Structure("json_object")),
        ({"structured_outputs": {"regex": "a+"}}, Structure("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Structure("choice", ("a", "b"))),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Structure("grammar", 'start: "a"')),
        ({"structured_outputs": {}}, None),
        ({"guided_json": True}, Structure("json_schema", True)),
        ({"guided_json": "{}"}, Structure("json_schema", {})),
        ({"guided_regex": "a+"}, Structure("regex", "a+")),
        ({"guided_choice": ["a"]}, Structure("choice", ("a",))),
        ({"guided_grammar": 'start: "a"'}, Structure("grammar", 'start: "a"')),
    ],
)
def test_each_way_of_saying_it_comes_to_one_form(fields: dict[str, Any], expected: Structure | None) -> None:
    assert read(**fields).structure == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_choice": "ab"}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"response_format": NAMED, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs.grammar"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_path(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"response_format": NAMED}, "response_format"),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"guided_json": SCHEMA}, "guided_json"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"guided_grammar": "start: x"}, "guided_grammar"),
    ],
)
def test_a_form_knows_the_field_that_said_it(fields: dict[str, Any], path: str) -> None:
    structure = read(**fields).structure
    assert structure is not None
    assert structure.path == path


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
    ],
)
def test_other_forms_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedField) as caught:
        read(**fields)
    assert caught.value.param == param


LARK = 'start: "yes"'


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"guided_grammar": LARK, "structured_outputs": {"grammar": LARK}}, Structure("grammar", LARK)),
        ({"guided_json": SCHEMA, "structured_outputs": {"json": json.dumps(SCHEMA)}}, Structure("json_schema", SCHEMA)),
        ({"response_format": NAMED, "guided_json": SCHEMA}, Structure("json_schema", SCHEMA)),
        ({"guided_choice": ["a", "b"], "structured_outputs": {"choice": ["a", "b"]}}, Structure("choice", ("a", "b"))),
    ],
)
def test_the_same_form_in_several_fields_is_one_form(fields: dict[str, Any], expected: Structure) -> None:
    assert read(**fields).structure == expected


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"const": 1}, {"const": True}),
        ({"properties": {"a": True, "b": True}}, {"properties": {"b": True, "a": True}}),
    ],
)
def test_forms_that_only_python_takes_for_equal_are_refused(first: Any, second: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(guided_json=second, structured_outputs={"json": first})
    assert refused.value.param == "guided_json"


def test_a_budget_for_thinking_is_read() -> None:
    assert read(thinking_token_budget=0).thinking_budget == 0
    assert read().thinking_budget is None
