"""Translates input items of /v1/responses into turns of a chat.

The API has one item per message, thought or call; a chat has turns. Consecutive thinking, text and calls, in this
order, are one turn of the assistant, as the model wrote them.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.api.json_body import required
from headrace.api.openai_messages import IMAGE_PARTS
from headrace.api.openai_tools import MAX_CALLS
from headrace.api.responses_items import (
    BUILT_IN_CALLS,
    BuiltInCallItem,
    CallOutputItem,
    Content,
    CustomCallItem,
    FunctionCallItem,
    MessageItem,
    PartBody,
    ReadItem,
    ReasoningItem,
    built_in_arguments,
    built_in_output,
)
from headrace.api.responses_tools import custom_arguments, visible_name
from headrace.errors import InvalidRequest, UnsupportedField
from headrace.types.chat import ChatMessage, ContentPart, MediaPart, TextPart, ToolCall

_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_OTHER_PARTS = frozenset({"input_file", "input_audio", "input_video", "computer_screenshot"})

# Marks an opaque text as ours: another server's can't be read.
_ENCODED_PREFIX = "headrace:"


def chat_turns(items: Sequence[ReadItem]) -> tuple[ChatMessage, ...]:
    """The turns of the items. Raises InvalidRequest, UnsupportedField with a path under an item's."""
    turns = _Turns()
    for item in items:
        turns.add(item)
    return turns.finish()


def encode_reasoning(reasoning: str) -> str:
    """Thinking as `encrypted_content`, for clients that send nothing else of it back. Encoded, not secret."""
    return _ENCODED_PREFIX + base64.b64encode(reasoning.encode()).decode()


def _decode_reasoning(content: str | None) -> str:
    if content is None or not content.startswith(_ENCODED_PREFIX):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_ENCODED_PREFIX), validate=True).decode()
    except ValueError:
        return ""


@dataclass(slots=True)
class _AssistantTurn:
    content: tuple[ContentPart, ...] = ()
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def finish(self) -> ChatMessage:
        return ChatMessage("assistant", self.content, "\n".join(self.thoughts) or None, tuple(self.calls))


class _Turns:
    """Builds turns; the assistant's last one may still grow."""

    def __init__(self) -> None:
        self._turns: list[ChatMessage] = []
        self._open: _AssistantTurn | None = None
        self._names: dict[str, str] = {}

    def add(self, item: ReadItem) -> None:
        match item.body:
            case MessageItem() as message:
                self._add_message(message, item.path)
            case ReasoningItem() as reasoning:
                self._add_reasoning(reasoning)
            case FunctionCallItem() as call:
                name = visible_name(call.name, call.namespace)
                self._add_call(ToolCall(call.call_id, name, call.arguments), item.path)
            case CustomCallItem() as call:
                name = visible_name(call.name, call.namespace)
                self._add_call(ToolCall(call.call_id, name, custom_arguments(call.input)), item.path)
            case CallOutputItem() as output:
                self._add_output(output.call_id, _parts(output.output, f"{item.path}.output"), item.path)
            case BuiltInCallItem() as built_in:
                self._add_built_in(built_in, item)

    def finish(self) -> tuple[ChatMessage, ...]:
        self._close()
        return tuple(self._turns)

    def _add_message(self, message: MessageItem, path: str) -> None:
        content = _parts(message.content, f"{path}.content")
        if message.role != "assistant":
            self._append(ChatMessage("user" if message.role == "user" else "system", content))
            return
        if self._open is not None and (self._open.content or self._open.calls):
            self._close()
        self._assistant().content = content

    def _add_reasoning(self, item: ReasoningItem) -> None:
        thought = "\n".join(part.text for part in item.content or ())
        summary = "\n".join(part.text for part in item.summary or ())
        thought = thought or _decode_reasoning(item.encrypted_content) or summary
        if not thought:
            return
        if self._open is not None and (self._open.content or self._open.calls):
            self._close()
        self._assistant().thoughts.append(thought)

    def _add_call(self, call: ToolCall, path: str) -> None:
        calls = self._assistant().calls
        if len(calls) == MAX_CALLS:
            raise InvalidRequest(f"{path}: a turn must make at most {MAX_CALLS} calls", param=path)
        calls.append(call)
        self._names[call.id] = call.name

    def _add_output(self, call_id: str, content: tuple[ContentPart, ...], path: str) -> None:
        name, param = self._names.get(call_id), f"{path}.call_id"
        self._append(ChatMessage("tool", content, tool_call_id=call_id, name=name, param=param))

    def _add_built_in(self, built_in: BuiltInCallItem, item: ReadItem) -> None:
        call_id = built_in.call_id or built_in.id
        if call_id is None:
            raise InvalidRequest(f"{item.path}.call_id is missing", param=f"{item.path}.call_id")
        if built_in.type in BUILT_IN_CALLS:
            call = ToolCall(call_id, BUILT_IN_CALLS[built_in.type], built_in_arguments(item.sent))
            self._add_call(call, item.path)
        else:
            self._add_output(call_id, _text(built_in_output(item.sent)), item.path)

    def _append(self, turn: ChatMessage) -> None:
        self._close()
        self._turns.append(turn)

    def _assistant(self) -> _AssistantTurn:
        if self._open is None:
            self._open = _AssistantTurn()
        return self._open

    def _close(self) -> None:
        if self._open is not None:
            self._turns.append(self._open.finish())
            self._open = None


def _text(text: str) -> tuple[ContentPart, ...]:
    return (TextPart(text),) if text else ()


def _parts(content: Content, path: str) -> tuple[ContentPart, ...]:
    if content is None or isinstance(content, str):
        return _text(content or "")
    return tuple(_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part(part: PartBody, path: str) -> ContentPart:
    if part.type in _TEXT_PARTS:
        return TextPart(required(part.text, f"{path}.text"))
    if part.type == "refusal":
        return TextPart(required(part.refusal, f"{path}.refusal"))
    if part.type in IMAGE_PARTS:
        url = part.image_url
        source = required(url if isinstance(url, str | None) else url.url, f"{path}.image_url")
        return MediaPart("image", source, param=f"{path}.image_url")
    if part.type in _OTHER_PARTS:
        raise UnsupportedField(f"{path}: {part.type} parts are not supported", param=path)
    raise InvalidRequest(f"{path}.type: unknown part type", param=f"{path}.type")
