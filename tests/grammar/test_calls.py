"""Calls of a model that knows nothing are calls to the stream parser and fit their schema, under a constraint."""

from __future__ import annotations

import ipaddress
import uuid
from collections.abc import Mapping
from dataclasses import replace
from datetime import date, datetime, time
from typing import Any

import jsonschema
import pytest
from grammar.call_answers import (
    ByteTokenizer,
    begun,
    made,
    parsed,
    random_output,
    special_of,
    takes,
    takes_whole,
    ways_out_of,
)
from grammar.schemas import closed

from headrace.errors import InvalidRequest
from headrace.grammar.compile import AllowedCalls, OutputForm, ThinkingForm, compile_output
from headrace.tool_calls.syntaxes import SYNTAXES
from headrace.types.chat import Structure, ToolDefinition

HARMONY = "harmony"
NAMES = [name for name, syntax in SYNTAXES.items() if syntax.can_be_enforced]
SEEDS = range(2)

SEARCH = closed(
    {
        "query": {"type": "string"},
        "limit": {"type": "integer", "minimum": 1, "maximum": 50},
        "tags": {"type": "array", "items": {"enum": ["a", 'b"c']}, "maxItems": 2},
    },
    ["query", "limit"],
)
NOTE = closed(
    {
        "title": {"type": "string", "minLength": 2, "maxLength": 5},
        "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]+$"},
        "kind": {"enum": ["long text", "x"]},
        "when": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "place": {"$ref": "#/$defs/place"},
        "label": {"type": ["string", "null"], "maxLength": 4},
    },
    ["title", "code", "kind", "place"],
) | {"$defs": {"place": closed({"x": {"type": "number"}, "on": {"type": "boolean"}})}}
SCHEMAS: Mapping[str, Any] = {"search": SEARCH, "note": NOTE, "stop": {"type": "object", "properties": {}}}
TOOLS = tuple(ToolDefinition(name, None, schema, strict=True) for name, schema in SCHEMAS.items())


@pytest.mark.slow
@pytest.mark.parametrize("has_special", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_required_calls_are_calls_and_fit_their_schemas(name: str, has_special: bool) -> None:
    special = special_of(name, has_special)
    form = OutputForm(None, AllowedCalls(TOOLS, True, True), name, None)
    called = set()
    for seed in SEEDS:
        tokenizer = ByteTokenizer(special)
        output = random_output(begun(form, special), tokenizer, ways_out_of(name), seed)
        text, calls = parsed(name, output, TOOLS)
        assert calls, output
        assert not text.strip(), output
        for tool, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[tool])
            called.add(tool)
    assert called


@pytest.mark.parametrize("name", NAMES)
def test_one_named_call_is_one_call_of_that_tool(name: str) -> None:
    special = special_of(name, True)
    constraint = begun(OutputForm(None, AllowedCalls(TOOLS[:1], True, False), name, None), special)
    output = random_output(constraint, ByteTokenizer(special), ways_out_of(name), 7)
    _, calls = parsed(name, output, TOOLS)
    assert [tool for tool, _ in calls] == ["search"]


XML_CALL = "<tool_call>\n<function=search>\n<parameter=query>\n{}\n</parameter>\n<parameter=limit>\n7\n</parameter>\n"
XML_END = "</function>\n</tool_call>"


def test_texts_between_tags_are_bare_and_may_be_anything_but_the_end_marker() -> None:
    constraint = begun(OutputForm(None, AllowedCalls(TOOLS, True, True), "qwen_xml", None))
    for query in ("", "two\nlines", '<a href="x">', "</param>", "null", "0042", "</function>", "日本"):
        call = XML_CALL.format(query) + XML_END
        assert takes_whole(constraint, call)
        assert parsed("qwen_xml", call, TOOLS)[1] == [("search", {"query": query, "limit": 7})]
    assert takes_whole(constraint, f"{XML_CALL.format('a')}{XML_END}\n{XML_CALL.format('b')}{XML_END}")


@pytest.mark.parametrize(
    "call",
    [
        XML_CALL.format("a").replace("search", "seek"),
        XML_CALL.format("a").replace("7", "51"),
        XML_CALL.format("a").replace("7", '"7"'),
        XML_CALL.format("a").replace("limit", "limits"),
        XML_CALL.format("a").replace("query", "limit"),
        XML_CALL.format("a</parameter>"),
        "I call <tool_call>",
    ],
)
def test_what_is_no_valid_call_may_not_come(call: str) -> None:
    constraint = begun(OutputForm(None, AllowedCalls(TOOLS, True, True), "qwen_xml", None))
    assert not takes(constraint, call + XML_END)


