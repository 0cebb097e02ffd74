"""Messages and tools of a Messages body.

An assistant's turn keeps its thinking, text and calls; the template orders them. A user's turn becomes one message per
tool result and one for everything between them.

Tools of other types than the client's run on Anthropic's servers or are known to its models only. Agents send them
along with their own, so they are ignored and reported, not refused.

A deferred tool is not in the prompt's header: each newly found one would change everything before the conversation. It
is rendered where the conversation refers to it or adds it, and may be called from there on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic_core import to_json

from headrace.api.anthropic_body import (
    BLOCKS_WITHOUT_EFFECT,
    UNPARSED_INPUT,
    BlockBody,
    MessageBody,
    SourceBody,
    ToolBody,
    ToolChoiceBody,
)
from headrace.api.json_body import required
from headrace.api.openai_tools import MAX_CALLS, no_parameters, refuse_repeated
from headrace.errors import InvalidRequest, UnsupportedField
from headrace.types.chat import ChatMessage, ContentPart, MediaPart, TextPart, ToolCall, ToolChoice, ToolDefinition

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


def declared_tools(tools: Sequence[ToolDefinition], messages: Sequence[MessageBody]) -> tuple[ToolDefinition, ...]:
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
    for message in messages:
        yield from _blocks_in(message.content)


def _blocks_in(content: str | list[BlockBody] | None) -> Iterator[BlockBody]:
    for block in content if isinstance(content, list) else ():
        yield block
        yield from _blocks_in(block.content)


_FAILED = TextPart("The tool call failed:")


class ChatMessages:
    """Translates messages. tools: those that a tool reference may name, by name.

    Every method raises InvalidRequest and UnsupportedField with the path of a block.
    """

    def __init__(self, tools: Mapping[str, ToolDefinition]) -> None:
        self._tools = tools

    def system(self, content: str | Sequence[BlockBody] | None) -> Iterator[ChatMessage]:
        parts = self._parts(content or "", "system")
        if parts:
            yield ChatMessage("system", parts)

    def turn(self, message: MessageBody, path: str) -> Iterator[ChatMessage]:
        if message.role == "assistant":
            yield self._assistant(message, f"{path}.content")
        elif message.role == "system":
            yield ChatMessage("system", self._parts(message.content, f"{path}.content"))
        else:
            yield from self._user(message, f"{path}.content")

    def _user(self, message: MessageBody, path: str) -> Iterator[ChatMessage]:
        content: list[ContentPart] = []
        results = 0
        for block, where in _blocks(message.content, path):
            if block.type != "tool_result":
                content += self._part(block, where)
                continue
            if content:
                yield ChatMessage("user", tuple(content))
            content = []
            results += 1
            yield self._result(block, where)
        if content or not results:
            yield ChatMessage("user", tuple(content))

    def _result(self, block: BlockBody, path: str) -> ChatMessage:
        parts = self._parts(block.content or "", f"{path}.content")
        param = f"{path}.tool_use_id"
        call = required(block.tool_use_id, param)
        return ChatMessage("tool", (_FAILED, *parts) if block.is_error else parts, tool_call_id=call, param=param)

    def _assistant(self, message: MessageBody, path: str) -> ChatMessage:
        content: list[ContentPart] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        for block, where in _blocks(message.content, path):
            if block.type == "thinking":
                thoughts.append(required(block.thinking, f"{where}.thinking"))
            elif block.type == "tool_use":
                name = required(block.name, f"{where}.name")
                if len(calls) == MAX_CALLS:
                    raise InvalidRequest(f"{path} must hold at most {MAX_CALLS} tool_use blocks", param=path)
                calls.append(ToolCall(required(block.id, f"{where}.id"), name, _arguments(block.input)))
            else:
                content += self._part(block, where)
        return ChatMessage("assistant", tuple(content), "\n".join(filter(None, thoughts)) or None, tuple(calls))

    def _parts(self, content: str | Sequence[BlockBody], path: str) -> tuple[ContentPart, ...]:
        if isinstance(content, str):
            return (TextPart(content),) if content else ()
        return tuple(part for block, where in _blocks(content, path) for part in self._part(block, where))

    def _part(self, block: BlockBody, path: str) -> Iterator[ContentPart]:
        match block.type:
            case "text":
                if text := required(block.text, f"{path}.text"):
                    yield TextPart(text)
            case "image":
                yield MediaPart("image", _media_source(_source(block, path), f"{path}.source"), param=f"{path}.source")
            case "document":
                yield from self._document(_source(block, path), f"{path}.source")
            case "tool_reference":
                name = required(block.tool_name, f"{path}.tool_name")
                yield TextPart(shown_reference(name, self._tools))
            case "tool_addition":
                name = required(changed_name(block), f"{path}.tool.name")
                yield TextPart(shown_reference(name, self._tools))
            case "tool_removal":
                name = required(changed_name(block), f"{path}.tool.name")
                yield TextPart(f"The tool {name} is not available any more.")
            case other if other not in BLOCKS_WITHOUT_EFFECT:
                raise UnsupportedField(f"{path}.type: {other} blocks are not supported here", param=f"{path}.type")

    def _document(self, source: SourceBody, path: str) -> Iterator[ContentPart]:
        if source.type == "text":
            yield TextPart(required(source.data, f"{path}.data"))
        elif source.type == "content":
            yield from self._parts(source.content or "", f"{path}.content")
        else:
            raise UnsupportedField(f"{path}.type: only documents of text are supported", param=f"{path}.type")


def _blocks(content: str | Sequence[BlockBody], path: str) -> Iterator[tuple[BlockBody, str]]:
    """The blocks and their paths; a plain text is one block."""
    if isinstance(content, str):
        yield BlockBody(type="text", text=content), path
        return
    for index, block in enumerate(content):
        yield block, f"{path}[{index}]"


def _arguments(given: Any) -> str:
    unparsed = given.get(UNPARSED_INPUT) if isinstance(given, dict) else None
    if isinstance(unparsed, dict) and isinstance(unparsed.get("raw"), str):
        return str(unparsed["raw"])
    return "" if given is None else to_json(given).decode()


def _source(block: BlockBody, path: str) -> SourceBody:
    if not isinstance(block.source, SourceBody):
        raise InvalidRequest(f"{path}.source should be an object", param=f"{path}.source")
    return block.source


def _media_source(source: SourceBody, path: str) -> str:
    if source.type == "url":
        return required(source.url, f"{path}.url")
    if source.type != "base64":
        raise UnsupportedField(f"{path}.type: {source.type} is not supported", param=f"{path}.type")
    media_type = required(source.media_type, f"{path}.media_type")
    return f"data:{media_type};base64,{required(source.data, f'{path}.data')}"
