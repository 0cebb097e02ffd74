"""Normalises a conversation for its chat template, for probes and prompts alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Literal

from headrace.errors import InvalidRequest, UnsupportedField
from headrace.text.template_probe import TemplateTraits
from headrace.text.tool_turns import call_arguments, content_text, fit_tool_turns
from headrace.types.chat import ChatMessage, ContentPart, MediaPart, Role, TextPart, ToolCall, ToolDefinition

SystemNotes = Literal["stable", "hoist"]

# Beginnings of first lines that clients write anew in every session (the one known is Claude Code's). Such a line would
# invalidate the cache of everything after it.
_VOLATILE_LINES = ("x-anthropic-billing-header:",)

# Names under which transformers gives thinking to every template.
_USUAL_REASONING_KEYS = ("reasoning_content", "thinking")

# How a system message is shown on the user's side if it can't be a system message.
_NOTE = "<system-note>\n{text}\n</system-note>"


def normalise(
    messages: tuple[ChatMessage, ...], traits: TemplateTraits, system_notes: SystemNotes
) -> tuple[ChatMessage, ...]:
    """The conversation as the template accepts it; a content is one text part, or parts if it has media, or empty.

    Media lose their sources, which no template shows and which may have megabytes: what is rendered of a message is
    cached under the message.
    Raises InvalidRequest for an empty conversation, UnsupportedField for media that are not a user's or a tool's.
    """
    joined = tuple(map(_with_normal_content, messages))
    without_volatile = _without_volatile_line(joined)
    if not without_volatile:
        raise InvalidRequest("messages must not be empty", param="messages")
    fitted = fit_tool_turns(_place_system_messages(without_volatile, traits, system_notes), traits)
    if traits.alternates_roles:
        fitted = tuple(_with_turns_taken(_merge_turns(fitted), traits))
    if traits.blank:
        fitted = tuple(_with_blanks(fitted, traits.blank))
    if traits.parts_calls:
        fitted = tuple(part for message in fitted for part in _parted(message, traits))
    return _with_system_shown(fitted, traits)


def media_parts(messages: tuple[ChatMessage, ...]) -> tuple[MediaPart, ...]:
    return tuple(part for message in messages for part in message.content if isinstance(part, MediaPart))


def with_system_line(messages: tuple[ChatMessage, ...], line: str) -> tuple[ChatMessage, ...]:
    if messages[0].role != "system":
        return (ChatMessage("system", (TextPart(line),)), *messages)
    return (replace(messages[0], content=(*messages[0].content, TextPart(line))), *messages[1:])


def num_leading_system(messages: Sequence[ChatMessage]) -> int:
    roles = [message.role for message in messages]
    return next((index for index, role in enumerate(roles) if role != "system"), len(roles))


def template_message(message: ChatMessage, traits: TemplateTraits) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": _template_content(message)}
    if message.reasoning is not None:
        fields.update(dict.fromkeys((*traits.reasoning_keys, *_USUAL_REASONING_KEYS), message.reasoning))
    if message.tool_calls:
        fields["tool_calls"] = [_template_call(call, traits) for call in message.tool_calls]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        fields["name"] = message.name
    return fields


def template_tool(tool: ToolDefinition) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters
    return {"type": "function", "function": function}


def _template_content(message: ChatMessage) -> str | list[dict[str, str]]:
    """Text alone as a string, which every template accepts; with media as parts, without their sources."""
    if not media_parts((message,)):
        return content_text(message)
    return [
        {"type": part.kind} if isinstance(part, MediaPart) else {"type": "text", "text": part.text}
        for part in message.content
    ]


def _template_call(call: ToolCall, traits: TemplateTraits) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call_arguments(call.arguments, traits)}
    return {"id": call.id, "type": "function", "function": function}


def _with_normal_content(message: ChatMessage) -> ChatMessage:
    content = message.content
    if not content or (len(content) == 1 and isinstance(content[0], TextPart) and content[0].text):
        return message
    return replace(message, content=_normal_content(message))


def _normal_content(message: ChatMessage) -> tuple[ContentPart, ...]:
    media = media_parts((message,))
    if not media:
        return _as_text_part(content_text(message))
    if message.role not in ("user", "tool"):
        param = media[0].param
        raise UnsupportedField(f"{param}: only messages of a user or a tool may hold media", param=param)
    parts = [replace(part, source="") if isinstance(part, MediaPart) else part for part in message.content]
    return tuple(part for part in parts if isinstance(part, MediaPart) or part.text)


def _as_text_part(text: str) -> tuple[TextPart, ...]:
    return (TextPart(text),) if text else ()


def _without_volatile_line(messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
    if not messages or messages[0].role != "system":
        return messages
    first, *others = messages
    text = content_text(first)
    if not text.startswith(_VOLATILE_LINES):
        return messages
    rest = text.partition("\n")[2]
    return (replace(first, content=_as_text_part(rest)), *others) if rest else tuple(others)


def _place_system_messages(
    messages: tuple[ChatMessage, ...], traits: TemplateTraits, system_notes: SystemNotes
) -> tuple[ChatMessage, ...]:
    if traits.takes_system and not traits.single_system:
        return messages
    num_leading = num_leading_system(messages)
    leading, rest = messages[:num_leading], messages[num_leading:]
    if system_notes == "hoist":
        leading += tuple(message for message in rest if message.role == "system")
        rest = tuple(message for message in rest if message.role != "system")
    # A note stays in its place: moving it to the top would change everything before it.
    rest = tuple(_as_note(message) if message.role == "system" else message for message in rest)
    if not leading:
        return rest
    top = replace(leading[0], content=_as_text_part(_joined(leading)))
    return (top if traits.takes_system else _as_note(top), *rest)


def _as_note(message: ChatMessage) -> ChatMessage:
    return replace(message, role="user", content=_as_text_part(_NOTE.format(text=content_text(message))))


def _merge_turns(messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
    merged: list[ChatMessage] = []
    for role, group in groupby(messages, key=lambda message: message.role):
        turns = tuple(group)
        merged += (_merge(turns),) if role in ("user", "assistant") else turns
    return tuple(merged)


def _with_turns_taken(messages: Iterable[ChatMessage], traits: TemplateTraits) -> Iterator[ChatMessage]:
    """The messages with an empty turn wherever it isn't the turn of the next one's role."""
    turn: Role = "user"
    for message in messages:
        is_call = bool(message.tool_calls)
        if message.role == "system" or ((is_call or message.role == "tool") and not traits.counts_calls):
            yield message
            continue
        if message.role in ("user", "assistant") and message.role != turn and not is_call:
            yield empty_turn(turn, traits)
        yield message
        turn = "user" if message.role == "assistant" else "assistant"


def empty_turn(role: Role, traits: TemplateTraits) -> ChatMessage:
    return ChatMessage(role, _as_text_part(traits.blank))


def _with_blanks(messages: Sequence[ChatMessage], blank: str) -> Iterator[ChatMessage]:
    """The messages with a text in the assistant's empty ones.

    Thinking alone at the end is left to the template, because it can only be continued where it is shown.
    """
    for index, message in enumerate(messages, start=1):
        is_empty = message.role == "assistant" and not message.content and not message.tool_calls
        is_shown = not message.reasoning or index < len(messages)
        yield replace(message, content=_as_text_part(blank)) if is_empty and is_shown else message


def _parted(message: ChatMessage, traits: TemplateTraits) -> tuple[ChatMessage, ...]:
    """Text beside a call as a separate turn."""
    if not message.tool_calls or not message.content:
        return (message,)
    if traits.parts_thoughts:
        return replace(message, tool_calls=()), replace(message, content=(), reasoning=None)
    return replace(message, tool_calls=(), reasoning=None), replace(message, content=())


def _with_system_shown(messages: tuple[ChatMessage, ...], traits: TemplateTraits) -> tuple[ChatMessage, ...]:
    """The messages with the system prompt where the template shows it, before a question."""
    if messages[0].role != "system":
        return messages
    roles = [message.role for message in messages]
    if not traits.takes_lone_system and set(roles) == {"system"}:
        return (*messages, empty_turn("user", traits))
    if not traits.system_needs_question or roles[-1] == "user" or "user" not in roles:
        return messages
    # The last question, so that the prompt begins like the one that ended in this question.
    asked = len(roles) - 1 - roles[::-1].index("user")
    question = replace(messages[asked], content=_merged_content((messages[0], messages[asked])))
    return (*messages[1:asked], question, *messages[asked + 1 :])


def _merge(turns: tuple[ChatMessage, ...]) -> ChatMessage:
    if len(turns) == 1:
        return turns[0]
    return replace(
        turns[0],
        content=_merged_content(turns),
        reasoning="\n\n".join(turn.reasoning for turn in turns if turn.reasoning) or None,
        tool_calls=tuple(call for turn in turns for call in turn.tool_calls),
    )


def _merged_content(turns: tuple[ChatMessage, ...]) -> tuple[ContentPart, ...]:
    first_media = next((index for index, turn in enumerate(turns) if media_parts((turn,))), len(turns))
    content: list[ContentPart] = [*_as_text_part(_joined(turns[:first_media]))]
    for turn in turns[first_media:]:
        if content and turn.content:
            content.append(TextPart("\n\n"))
        content += turn.content
    return tuple(content)


def _joined(messages: tuple[ChatMessage, ...]) -> str:
    return "\n\n".join(text for text in map(content_text, messages) if text)
