"""Tools of /v1/responses: functions, custom tools (plain text), namespaces of both, and the tool choice.

Models only know functions. A custom tool is rendered as a function with one text parameter, `input`; a tool in a
namespace under a combined name, so that calls in the history read the same whichever tools are declared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from headrace.api.json_body import StrictBody, check_at, unknown_fields
from headrace.api.openai_tools import MAX_NAME, no_parameters
from headrace.errors import InvalidRequest, UnsupportedField
from headrace.types.chat import ToolChoice, ToolDefinition

Tool = Mapping[str, Any]

INPUT = "input"
"""The one parameter of a custom tool."""

# These run on OpenAI's servers or models. Agents send them to every server with every request.
IGNORED_TOOLS = frozenset(
    {
        "image_generation",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)

# A client that sends one of these depends on it.
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


class CallableToolBody(StrictBody):
    # Every tool is shown to the model, and its result may be any text.
    without_effect: ClassVar[frozenset[str]] = frozenset({"allowed_callers", "async", "defer_loading", "output_schema"})


class FunctionToolBody(CallableToolBody):
    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomFormatBody(StrictBody):
    """The texts that a custom tool accepts."""

    type: Literal["text", "grammar"]
    syntax: str | None = None
    definition: str | None = None


class CustomToolBody(CallableToolBody):
    type: Literal["custom"]
    name: str = Field(min_length=1)
    description: str | None = None
    format: CustomFormatBody | None = None


class NamespaceBody(CallableToolBody):
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
    """definitions: as rendered for the model. by_name: the tool behind each rendered name. ignored: tools and fields
    without effect, as `tools[].NAME`."""

    definitions: tuple[ToolDefinition, ...]
    by_name: Mapping[str, DeclaredTool]
    ignored: set[str]


def visible_name(name: str, namespace: str | None = None) -> str:
    if namespace is None:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def custom_arguments(text: str) -> str:
    return json.dumps({INPUT: text}, ensure_ascii=False)


def declared_tools(tools: Sequence[object]) -> DeclaredTools:
    """The tools of a request. Raises InvalidRequest, UnsupportedField with a path under `tools[index]`."""
    definitions: list[ToolDefinition] = []
    by_name: dict[str, DeclaredTool] = {}
    ignored: set[str] = set()
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        for declared, definition in _declared(tool, path, ignored):
            if definition.name in by_name:
                raise InvalidRequest(f"{path}: there is another tool named {definition.name!r}", param=path)
            if len(definition.name) > MAX_NAME:
                message = f"{path}: the name, with its namespace, has more than {MAX_NAME} characters"
                raise InvalidRequest(message, param=path)
            definitions.append(definition)
            by_name[definition.name] = declared
    return DeclaredTools(tuple(definitions), by_name, {f"tools[].{name}" for name in ignored})


def _declared(
    tool: object, path: str, ignored: set[str], namespace: str | None = None
) -> Iterator[tuple[DeclaredTool, ToolDefinition]]:
    """A tool, or those of a namespace. Adds ignored fields to `ignored`."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    match kind:
        case "function":
            function = _checked(FunctionToolBody, tool, path, ignored)
            name = visible_name(function.name, namespace)
            yield (
                DeclaredTool(function.name, namespace, is_custom=False),
                ToolDefinition(
                    name, function.description, function.parameters or no_parameters(), bool(function.strict)
                ),
            )
        case "custom":
            custom = _checked(CustomToolBody, tool, path, ignored)
            name = visible_name(custom.name, namespace)
            yield (
                DeclaredTool(custom.name, namespace, is_custom=True),
                ToolDefinition(name, _custom_description(custom), _CUSTOM_PARAMETERS),
            )
        case "namespace" if namespace is None:
            space = _checked(NamespaceBody, tool, path, ignored)
            for index, each in enumerate(space.tools):
                yield from _declared(each, f"{path}.tools[{index}]", ignored, space.name)
        case _:
            _leave_out(tool, path, ignored)


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


def _leave_out(tool: object, path: str, ignored: set[str]) -> None:
    """Ignore a tool that the model does not see, or refuse it if its client depends on it."""
    if not isinstance(tool, dict):
        raise InvalidRequest(f"{path}: input should be an object", param=path)
    kind = tool.get("type")
    if not isinstance(kind, str):
        raise InvalidRequest(f"{path}.type is missing or no text", param=f"{path}.type")
    if kind in REFUSED_TOOLS or kind == "namespace":
        raise UnsupportedField(f"{path}.type: tools of the type {kind} are not supported", param=f"{path}.type")
    ignored.add(kind)


def _checked(body: type[Any], tool: object, path: str, ignored: set[str]) -> Any:
    checked = check_at(body, tool, path)
    ignored |= unknown_fields(checked)
    return checked


def echoed_tools(tools: Sequence[Tool]) -> list[Tool]:
    """Tools as an answer repeats them, with every field that typed clients require."""
    return [_echoed(tool) for tool in tools]


def _echoed(tool: Tool) -> Tool:
    if tool["type"] == "function":
        return {"description": None, "parameters": None, **tool, "strict": bool(tool.get("strict"))}
    if tool["type"] == "namespace":
        return {**tool, "description": tool.get("description") or "", "tools": echoed_tools(tool["tools"])}
    return tool


def tool_choice(value: object, tools: DeclaredTools, *, is_parallel: bool) -> ToolChoice:
    """The tool choice. Raises InvalidRequest, UnsupportedField for an impossible one."""
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
        case {"type": str(kind)} if kind in IGNORED_TOOLS | REFUSED_TOOLS:
            raise UnsupportedField(f"tool_choice: {kind} is not supported", param="tool_choice")
    message = "tool_choice must be none, auto, required, or an object of the type function, custom or allowed_tools"
    raise InvalidRequest(message, param="tool_choice")


def _allowed(allowed: Sequence[object], tools: DeclaredTools) -> Iterator[str]:
    for index, tool in enumerate(allowed):
        path = f"tool_choice.tools[{index}]"
        if isinstance(tool, dict) and tool.get("type") in ("function", "custom"):
            yield _chosen(tool, tools, path)
        elif not isinstance(tool, dict) or tool.get("type") not in IGNORED_TOOLS:
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
