"""Tools of a Messages body.

Tools of other types than the client's run on Anthropic's servers or are known to its models only. Agents send them
along with their own, so they are ignored and reported, not refused.

A deferred tool is not in the prompt's header: each newly found one would change everything before the conversation. It
is rendered where the conversation refers to it or adds it, and may be called from there on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from pydantic_core import to_json

from headrace.api.anthropic_body import BlockBody, MessageBody, ToolBody, ToolChoiceBody
from headrace.api.openai_tools import no_parameters, refuse_repeated
from headrace.errors import InvalidRequest
from headrace.types.chat import ToolChoice, ToolDefinition

# Searches deferred tools on the server. Not supported here, so all tools are shown.
_SEARCH_TYPES = "tool_search_tool"


def own_tools(tools: Sequence[ToolBody]) -> tuple[ToolDefinition, ...]:
    """The client's tools. Raises InvalidRequest for a repeated name."""
    own = [tool for tool in tools if not tool.is_foreign]
    refuse_repeated([tool.name for tool in own], "tools: number {} of the client's own")
    searched = any((tool.type or "").startswith(_SEARCH_TYPES) for tool in tools)
    return tuple(_definition(tool, is_deferred=bool(tool.defer_loading) and not searched) for tool in own)


def added_tools(messages: Sequence[MessageBody], declared: Sequence[ToolDefinition]) -> tuple[ToolDefinition, ...]:
    """Client tools defined by the conversation itself, the first of each name."""
    known = {tool.name for tool in declared}
    added: dict[str, ToolDefinition] = {}
    for block in _all_blocks(messages):
        tool = block.tool.definition if block.tool is not None else None
        if tool is not None and not tool.is_foreign and tool.name not in known:
            added.setdefault(tool.name, _definition(tool, is_deferred=True))
    return tuple(added.values())


def callable_tools(tools: Sequence[ToolDefinition], messages: Sequence[MessageBody]) -> tuple[ToolDefinition, ...]:
    """The tools in the header, then the deferred ones that the conversation refers to."""
    referred = {block.tool_name for block in _all_blocks(messages) if block.type == "tool_reference"}
    referred |= {changed_name(block) for block in _all_blocks(messages) if block.type == "tool_addition"}
    shown = [tool for tool in tools if not tool.is_deferred]
    return (*shown, *(tool for tool in tools if tool.is_deferred and tool.name in referred))


def changed_name(block: BlockBody) -> str | None:
    """The name of the tool that a block adds or removes; None if it has none."""
    if block.tool is None:
        return None
    return block.tool.name if block.tool.definition is None else block.tool.definition.name


def shown_reference(name: str, tools: Mapping[str, ToolDefinition]) -> str:
    """The definition of a referenced tool, in the form in which chat templates list tools."""
    tool = tools.get(name)
    if tool is None:
        return f"The tool {name} is not available."
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    if tool.description is None:
        del function["description"]
    return to_json({"type": "function", "function": function}).decode()


def tool_choice(asked: ToolChoiceBody | None, tools: Sequence[ToolDefinition]) -> ToolChoice:
    """The tool choice. Raises InvalidRequest for an undeclared tool."""
    if asked is None:
        return ToolChoice()
    choice = ToolChoice(is_parallel=not asked.disable_parallel_tool_use)
    if asked.type in ("none", "auto"):
        return replace(choice, mode="none" if asked.type == "none" else "auto")
    if not tools:
        raise InvalidRequest(f"tool_choice {asked.type} needs tools", param="tool_choice")
    if asked.type == "any":
        return replace(choice, mode="required")
    if all(asked.name != tool.name for tool in tools):
        raise InvalidRequest(f"tool_choice.name: there is no tool {asked.name!r}", param="tool_choice.name")
    return replace(choice, mode="required", names=(asked.name or "",))


def _definition(tool: ToolBody, *, is_deferred: bool) -> ToolDefinition:
    return ToolDefinition(
        tool.name, tool.description, tool.input_schema or no_parameters(), bool(tool.strict), is_deferred
    )


def _all_blocks(messages: Sequence[MessageBody]) -> Iterator[BlockBody]:
    """Every block of a conversation, nested ones included."""
    for message in messages:
        yield from _blocks_in(message.content)


def _blocks_in(content: str | list[BlockBody] | None) -> Iterator[BlockBody]:
    for block in content if isinstance(content, list) else ():
        yield block
        yield from _blocks_in(block.content)