def test_required_arguments_may_not_be_left_out_and_others_may() -> None:
    constraint = begun(OutputForm(None, AllowedCalls(TOOLS, True, True), "qwen_xml", None))
    assert not takes(constraint, "<tool_call>\n<function=search>\n</function>")
    assert takes_whole(constraint, "<tool_call>\n<function=stop>\n</function>\n</tool_call>")
    tags = '<parameter=tags>\n["a"]\n</parameter>\n'
    assert takes_whole(constraint, XML_CALL.format("a") + tags + XML_END)
    assert not takes(constraint, XML_CALL.format("a") + tags.replace("a", "z", 2))


AUTO = OutputForm(None, AllowedCalls(TOOLS, False, True), "hermes", None)
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "a", "limit": 7}}\n</tool_call>'


def test_where_calls_are_free_to_come_a_text_is_any_text_and_a_call_is_valid() -> None:
    constraint = begun(AUTO)
    assert takes_whole(constraint, "")
    assert takes_whole(constraint, 'No call: <tool is "it" {}.\n')
    assert takes_whole(constraint, CALL)
    assert takes_whole(constraint, f"Let me look.\n\n{CALL}\n{CALL}")
    assert not takes(constraint, CALL.replace("search", "seek"))
    assert not takes(constraint, "So: " + CALL.replace("7", "77"))
    assert not takes_whole(constraint, "So: <tool_call>")


def test_calls_that_are_not_parallel_are_one_at_most() -> None:
    constraint = begun(replace(AUTO, calls=AllowedCalls(TOOLS, False, False)))
    assert takes_whole(constraint, "no call")
    assert takes_whole(constraint, CALL)
    assert not takes(constraint, f"{CALL}\n")
    required = begun(replace(AUTO, calls=AllowedCalls(TOOLS, True, False)))
    assert takes_whole(required, CALL)
    assert not takes_whole(required, "no call")


@pytest.mark.parametrize("name", ["llama_json", "pythonic"])
def test_where_a_call_has_no_marker_only_the_beginning_tells_it_from_text(name: str) -> None:
    constraint = begun(replace(AUTO, syntax=name))
    call = {"llama_json": '{"name": "stop", "parameters": {}}', "pythonic": "[stop()]"}[name]
    assert takes_whole(constraint, call)
    assert takes_whole(constraint, f"An answer with {call} in it")
    assert takes_whole(constraint, "")
    assert not takes(constraint, call.replace("stop", "halt"))


def test_an_answer_beside_tools_is_its_form_or_a_call() -> None:
    constraint = begun(replace(AUTO, structure=Structure("json_schema", closed({"a": {"type": "integer"}}))))
    assert takes_whole(constraint, '{"a": 1}')
    assert takes_whole(constraint, CALL)
    assert not takes(constraint, "Let me")
    assert not takes(constraint, '{"name"')
    assert not takes(constraint, '{"a": 1}\n')


def test_thinking_comes_before_calls_and_may_quote_them() -> None:
    form = replace(AUTO, thinking=ThinkingForm("<think>", "</think>", True), calls=AllowedCalls(TOOLS, True, True))
    constraint = begun(form)
    assert takes_whole(constraint, f"I <tool_call> think\n</think>\n\n{CALL}")
    assert not takes(constraint, f"think\n</think>\n\nI {CALL}")


def test_harmony_thinks_answers_and_calls_in_messages() -> None:
    special = SYNTAXES[HARMONY].parser.markers
    thinking = ThinkingForm("<|channel|>analysis<|message|>", "<|end|>", False)
    thought = "<|channel|>analysis<|message|>so<|end|><|start|>assistant"
    answer = "<|channel|>final<|message|>hello"
    call = "<|channel|>commentary to=functions.stop <|constrain|>json<|message|>{}"
    free = begun(OutputForm(None, AllowedCalls(TOOLS, False, True), HARMONY, thinking), special)
    for text in (thought + answer, answer, thought + thought + call, call):
        assert takes(free, text, special)
    assert not takes(free, "hello", special)
    assert not takes(free, thought + call.replace("stop", "halt"), special)
    held = begun(OutputForm(Structure("choice", ("yes",)), None, HARMONY, thinking), special)
    assert takes(held, thought + answer.replace("hello", "yes"), special)
    assert not takes(held, thought + answer, special)
    required = begun(OutputForm(None, AllowedCalls(TOOLS, True, True), HARMONY, thinking), special)
    assert takes(required, thought + call, special)
    assert not takes(required, thought + answer, special)


