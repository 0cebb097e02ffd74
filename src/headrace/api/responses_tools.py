"""Tools of /v1/responses: functions, tools that take plain text, namespaces of both, and the choice among them.

A model knows functions only. A custom tool is shown to it as a function with one text, `input`; a tool in a namespace
under a name that holds both, so that a call in the history reads the same whichever tools stand beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from headrace.api.json_body import StrictBody, check_at
from headrace.api.openai_tools import MAX_NAME, no_parameters
from headrace.api.responses_fields import TOOL_FIELDS_WITHOUT_EFFECT
from headrace.errors import InvalidRequest, UnsupportedField
from headrace.types.chat import ToolChoice, ToolDefinition

Tool = Mapping[str, Any]

INPUT = "input"
"""The one parameter of a custom tool."""

# Run on OpenAI's servers or loaded by its models. Agents send these with every request, whatever server it goes to.
UNUSED_TOOLS = frozenset(
    {
        "image_generation",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)

# Whoever sends one of these counts on it.
REFUSED_TOOLS = frozenset(
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use",
        "computer_use_preview",
        "file_search",
        "local_shell",
        "mcp",
        "programmatic_tool_calling",
        "shell",
    }
)


class FunctionToolBody(StrictBody):
    """A function."""

    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FormatBody(StrictBody):
    """What texts a custom tool takes."""

    type: Literal["text", "grammar"]
    syntax: str | None = None
    definition: str | None = None


class CustomToolBody(StrictBody):
    """A tool that takes plain text."""

    type: Literal["custom"]
    name: str = Field(min_length=1)
    description: str | None = None
    format: FormatBody | None = None


class NamespaceBody(StrictBody):
    """Tools under a common name."""

    type: Literal["namespace"]
    name: str = Field(min_length=1)
    description: str | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)]


@dataclass(frozen=True, slots=True)
class DeclaredTool:
    """A tool as its client knows it."""

    name: str
    namespace: str | None
    is_custom: bool


@dataclass(frozen=True, slots=True)
class DeclaredTools:
    """definitions: as the model is shown them. by_name: what is behind each of their names. unused: names of fields."""

    definitions: tuple[ToolDefinition, ...]
    by_name: Mapping[str, DeclaredTool]
    unused: tuple[str, ...]


def visible_name(name: str, namespace: str | None = None) -> str:
    """The name that the model knows a tool under."""
    if namespace is None:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def custom_arguments(text: str) -> str:
    """The arguments of a custom tool's call, as the model writes them."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def declared_tools(tools: Sequence[object]) -> DeclaredTools:
    """The tools of a request. Raises InvalidRequest, UnsupportedField with a path under `tools[index]`."""
    definitions: list[ToolDefinition] = []
    by_name: dict[str, DeclaredTool] = {}
    unused: set[str] = set()
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        for declared, definition in _declared(tool, path, unused):
            if definition.name in by_name:
                raise InvalidRequest(f"{path}: there is another tool named {definition.name!r}", param=path)
            if len(definition.name) > MAX_NAME:
                message = f"{path}: the name, with its namespace, has more than {MAX_NAME} characters"
                raise InvalidRequest(message, param=path)
            definitions.append(definition)
            by_name[definition.name] = declared
    return DeclaredTools(tuple(definitions), by_name, tuple(f"tools[].{name}" for name in sorted(unused)))


