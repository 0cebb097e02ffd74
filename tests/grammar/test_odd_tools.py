"""Badly written tools: a call fits the schema all the same, or the tool is refused by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
from grammar.call_answers import (
    ByteTokenizer,
    begun,
    guarantees_of,
    made,
    parsed,
    random_output,
    takes_whole,
    ways_out_of,
)
from grammar.schemas import closed

from headrace.errors import InvalidRequest
from headrace.grammar.compile import AllowedCalls, OutputForm, compile_output
from headrace.types.chat import ToolDefinition

INTEGER = {"type": "integer"}
SMALL = {"type": "integer", "maximum": 5}
PAIRS = {"type": "array", "items": {"type": "array", "items": INTEGER, "maxItems": 2}, "maxItems": 2}
TWO = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}}
A, B = ({"type": "object", "properties": {name: INTEGER}, "required": [name]} for name in "ab")

SCHEMAS: Mapping[str, dict[str, Any]] = {
    "nothing": {},
    "no properties": {"type": "object"},
    "whole by reference": {"$ref": "#/$defs/A", "$defs": {"A": closed({"x": INTEGER}, ["x"])}},
    "others allowed": {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": INTEGER},
    "required and not listed": {"type": "object", "properties": {"a": INTEGER}, "required": ["a", "b"]},
    "required and none listed": {"type": "object", "required": ["b"]},
    "one of several objects": {"type": "object", "anyOf": [A, B]},
    "one of several requirements": {**A, "required": [], "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "objects that exclude each other": {"oneOf": [closed({"k": {"const": "x"}}, ["k"]), closed({"n": INTEGER}, ["n"])]},
    "several objects at once": {"allOf": [A, B]},
    "a pattern for a listed name": {**A, "patternProperties": {"^a": {"maximum": 3}}},
    "an object or null": {**A, "type": ["object", "null"]},
    "Unicode in enums": {**A, "properties": {"a": {"enum": ["größe", "日本", 'a"b', "x\\y", "😀"]}}},
    "white space in enums": {**A, "properties": {"a": {"type": "string", "enum": ["", " ", "\n"]}}},
    "several types in enums": {**A, "properties": {"a": {"enum": ["1", 1, None, True, "null", "x"]}}},
    "constants": {**A, "properties": {"a": {"const": "fix"}, "b": {"const": {"a": [1]}}}},
    "arrays in arrays": {
        **A,
        "properties": {
            "a": {"type": "array", "items": {"type": "array", "items": INTEGER, "maxItems": 2}, "maxItems": 2}
        },
    },
    "anything": {**A, "properties": {"a": {}, "b": True, "c": False}},
    "odd keys": {"type": "object", "properties": {"a b": INTEGER, "x.y": INTEGER, "ü": INTEGER}, "required": ["ü"]},
    "itself by reference": {
        "$ref": "#/$defs/n",
        "$defs": {"n": closed({"v": INTEGER, "kids": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}}, ["v"])},
    },
    "itself inside": closed({"v": INTEGER, "kid": {"$ref": "#"}}, ["v"]),
    "a sibling's schema": {
        **A,
        "properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "integer", "maximum": 3}},
    },
    "a text or a small number": {
        **A,
        "properties": {"a": {"anyOf": [{"enum": ["12", "no"]}, SMALL]}},
    },
    "a text or an object": {**A, "properties": {"a": {"anyOf": [{"type": "string"}, closed({"q": INTEGER}, ["q"])]}}},
    "a text of two parts": {**A, "properties": {"a": {"allOf": [{"type": "string"}, {"pattern": "^[0-9]{2}$"}]}}},
    "a reference and more": {
        **A,
        "properties": {"a": {"allOf": [{"$ref": "#/$defs/C"}], "default": "red"}},
        "$defs": {"C": {"enum": ["red", "blue"]}},
    },
    "a number of two parts": {**A, "properties": {"a": {"allOf": [INTEGER, {"minimum": 3}]}}},
    "a reference by anchor": {**A, "properties": {"a": {"$ref": "#c"}}, "$defs": {"C": {"$anchor": "c", "const": 5}}},
    "a reference by an anchor in a list": {
        **A,
        "properties": {"a": {"anyOf": [{"$anchor": "c", "enum": ["red", "blue"]}, {"const": 1}]}, "b": {"$ref": "#c"}},
        "required": ["a", "b"],
    },
    "a reference by an anchor of draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **A,
        "properties": {"a": {"$ref": "#c"}},
        "definitions": {"C": {"$id": "#c", "const": 5}},
    },
    "a reference in percent": {**A, "properties": {"a": {"$ref": "#/$defs/a%20b"}}, "$defs": {"a b": {"const": "ok"}}},
    "a reference not in percent": {
        **A,
        "properties": {"a": {"$ref": "#/$defs/100% é"}},
        "$defs": {"100% é": {"const": "ok"}},
    },
    "a reference into a list": {
        **A,
        "properties": {"a": {"$ref": "#/$defs/C/anyOf/1"}},
        "$defs": {"C": {"anyOf": [INTEGER, {"const": "ok"}]}},
    },
    "a reference by the whole's address": {
        "$id": "https://example.org/tools/odd",
        **A,
        "properties": {"a": {"$ref": "odd#/$defs/C"}},
        "$defs": {"C": {"const": "ok"}},
    },
    "a reference by a part's address": {
        **A,
        "properties": {"a": {"$ref": "part.json"}},
        "$defs": {"C": {"$id": "part.json", "const": "ok"}},
    },
    "sixty": {"type": "object", "properties": {f"p{i}": INTEGER for i in range(60)}, "required": ["p0", "p59"]},
}
SYNTAXES = ("qwen_xml", "hermes")


def form_of(name: str, schema: Mapping[str, Any], syntax: str, *, strict: bool = True) -> OutputForm:
    tool = ToolDefinition(name, None, schema, strict=strict)
    return OutputForm(None, AllowedCalls((tool,), is_required=True, is_parallel=False), syntax, None)


@pytest.mark.parametrize("syntax", SYNTAXES)
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_call_of_an_odd_tool_fits_its_schema(name: str, syntax: str) -> None:
    form = form_of("odd", SCHEMAS[name], syntax)
    for seed in range(2):
        output = random_output(begun(form), ByteTokenizer(()), ways_out_of(syntax), seed)
        text, calls = parsed(syntax, output, form.calls.tools if form.calls is not None else ())
        assert len(calls) == 1, output
        assert not text.strip()
        jsonschema.validate(calls[0][1], SCHEMAS[name])


LIMITED: Mapping[str, dict[str, Any]] = {
    "up to 1000": {"type": "string", "maxLength": 1000},
    "at least 1": {"type": "string", "minLength": 1},
    "1 to 100": {"type": "string", "minLength": 1, "maxLength": 100},
    "5 to 8": {"type": "string", "minLength": 5, "maxLength": 8},
    "300 and more": {"type": "string", "minLength": 300},
    "a pattern up to 500": {"type": "string", "pattern": "x", "maxLength": 500},
    "long, or a list": {"anyOf": [{"type": "string", "maxLength": 1000}, {"type": "array", "items": {"maxLength": 3}}]},
    "long, or a small number": {"anyOf": [{"type": "string", "maxLength": 1000}, SMALL]},
}
HALVES = ["</parameter", "\n</parameter", "</arg_value", "<", "</b>", "\n", "[", '"', "<parameter=b>\n", "</parameter>"]


@pytest.mark.parametrize("special", [(), ("</parameter>", "</arg_value>")])
@pytest.mark.parametrize("syntax", ["qwen_xml", "glm", "seed_oss"])
@pytest.mark.parametrize("name", LIMITED)
def test_limits_of_a_text_hold_where_it_says_half_of_what_would_end_it(
    name: str, syntax: str, special: tuple[str, ...]
) -> None:
    schema = closed({"a": LIMITED[name], "b": INTEGER}, ["a"])
    form = form_of("odd", schema, syntax)
    guarantees = guarantees_of(form, special)
    assert form.calls is not None
    for seed in range(2):
        output = random_output(begun(form, special), ByteTokenizer(special), ways_out_of(syntax), seed, pieces=HALVES)
        ((_, arguments),) = parsed(syntax, output, form.calls.tools, guarantees)[1]
        jsonschema.validate(arguments, schema)


def test_markup_may_stand_in_a_long_text() -> None:
    for limits in ({"maxLength": 4000}, {"minLength": 1, "maxLength": 4000}):
        constraint = begun(form_of("odd", closed({"a": {"type": "string", **limits}}, ["a"]), "qwen_xml"))
        for text in ("<p>a <b>b</b>\n</p>\n</", "x</parameter", "x < y"):
            call = "<tool_call>\n<function=odd>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
            assert takes_whole(constraint, call.format(text))


def test_values_that_have_the_closing_tag_in_them_are_left_out() -> None:
    choices = ["x</parameter>y", "z"]
    constraint = begun(form_of("odd", closed({"a": {"enum": choices}}, ["a"]), "qwen_xml"))
    call = "<tool_call>\n<function=odd>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    assert [takes_whole(constraint, call.format(each)) for each in choices] == [False, True]
    with pytest.raises(InvalidRequest, match="odd.*the argument a"):
        begun(form_of("odd", closed({"a": {"enum": choices[:1]}}, ["a"]), "qwen_xml"))


def test_each_kind_of_value_can_be_written_where_a_text_may_stand_too() -> None:
    choices = {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer", "maximum": 50}, {"type": "null"}]}
    schema = {**A, "properties": {"a": choices}}
    form = form_of("odd", schema, "qwen_xml")
    constraint = begun(form)
    call = "<tool_call>\n<function=odd>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    for written, value in (("abc", "abc"), ("17", 17), ("null", None), ("{}", "{}"), ("-40000", -40000)):
        assert takes_whole(constraint, call.format(written))
        assert form.calls is not None
        assert parsed("qwen_xml", call.format(written), form.calls.tools)[1] == [("odd", {"a": value})]
    for written in ("99", "abcd", " 51"):
        assert not takes_whole(constraint, call.format(written))


@pytest.mark.parametrize(
    ("schema", "syntax", "word"),
    [
        ({"type": "array", "items": INTEGER}, "hermes", "no object"),
        ({"type": "string"}, "qwen_xml", "no object"),
        ({**A, "not": {"required": ["b"]}}, "hermes", "at /: the keyword not"),
        ({**A, "not": {"required": ["b"]}}, "qwen_xml", "at /: the keyword not"),
        ({**A, "dependentRequired": {"a": ["b"]}}, "qwen_xml", "dependentRequired"),
        ({**A, "propertyNames": {"maxLength": 2}}, "qwen_xml", "propertyNames"),
        (
            {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "minProperties": 1},
            "qwen_xml",
            "minProperties",
        ),
        (
            {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "maxProperties": 1},
            "qwen_xml",
            "maxProperties",
        ),
        ({"type": "object", "properties": {"a>b": INTEGER}, "required": ["a>b"]}, "qwen_xml", "can be written"),
        (
            {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]},
            "qwen_xml",
            "can be written",
        ),
        ({"type": "object", "properties": {"a-b": INTEGER}, "required": ["a-b"]}, "pythonic", "can be written"),
    ],
)
def test_a_strict_tool_that_nothing_can_be_held_to_is_refused(schema: dict[str, Any], syntax: str, word: str) -> None:
    with pytest.raises(InvalidRequest, match=f"the tool odd: .*{word}") as refused:
        compile_output(form_of("odd", schema, syntax), made(()).vocabulary)
    assert refused.value.param == "tools"


MALFORMED: Mapping[str, dict[str, Any]] = {
    "a type that there is not": {**A, "properties": {"a": {"type": "strng"}}},
    "types in types": {**A, "properties": {"a": {"type": [["string"]]}}},
    "properties in a list": {"type": "object", "properties": ["a"]},
    "a list that is none": {**A, "required": True},
    "alternatives in an object": {**A, "properties": {"a": {"anyOf": {"x": 1}}}},
    "parts that are no schemas": {**A, "properties": {"a": {"allOf": [None, 3]}}},
    "numbers as texts": {**A, "properties": {"a": {"type": "string", "minLength": "3", "pattern": 3, "format": ["x"]}}},
    "null": {"type": "object", "properties": None, "required": None},
}


@pytest.mark.parametrize("syntax", SYNTAXES)
@pytest.mark.parametrize("name", MALFORMED)
def test_a_schema_that_is_none_is_refused_for_strict_tools_and_others_are_called_all_the_same(
    name: str, syntax: str
) -> None:
    with pytest.raises(InvalidRequest, match="the tool odd: not a JSON schema"):
        compile_output(form_of("odd", MALFORMED[name], syntax), made(()).vocabulary)
    form = form_of("odd", MALFORMED[name], syntax, strict=False)
    output = random_output(begun(form), ByteTokenizer(()), ways_out_of(syntax), 0)
    assert form.calls is not None
    assert [called for called, _ in parsed(syntax, output, form.calls.tools)[1]] == ["odd"]


GOOD_NAMES = ("get.weather", "get-weather", "mcp__server__tool", "größe", "x" * 256)


@pytest.mark.parametrize("syntax", ["qwen_xml", "hermes", "pythonic", "mistral_args", "deepseek_v31", "kimi_k2"])
@pytest.mark.parametrize("name", GOOD_NAMES)
def test_a_tool_may_have_dots_dashes_and_letters_of_any_script_in_its_name(name: str, syntax: str) -> None:
    form = form_of(name, A, syntax)
    output = random_output(begun(form), ByteTokenizer(()), ways_out_of(syntax), 0)
    assert form.calls is not None
    ((called, _),) = parsed(syntax, output, form.calls.tools)[1]
    assert called == name


@pytest.mark.parametrize(
    ("syntax", "name"),
    [*(("qwen_xml", name) for name in ("a b", 'a"b', "a>b", "a\nb")), ("pythonic", "a/b"), ("kimi_k2", "a\\b")],
)
def test_a_name_that_a_call_cannot_be_written_with_is_refused(syntax: str, name: str) -> None:
    with pytest.raises(InvalidRequest, match="can't express this name") as refused:
        compile_output(form_of(name, A, syntax, strict=False), made(()).vocabulary)
    assert refused.value.param == "tools"
