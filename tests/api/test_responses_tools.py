"""Tools become functions that a model knows, and a choice among them."""

from __future__ import annotations

from typing import Any

import pytest
from api.responses_calls import read, refusal

from headrace.api.responses_tools import DeclaredTool
from headrace.errors import UnsupportedField
from headrace.types.chat import ToolChoice, ToolDefinition

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"type": "function", "name": "f", "description": "does it", "parameters": SCHEMA, "strict": True}
PATCH = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: A"}}
SPACE = {"type": "namespace", "name": "agents", "description": "many", "tools": [{**FUNCTION, "name": "close"}]}


def test_a_function_is_shown_as_it_is() -> None:
    call = read(tools=[FUNCTION, {"type": "function", "name": "g"}])
    assert call.request.tools == (
        ToolDefinition("f", "does it", SCHEMA, strict=True),
        ToolDefinition("g", None, {"type": "object", "properties": {}}),
    )
    assert call.tools.by_name["f"] == DeclaredTool("f", None, is_custom=False)


def test_a_custom_tool_is_shown_as_a_function_of_one_text_with_its_grammar() -> None:
    call = read(tools=[PATCH, {"type": "custom", "name": "note", "description": "d", "format": {"type": "text"}}])
    patch, note = call.request.tools
    assert patch.parameters["required"] == ["input"]
    assert patch.parameters["properties"]["input"]["type"] == "string"
    assert patch.description is not None
    assert patch.description.endswith("start: A")
    assert note.description == "d"
    assert call.tools.by_name["patch"] == DeclaredTool("patch", None, is_custom=True)


def test_a_tool_in_a_namespace_is_shown_under_both_names() -> None:
    call = read(tools=[FUNCTION, SPACE, {**SPACE, "name": "mcp__"}])
    assert [tool.name for tool in call.request.tools] == ["f", "agents__close", "mcp__close"]
    assert call.tools.by_name["agents__close"] == DeclaredTool("close", "agents", is_custom=False)


def test_tools_of_other_servers_are_left_out_and_named() -> None:
    call = read(tools=[FUNCTION, {"type": "web_search", "external_web_access": True}, {"type": "of_tomorrow"}])
    assert [tool.name for tool in call.request.tools] == ["f"]
    assert call.ignored == ("tools[].of_tomorrow", "tools[].web_search")
    assert read(tools=[{**FUNCTION, "mood": 1, "defer_loading": False}]).ignored == ("tools[].mood",)


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([1], "tools[0]"),
        ([{"type": 1}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].name"),
        ([{"type": "function", "name": ""}], "tools[0].name"),
        ([{"type": "function", "name": "f", "parameters": 1}], "tools[0].parameters"),
        ([FUNCTION, FUNCTION], "tools[1]"),
        ([FUNCTION, {"type": "function", "name": 257 * "n"}], "tools[1]"),
        ([{"type": "namespace", "name": 200 * "n", "tools": [{"type": "custom", "name": 55 * "f"}]}], "tools[0]"),
        ([{"type": "custom", "name": "f", "format": {"type": "yaml"}}], "tools[0].format.type"),
        ([{"type": "namespace", "name": "n"}], "tools[0].tools"),
        ([{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}], "tools[0].tools[0].name"),
        ([{"type": "namespace", "name": "n", "tools": [SPACE]}], "tools[0].tools[0].type"),
        ([{"type": "file_search", "vector_store_ids": []}], "tools[0].type"),
        ([{"type": "local_shell"}], "tools[0].type"),
    ],
)
def test_a_wrong_tool_is_refused_by_its_place(tools: list[Any], param: str) -> None:
    assert refusal(tools=tools).param == param


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "f"}, ToolChoice("required", ("f",))),
        ({"type": "custom", "name": "patch"}, ToolChoice("required", ("patch",))),
        ({"type": "function", "name": "close", "namespace": "agents"}, ToolChoice("required", ("agents__close",))),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [
                    {"type": "function", "name": "f"},
                    {"type": "web_search"},
                    {"type": "custom", "name": "patch"},
                ],
            },
            ToolChoice("auto", ("f", "patch")),
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
            ToolChoice("required", ("f",)),
        ),
    ],
)
def test_a_choice_is_made_among_the_tools(choice: Any, expected: ToolChoice) -> None:
    assert read(tools=[FUNCTION, PATCH, SPACE], tool_choice=choice).request.tool_choice == expected


def test_calls_may_be_kept_from_coming_together() -> None:
    assert read(tools=[FUNCTION], parallel_tool_calls=False).request.tool_choice == ToolChoice(is_parallel=False)
    assert read(tools=[FUNCTION], parallel_tool_calls=None).request.tool_choice == ToolChoice()


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("sometimes", "tool_choice"),
        (3, "tool_choice"),
        ({"type": "of_tomorrow"}, "tool_choice"),
        ({"type": "function"}, "tool_choice.name"),
        ({"type": "function", "name": "g"}, "tool_choice"),
        ({"type": "function", "name": "patch"}, "tool_choice"),
        ({"type": "custom", "name": "f"}, "tool_choice"),
        ({"type": "allowed_tools", "mode": "none", "tools": []}, "tool_choice"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]}, "tool_choice.tools"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}, "tool_choice.tools[0]"),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]},
            "tool_choice.tools[0]",
        ),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused(choice: Any, param: str) -> None:
    assert refusal(tools=[FUNCTION, PATCH], tool_choice=choice).param == param


def test_a_tool_that_is_not_there_cannot_be_demanded() -> None:
    assert refusal(tool_choice="required").param == "tool_choice"
    assert isinstance(refusal(tool_choice={"type": "file_search"}), UnsupportedField)