def test_a_syntax_that_cannot_be_enforced_is_refused_by_name() -> None:
    for name, word in (("gemma4", "gemma4"), (None, "no known syntax")):
        with pytest.raises(InvalidRequest, match=word) as refused:
            compile_output(OutputForm(None, AllowedCalls(TOOLS, True, True), name, None), made(()).vocabulary)
        assert refused.value.param == "tool_choice"


@pytest.mark.parametrize(("is_strict", "param"), [(True, "tools"), (False, "parallel_tool_calls")])
def test_a_refusal_names_the_field_that_cannot_be_kept(is_strict: bool, param: str) -> None:
    form = AllowedCalls((replace(TOOLS[0], strict=is_strict),), is_required=False, is_parallel=False)
    with pytest.raises(InvalidRequest) as refused:
        compile_output(OutputForm(None, form, "gemma4", None), made(()).vocabulary)
    assert refused.value.param == param


ODD = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


@pytest.mark.parametrize("name", ["hermes", "qwen_xml"])
def test_a_strict_schema_that_cannot_be_enforced_is_refused_and_another_is_loosened(name: str) -> None:
    strict = ToolDefinition("odd", None, ODD, strict=True)
    form = OutputForm(None, AllowedCalls((strict,), True, True), name, None)
    with pytest.raises(InvalidRequest, match="odd.*uniqueItems"):
        compile_output(form, made(()).vocabulary)
    loose = begun(replace(form, calls=AllowedCalls((replace(strict, strict=False),), True, True)))
    call = {
        "hermes": '<tool_call>\n{"name": "odd", "arguments": {"a": [1, 1]}}\n</tool_call>',
        "qwen_xml": "<tool_call>\n<function=odd>\n<parameter=a>\n[1, 1]\n</parameter>\n</function>\n</tool_call>",
    }[name]
    assert takes_whole(loose, call)


FORMATTED = {
    "date": (date.fromisoformat, ("2024-12-31", "1999-02-28"), ("2024-13-01", "2023-02-30", "2024-04-31", "x")),
    "time": (time.fromisoformat, ("23:59:59Z", "00:00:00.5+02:00"), ("24:00:00Z", "12:00:00")),
    "date-time": (datetime.fromisoformat, ("2024-06-30T12:00:00Z",), ("2024-06-30 12:00:00Z", "2024-06-30")),
    "email": (str, ("a.b@c.org",), ("a@b", "@c.org")),
    "ipv4": (ipaddress.IPv4Address, ("255.0.19.7",), ("256.0.0.1", "1.2.3")),
    "uri": (str, ("https://a.org/b?c", "mailto:a@b.c"), ("a b", "//a.org")),
    "uuid": (uuid.UUID, ("0f8fad5b-d9cb-469f-a165-70867728950e",), ("0f8fad5b-d9cb-469f-a165",)),
}


@pytest.mark.parametrize("name", FORMATTED)
def test_formats_hold_for_texts_without_quotes(name: str) -> None:
    read, good, bad = FORMATTED[name]
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": name}}, "required": ["a"]}
    tool = ToolDefinition("when", None, schema, strict=True)
    constraint = begun(OutputForm(None, AllowedCalls((tool,), True, False), "qwen_xml", None))
    call = "<tool_call>\n<function=when>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    for text in good:
        read(text)
        assert takes_whole(constraint, call.format(text))
    for text in bad:
        assert not takes_whole(constraint, call.format(text))
    output = random_output(constraint, ByteTokenizer(()), ways_out_of("qwen_xml"), 3)
    ((_, arguments),) = parsed("qwen_xml", output, (tool,))[1]
    read(arguments["a"])


@pytest.mark.parametrize("keyword", [{"format": "iri"}, {"pattern": "(?=a)"}, {"allOf": [{"format": "iri"}]}])
def test_a_strict_text_without_quotes_is_refused_where_it_cannot_be_held_to_its_schema(keyword: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", **keyword}}}
    tool = ToolDefinition("odd", None, schema, strict=True)
    form = OutputForm(None, AllowedCalls((tool,), True, True), "qwen_xml", None)
    with pytest.raises(InvalidRequest, match="odd"):
        compile_output(form, made(()).vocabulary)
    loose = begun(replace(form, calls=AllowedCalls((replace(tool, strict=False),), True, True)))
    call = "<tool_call>\n<function=odd>\n<parameter=a>\nxy\n</parameter>\n</function>\n</tool_call>"
    assert takes_whole(loose, call)