def _declared(
    tool: object, path: str, unused: set[str], namespace: str | None = None
) -> Iterator[tuple[DeclaredTool, ToolDefinition]]:
    """A tool, or those of a namespace. Adds to `unused` what has no effect."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    match kind:
        case "function":
            function = _checked(FunctionToolBody, tool, path, unused)
            name = visible_name(function.name, namespace)
            yield (
                DeclaredTool(function.name, namespace, is_custom=False),
                ToolDefinition(
                    name, function.description, function.parameters or no_parameters(), bool(function.strict)
                ),
            )
        case "custom":
            custom = _checked(CustomToolBody, tool, path, unused)
            name = visible_name(custom.name, namespace)
            yield (
                DeclaredTool(custom.name, namespace, is_custom=True),
                ToolDefinition(name, _custom_description(custom), _CUSTOM_PARAMETERS),
            )
        case "namespace" if namespace is None:
            space = _checked(NamespaceBody, tool, path, unused)
            for index, each in enumerate(space.tools):
                yield from _declared(each, f"{path}.tools[{index}]", unused, space.name)
        case _:
            _leave_out(tool, path, unused)


_CUSTOM_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {INPUT: {"type": "string", "description": "The tool's input, as plain text."}},
    "required": [INPUT],
    "additionalProperties": False,
}


def _custom_description(tool: CustomToolBody) -> str | None:
    if tool.format is None or tool.format.definition is None:
        return tool.description
    grammar = f"The input follows this {tool.format.syntax or 'lark'} grammar:\n{tool.format.definition}"
    return f"{tool.description}\n\n{grammar}" if tool.description else grammar


def _leave_out(tool: object, path: str, unused: set[str]) -> None:
    """A tool that the model isn't shown: noted, or refused if its client counts on it."""
    if not isinstance(tool, dict):
        raise InvalidRequest(f"{path}: input should be an object", param=path)
    kind = tool.get("type")
    if not isinstance(kind, str):
        raise InvalidRequest(f"{path}.type is missing or no text", param=f"{path}.type")
    if kind in REFUSED_TOOLS or kind == "namespace":
        raise UnsupportedField(f"{path}.type: tools of the type {kind} are not supported", param=f"{path}.type")
    unused.add(kind)


def _checked(body: type[Any], tool: object, path: str, unused: set[str]) -> Any:
    checked = check_at(body, tool, path)
    assert isinstance(tool, dict)
    unused |= tool.keys() - body.model_fields.keys() - TOOL_FIELDS_WITHOUT_EFFECT
    return checked


def told_tools(tools: Sequence[Tool]) -> list[Tool]:
    """Tools as an answer repeats them: with every field that typed clients take for granted."""
    return [_told(tool) for tool in tools]


def _told(tool: Tool) -> Tool:
    if tool["type"] == "function":
        return {"description": None, "parameters": None, **tool, "strict": bool(tool.get("strict"))}
    if tool["type"] == "namespace":
        return {**tool, "description": tool.get("description") or "", "tools": told_tools(tool["tools"])}
    return tool


def tool_choice(value: object, tools: DeclaredTools, *, is_parallel: bool) -> ToolChoice:
    """The choice among declared tools. Raises InvalidRequest, UnsupportedField for one that can't be made."""
    match value:
        case None | "auto":
            return ToolChoice(is_parallel=is_parallel)
        case "none":
            return ToolChoice("none", is_parallel=is_parallel)
        case "required":
            if not tools.definitions:
                raise InvalidRequest("tool_choice: there are no tools to choose from", param="tool_choice")
            return ToolChoice("required", is_parallel=is_parallel)
        case {"type": "function" | "custom" as kind, **named}:
            chosen = _chosen({"type": kind, **{str(name): each for name, each in named.items()}}, tools, "tool_choice")
            return ToolChoice("required", (chosen,), is_parallel)
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(allowed)}:
            names = tuple(_allowed(allowed, tools))
            if mode == "required" and not names:
                raise InvalidRequest("tool_choice.tools: none of these can be called", param="tool_choice.tools")
            return ToolChoice(mode, names, is_parallel)
        case {"type": str(kind)} if kind in UNUSED_TOOLS | REFUSED_TOOLS:
            raise UnsupportedField(f"tool_choice: {kind} is not supported", param="tool_choice")
    message = "tool_choice must be none, auto, required, or an object of the type function, custom or allowed_tools"
    raise InvalidRequest(message, param="tool_choice")


def _allowed(allowed: Sequence[object], tools: DeclaredTools) -> Iterator[str]:
    for index, tool in enumerate(allowed):
        path = f"tool_choice.tools[{index}]"
        if isinstance(tool, dict) and tool.get("type") in ("function", "custom"):
            yield _chosen(tool, tools, path)
        elif not isinstance(tool, dict) or tool.get("type") not in UNUSED_TOOLS:
            raise InvalidRequest(f"{path} must be a function or a custom tool", param=path)


def _chosen(choice: Mapping[str, object], tools: DeclaredTools, path: str) -> str:
    name, namespace = choice.get("name"), choice.get("namespace")
    if not isinstance(name, str) or not isinstance(namespace, str | None):
        raise InvalidRequest(f"{path}.name must be a tool's name", param=f"{path}.name")
    visible = visible_name(name, namespace)
    declared = tools.by_name.get(visible)
    if declared is None or declared.is_custom != (choice["type"] == "custom"):
        raise InvalidRequest(f"{path}: there is no {choice['type']} named {visible!r} in tools", param=path)
    return visible
