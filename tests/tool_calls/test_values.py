"""Values become JSON of the type that the schema asks for, and nothing is invented."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from headrace.tool_calls.literals import GEMMA, JSON, PYTHON, Spelling, convert, parsed_literal
from headrace.tool_calls.schema import References, Schema

NULLABLE_TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}
POINT = {"$ref": "#/$defs/point"}


def schema(part: Any) -> Schema:
    point = {"type": "object", "properties": {"x": {"type": "string"}}}
    return Schema(part, References({"$defs": {"point": point, "a/b": {"type": "null"}}}))


@pytest.mark.parametrize(
    ("text", "part", "expected"),
    [
        ("0042", {"type": "string"}, "0042"),
        ("null", {"type": "string"}, "null"),
        ("true", {"type": "string"}, "true"),
        ("null", NULLABLE_TEXT, None),
        ("None", NULLABLE_TEXT, None),
        ("nullable", NULLABLE_TEXT, "nullable"),
        ("None", {"type": ["integer", "null"]}, None),
        ("5", {"type": "string", "nullable": True}, "5"),
        ("null", {"type": "string", "nullable": True}, None),
        (" 12 ", {"type": "integer"}, 12),
        ('"12"', {"type": "integer"}, 12),
        ("007", {"type": "integer"}, 7),
        ("1_000", {"type": "integer"}, 1000),
        ("2.0", {"type": "integer"}, 2),
        ("9007199254740993", {"type": "integer"}, 9007199254740993),
        ("1e3", {"type": "number"}, 1000.0),
        (".5", {"type": "number"}, 0.5),
        ("True", {"type": "boolean"}, True),
        ("FALSE", {"type": "boolean"}, False),
        ("7", {"enum": [7, 8]}, 7),
        ("7", {"enum": ["7", "8"]}, "7"),
        ("7", {"const": "7"}, "7"),
        ("[1]", {"items": {"type": "string"}}, ["1"]),
        ("['a', True]", {"type": "array"}, ["a", True]),
        ('{"x": 1}', POINT, {"x": "1"}),
        ('{"x": 1}', {"anyOf": [POINT, {"type": "string"}]}, {"x": "1"}),
        ("{x", {"anyOf": [POINT, {"type": "string"}]}, "{x"),
        ("null", {"$ref": "#/$defs/a~1b"}, None),
        ("5", {"type": ["integer", "string"]}, 5),
        ("05", {"type": ["integer", "string"]}, "05"),
        ("12", {"allOf": [{"type": "string"}, {"minLength": 1}]}, "12"),
        ("012", {"allOf": [{"type": ["integer", "null"]}, {"minimum": 3}]}, 12),
        ("5", {"allOf": [{"type": "number"}, {"type": "integer"}]}, 5),
        ("null", {"$ref": "#/$defs/a~1b", "description": "nothing"}, None),
        ("x", {"type": "strng"}, "x"),
        ("7", {"type": [["string"], "integer"]}, 7),
        ("x", {}, "x"),
        ("[1]", {}, [1]),
        ("1.5", {}, 1.5),
        (" x ", {}, " x "),
    ],
)
def test_bare_text_becomes_what_the_schema_takes(text: str, part: Any, expected: Any) -> None:
    converted = convert(text, schema(part))
    assert converted is not None
    value = json.loads(converted)
    assert (type(value), value) == (type(expected), expected)


TYPED = {"s": {"type": "string"}, "i": {"type": "integer"}}


@pytest.mark.parametrize(
    ("reference", "definitions"),
    [
        ("#x", {"a": TYPED["i"], "b": {"$anchor": "x", "type": "string"}}),
        ("#x", {"a": TYPED["i"], "b": {"allOf": [{}, {"properties": {"const": {"$anchor": "x", "type": "string"}}}]}}),
        ("#x", {"a": {"enum": [{"$anchor": "x", "type": "integer"}]}, "b": {"$anchor": "x", "type": "string"}}),
        ("#x", {"a": {"$id": "p.json", "$anchor": "x", **TYPED["i"]}, "b": {"$anchor": "x", "type": "string"}}),
        ("p.json#x", {"a": {"$anchor": "x", **TYPED["i"]}, "b": {"$id": "p.json", "$anchor": "x", **TYPED["s"]}}),
        ("p.json", {"b": {"$id": "p.json", "type": "string"}}),
        ("p.json#/$defs/s", {"b": {"$id": "https://example.org/p.json", "$defs": TYPED}, "s": TYPED["i"]}),
        ("https://example.org/tool#/$defs/s", TYPED),
        ("tool#/$defs/s", TYPED),
        ("#/$defs/a%20b", {"a b": {"type": "string"}}),
        ("#/$defs/a%2Fb", {"a/b": {"type": "integer"}, "a": {"b": {"type": "string"}}}),
        ("#/$defs/a%7E1b", {"a/b": {"type": "string"}}),
        ("#/$defs/%25", {"%": {"type": "string"}, "%25": {"type": "integer"}}),
        ("#/$defs/b/anyOf/1", {"b": {"anyOf": [TYPED["i"], TYPED["s"]]}}),
        ("#/$defs/b/anyOf/0", {"b": {"anyOf": [TYPED["i"], TYPED["s"]]}}),
    ],
)
def test_references_of_every_form_lead_where_jsonschema_goes(reference: str, definitions: dict[str, Any]) -> None:
    # The whole itself is an object, which neither value is.
    root = {"$id": "https://example.org/tool", "type": "object", "$defs": definitions}
    checked = jsonschema.Draft202012Validator({"$id": root["$id"], "$ref": reference, "$defs": definitions})
    (expected,) = (value for value in ("12", 12) if checked.is_valid(value))
    converted = convert("12", Schema({"$ref": reference}, References(root)))
    assert converted is not None
    assert json.loads(converted) == expected


@pytest.mark.parametrize(
    "reference",
    ["#nowhere", "http://[x", "http://[x#a", "other.json", "https://example.org/other#/$defs/a", "#/$defs/b", "#/a/9"],
)
def test_a_reference_that_leads_nowhere_allows_anything(reference: str) -> None:
    root = {"type": "object", "required": ["x"], "$defs": {"a": {"type": "null"}}, "a": [{"type": "null"}]}
    assert Schema({"$ref": reference}, References(root)).types is None


def test_a_schema_is_searched_once_for_all_of_its_anchors() -> None:
    class Watched(dict[str, Any]):
        num_walks = 0

        def items(self) -> Any:
            self.num_walks += 1
            return super().items()

    watched = Watched(type="null")
    definitions = {str(number): {"$anchor": f"a{number}", "type": ["string", "null"]} for number in range(100)}
    part = {"allOf": [{"$ref": f"#a{number}"} for number in range(100)]}
    assert Schema(part, References({"$defs": definitions, "properties": {"x": watched}})).types == {"string", "null"}
    assert watched.num_walks == 1


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("twelve", {"type": "integer"}),
        ("2.5", {"type": "integer"}),
        ("", {"type": "number"}),
        ("yes", {"type": "boolean"}),
        ("null", {"type": "integer"}),
        ("[1,", {"type": "array"}),
        ("a, b", {"type": "array"}),
        ("[1] 2", {"type": "array"}),
        ("[]", {"type": "object"}),
    ],
)
def test_text_of_no_wanted_type_is_not_converted(text: str, part: Any) -> None:
    assert convert(text, schema(part)) is None


@pytest.mark.parametrize(
    ("spelling", "text", "expected"),
    [
        (JSON, '{"a": [1, -2.5e3, true, null, "x"]}', {"a": [1, -2500.0, True, None, "x"]}),
        (JSON, '{"a": 1,}', {"a": 1}),
        (JSON, "[True, None]", [True, None]),
        (JSON, '"line\nnext\ttab"', "line\nnext\ttab"),
        (JSON, r'"\d+ C:\dir \u00e9 \ud83d\ude00 \"q\""', '\\d+ C:\\dir é 😀 "q"'),
        (JSON, r'"\u12 and more"', "\\u12 and more"),
        (PYTHON, r"""['it\'s', "\x41\u00e9\U0001f600\n", '''a'b''']""", ["it's", "Aé😀\n", "a'b"]),
        (PYTHON, "{'k': (1, .5, 1_0), 'e': ''}", {"k": [1, 0.5, 10], "e": ""}),
        (PYTHON, "[true, null]", [True, None]),
        (
            GEMMA,
            '{a:<|"|>x "y" \\n<|"|>,b:[1,true],<|"|>c d<|"|>:{e:null}}',
            {"a": 'x "y" \\n', "b": [1, True], "c d": {"e": None}},
        ),
        (GEMMA, "{a:New York, b: 3}", {"a": "New York", "b": 3}),
    ],
)
def test_values_are_read_in_every_spelling(spelling: Spelling, text: str, expected: Any) -> None:
    parsed = parsed_literal(text, spelling=spelling)
    assert parsed is not None
    assert json.loads(parsed) == expected


@pytest.mark.parametrize(
    ("spelling", "text"),
    [
        (JSON, '{"a": }'),
        (JSON, '{"a": ,}'),
        (JSON, '{"a" 1}'),
        (JSON, '{"a": 1 "b": 2}'),
        (JSON, "{a: 1}"),
        (JSON, "[1, , 2]"),
        (JSON, "[01]"),
        (JSON, "NaN"),
        (JSON, '"open'),
        (JSON, "[" * 2000 + "]" * 2000),
        (JSON, "[1"),
        (JSON, "[1]]"),
        (PYTHON, "f(x)"),
        (PYTHON, "'a' 'b'"),
        (GEMMA, "{a:}"),
        (GEMMA, "{a:1"),
    ],
)
def test_what_would_need_guessing_is_no_value(spelling: Spelling, text: str) -> None:
    assert parsed_literal(text, spelling=spelling) is None


@pytest.mark.parametrize(
    ("text", "part", "expected"),
    [
        ('{"x": 4711}', POINT, {"x": "4711"}),
        ('{"x": null}', POINT, {"x": None}),
        ('["12", "x"]', {"type": "array", "items": {"type": "integer"}}, [12, "x"]),
        ('{"a": "[1]"}', {"properties": {"a": {"type": "array"}}}, {"a": [1]}),
        (
            '{"a": "true", "b": true}',
            {"properties": {"a": {"type": "boolean"}, "b": {"type": "string"}}},
            {"a": True, "b": "true"},
        ),
        ('{"a": 1}', {"additionalProperties": {"type": "string"}}, {"a": "1"}),
        ('{"a": "12"}', {"properties": {"a": {"minimum": 3}}}, {"a": 12}),
    ],
)
def test_json_of_another_type_is_converted_where_nothing_is_lost(text: str, part: Any, expected: Any) -> None:
    parsed = parsed_literal(text, schema(part))
    assert parsed is not None
    assert json.loads(parsed) == expected


def test_references_that_lead_in_a_circle_come_to_any_type() -> None:
    circle = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    assert Schema({"$ref": "#/$defs/a"}, References(circle)).types is None
    assert Schema({"$ref": "elsewhere.json"}, References(circle)).types is None
    assert Schema(True).types is None


def test_references_in_many_circles_are_each_followed_once() -> None:
    names = [f"#/$defs/{number}" for number in range(30)]
    circles = {"anyOf": [{"$ref": name} for name in names] + [{"type": ["string", "made up"]}]}
    assert Schema(circles, References({"$defs": {str(number): circles for number in range(30)}})).types == {"string"}
