"""Tools of a chat body, and the tool choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from headrace.api.json_body import StrictBody, refuse_too_much
from headrace.errors import InvalidRequest, UnsupportedField
from headrace.types.chat import ChatMessage, ToolChoice, ToolDefinition

# A cache marker, and eager argument streaming, which is the default here.
TOOL_MARKERS = frozenset({"cache_control", "eager_input_streaming"})

MAX_NAME = 256
"""Characters of a tool's name."""

MAX_CALLS = 1024
"""Calls in one assistant turn."""

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


class FunctionBody(StrictBody):
    """A client function. Without `parameters` it takes none."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatToolBody(StrictBody):
    """A tool; its other fields depend on its type."""

    without_effect: ClassVar[frozenset[str]] = TOOL_MARKERS

    type: str
    function: FunctionBody | None = None


class FunctionNameBody(StrictBody):
    name: Name


class NamedToolBody(StrictBody):
    """A tool by name."""

    type: str
    function: FunctionNameBody | None = None


class AllowedToolsBody(StrictBody):
    """A subset of the tools, one of which may or must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolBody], Field(fail_fast=True, min_length=1)]


class ChatToolChoiceBody(NamedToolBody):
    """A tool that must be called, or a subset that may."""

    allowed_tools: AllowedToolsBody | None = None


class ToolsBody(StrictBody):
    """The fields about tools beside the messages."""

    tool_choice: Literal["none", "auto", "required"] | ChatToolChoiceBody | None = None
    parallel_tool_calls: bool | None = None


def tool_definitions(tools: Sequence[ChatToolBody]) -> tuple[ToolDefinition, ...]:
    """The tools. Raises InvalidRequest, UnsupportedField with a path under `tools[index]`."""
    functions = [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    refuse_repeated([function.name for function in functions], "tools[{}].function.name")
    return tuple(
        ToolDefinition(each.name, each.description, each.parameters or no_parameters(), bool(each.strict))
        for each in functions
    )


def tool_choice(parsed: ToolsBody, tools: Sequence[ToolDefinition]) -> ToolChoice:
    """The tool choice. Raises InvalidRequest for an undeclared tool, UnsupportedField for other kinds."""
    is_parallel = parsed.parallel_tool_calls is not False
    asked = parsed.tool_choice
    if asked is None or asked in ("none", "auto"):
        return ToolChoice("none" if asked == "none" else "auto", is_parallel=is_parallel)
    if not tools:
        raise InvalidRequest("tool_choice is only allowed with tools", param="tool_choice")
    if not isinstance(asked, ChatToolChoiceBody):
        return ToolChoice("required", is_parallel=is_parallel)
    if asked.type == "allowed_tools":
        return _allowed(asked, tools, is_parallel)
    return ToolChoice("required", (_declared(asked, tools, "tool_choice"),), is_parallel)


def refuse_repeated(names: Sequence[str], path: str) -> None:
    """Raise InvalidRequest for the first repeated name. path: with {} for its index."""
    known: set[str] = set()
    for index, name in enumerate(names):
        if name in known:
            where = path.format(index)
            raise InvalidRequest(f"{where}: there is another tool of this name", param=where)
        known.add(name)


def refuse_large_arguments(messages: Sequence[ChatMessage], param: str) -> None:
    """Raise InvalidRequest if the arguments of all calls exceed the JSON limits: templates need them parsed.

    param: the field of the messages.
    """
    texts = (call.arguments.encode(errors="replace") for message in messages for call in message.tool_calls)
    refuse_too_much(texts, f"{param}: the arguments of all calls together", param)


def no_parameters() -> dict[str, Any]:
    return {"type": "object", "properties": {}}


def _function(tool: ChatToolBody, path: str) -> FunctionBody:
    if tool.type != "function":
        raise UnsupportedField(f"{path}.type: only function tools are supported", param=f"{path}.type")
    if tool.function is None:
        raise InvalidRequest(f"{path}.function is missing", param=f"{path}.function")
    return tool.function


def _allowed(asked: ChatToolChoiceBody, tools: Sequence[ToolDefinition], is_parallel: bool) -> ToolChoice:
    allowed = asked.allowed_tools
    if allowed is None:
        path = "tool_choice.allowed_tools"
        raise InvalidRequest(f"{path} is missing", param=path)
    names = [_declared(tool, tools, f"tool_choice.allowed_tools.tools[{i}]") for i, tool in enumerate(allowed.tools)]
    return ToolChoice(allowed.mode, tuple(dict.fromkeys(names)), is_parallel)


def _declared(tool: NamedToolBody, tools: Sequence[ToolDefinition], path: str) -> str:
    if tool.type != "function":
        raise UnsupportedField(f"{path}.type: only function tools are supported", param=f"{path}.type")
    if tool.function is None:
        raise InvalidRequest(f"{path}.function is missing", param=f"{path}.function")
    if all(tool.function.name != each.name for each in tools):
        where = f"{path}.function.name"
        raise InvalidRequest(f"{where}: there is no tool of this name", param=where)
    return tool.function.name
