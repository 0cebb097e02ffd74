"""Tools of chat bodies: what is understood, what is refused, and under which name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.api.openai_chat import read_chat_completion
from headrace.api.openai_models import read_tokenize
from headrace.api.openai_sampling import Call
from headrace.errors import InvalidRequest, UnsupportedField
from headrace.types.chat import ChatMessage, ChatRequest, ToolCall, ToolChoice, ToolDefinition
from headrace.types.model import ModelTraits

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
F = {"type": "function", "function": {"name": "f", "description": "does f", "parameters": SCHEMA, "strict": True}}
G = {"type": "function", "function": {"name": "g"}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def body(**fields: Any) -> bytes:
    return json.dumps({"messages": HELLO, **fields}).encode()


def read(**fields: Any) -> Call[ChatRequest]:
    return read_chat_completion(body(**fields), ModelTraits())


def choice(**fields: Any) -> ToolChoice:
    return read(tools=[F, G], **fields).request.tool_choice


def test_tools_are_read_with_their_schemas_and_one_without_takes_nothing() -> None:
    assert read(tools=[F, G]).request.tools == (
        ToolDefinition("f", "does f", SCHEMA, strict=True),
        ToolDefinition("g", None, {"type": "object", "properties": {}}),
    )


def test_a_prompt_that_is_only_split_has_its_tools_too() -> None:
    call = read_tokenize(body(tools=[F]))
    assert isinstance(call.prompt, ChatRequest)
    assert [tool.name for tool in call.prompt.tools] == ["f"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ToolChoice("auto")),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, ToolChoice("auto")),
        ({"tool_choice": "none"}, ToolChoice("none")),
        ({"tool_choice": "required"}, ToolChoice("required")),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ToolChoice("required", is_parallel=False)),
        ({"tool_choice": named("g")}, ToolChoice("required", ("g",))),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("g")]}}},
            ToolChoice("auto", ("g",)),
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "required", "tools": [named("g"), named("f"), named("g")]},
                }
            },
            ToolChoice("required", ("g", "f")),
        ),
    ],
)
def test_a_choice_says_what_may_be_called_and_what_must(fields: dict[str, Any], expected: ToolChoice) -> None:
    assert choice(**fields) == expected


def test_a_choice_that_changes_nothing_needs_no_tools() -> None:
    for asked in ("none", "auto", None):
        assert read(tool_choice=asked, parallel_tool_calls=False).request.tools == ()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": 5}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [F, {"type": "function"}]}, "tools[1].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [F, G, F]}, "tools[2].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": named("f")}, "tool_choice"),
        ({"tools": [F], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [F], "tool_choice": 5}, "tool_choice"),
        ({"tools": [F], "tool_choice": named("h")}, "tool_choice.function.name"),
        ({"tools": [F], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [F], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        (
            {
                "tools": [F],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [named("f"), named("h")]},
                },
            },
            "tool_choice.allowed_tools.tools[1].function.name",
        ),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_path(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.param == param
    assert param.partition(".")[0].partition("[")[0] in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [F], "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice.type"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
    ],
)
def test_other_kinds_of_tools_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedField) as caught:
        read(**fields)
    assert caught.value.param == param


def test_unknown_fields_of_tools_are_named_and_marks_for_caches_are_not() -> None:
    marked = {**F, "cache_control": {"type": "ephemeral"}, "mood": 1}
    assert read(tools=[marked, {**G, "mood": 2, "air": 3}]).ignored == ("tools[].air", "tools[].mood")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"x": 1}', '{"x": 1}'),
        ('{"x": ', '{"x": '),
        ("", ""),
        ({"x": "é", "y": [1]}, '{"x":"é","y":[1]}'),
        (None, ""),
    ],
)
def test_calls_in_the_history_keep_their_arguments_valid_or_not(arguments: Any, text: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "gone", "arguments": arguments}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    expected = ChatMessage("assistant", tool_calls=(ToolCall("call_1", "gone", text),))
    assert read(messages=messages).request.messages[1] == expected
