"""Messages of a chat body, in all the forms that clients send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic_core import to_json

from headrace.api.json_body import StrictBody, required
from headrace.api.openai_tools import MAX_CALLS
from headrace.errors import ContextTooLong, InvalidRequest, UnsupportedField
from headrace.types.chat import ChatMessage, ContentPart, MediaPart, Role, TextPart, ToolCall
from headrace.types.media import MediaOptions

_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}

_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
IMAGE_PARTS = frozenset({"image_url", "input_image"})
_VIDEO_PARTS = frozenset({"video_url", "input_video"})
_UNSUPPORTED_PARTS = frozenset({"image", "video", "input_audio", "audio_url", "audio", "file", "input_file"})

# Cache markers and annotations of other servers, which no template renders.
_MARKERS = frozenset({"cache_control", "annotations"})


class UrlBody(StrictBody):
    """Where an image or a video is."""

    # The model decides the resolution.
    without_effect: ClassVar[frozenset[str]] = frozenset({"detail", "format"})

    url: str


class ChatPartBody(StrictBody):
    """A content part; its other fields depend on its type."""

    without_effect: ClassVar[frozenset[str]] = _MARKERS | {"detail"}

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | UrlBody | None = None
    video_url: str | UrlBody | None = None
    min_pixels: int | None = Field(None, ge=1)
    max_pixels: int | None = Field(None, ge=1)
    fps: float | None = Field(None, gt=0, allow_inf_nan=False)
    max_frames: int | None = Field(None, ge=1)
    num_frames: int | None = Field(None, ge=1)


class FunctionCallBody(StrictBody):
    """Name and arguments of a call; arguments given as text are kept as they are, valid JSON or not."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCallBody(StrictBody):
    # Clients send back the deltas that they have joined.
    without_effect: ClassVar[frozenset[str]] = frozenset({"index"})

    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallBody


class ChatMessageBody(StrictBody):
    """One turn. `reasoning_content` and `reasoning` mean the same."""

    without_effect: ClassVar[frozenset[str]] = _MARKERS

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ChatPartBody], Field(fail_fast=True)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCallBody], Field(fail_fast=True, max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    audio: Any = None


def refuse_too_many(messages: object, max_model_len: int | None) -> None:
    """Raise ContextTooLong for more messages than the context has tokens; each takes at least one.

    Applied before validation: validating and rendering a hundred thousand messages takes seconds. The parts and calls
    of a message have the same limit (InvalidRequest).
    """
    if max_model_len is None or not isinstance(messages, list):
        return
    if len(messages) > max_model_len:
        raise ContextTooLong.of_prompt(max_model_len, len(messages), "messages", at_least=True)
    for index, message in enumerate(messages):
        for name in ("content", "tool_calls") if isinstance(message, dict) else ():
            if isinstance(message.get(name), list) and len(message[name]) > max_model_len:
                path = f"messages[{index}].{name}"
                raise InvalidRequest(f"{path} must hold at most {max_model_len} elements", param=path)


def chat_message(message: ChatMessageBody, index: int) -> ChatMessage:
    """Translate one message. Raises InvalidRequest, UnsupportedField with a path under `messages[index]`."""
    path = f"messages[{index}]"
    for name in ("function_call", "audio"):
        if getattr(message, name) is not None:
            raise UnsupportedField(f"{path}.{name} is not supported", param=f"{path}.{name}")
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest(f"{path}.tool_calls: only an assistant makes calls", param=f"{path}.tool_calls")
    return ChatMessage(
        role=_ROLES[message.role],
        content=_content(message, path),
        reasoning=message.reasoning if message.reasoning_content is None else message.reasoning_content,
        tool_calls=tuple(_call(call) for call in message.tool_calls or ()),
        tool_call_id=message.tool_call_id,
        name=message.name,
        param=f"{path}.tool_call_id",
    )


def _call(call: ToolCallBody) -> ToolCall:
    arguments = call.function.arguments
    text = arguments if isinstance(arguments, str) else "" if arguments is None else to_json(arguments).decode()
    return ToolCall(call.id or "", call.function.name, text)


def _content(message: ChatMessageBody, path: str) -> tuple[ContentPart, ...]:
    content = message.content
    if content is None:
        # A refusal's text is in another field.
        content = message.refusal or ""
    if isinstance(content, str):
        return (TextPart(content),) if content else ()
    return tuple(_part(part, f"{path}.content[{index}]") for index, part in enumerate(content))


def _part(part: ChatPartBody, path: str) -> ContentPart:
    if part.type in _UNSUPPORTED_PARTS:
        raise UnsupportedField(f"{path}: {part.type} parts are not supported", param=path)
    if part.type in IMAGE_PARTS:
        return _media_part("image", part, _url(part.image_url, f"{path}.image_url"), path)
    if part.type in _VIDEO_PARTS:
        return _media_part("video", part, _url(part.video_url, f"{path}.video_url"), path)
    if part.type == "refusal":
        return TextPart(required(part.refusal, f"{path}.refusal"))
    if part.type in _TEXT_PARTS:
        return TextPart(required(part.text, f"{path}.text"))
    raise InvalidRequest(f"{path}.type: unknown part type", param=f"{path}.type")


def _media_part(kind: Literal["image", "video"], part: ChatPartBody, source: str, path: str) -> MediaPart:
    options = MediaOptions(part.min_pixels, part.max_pixels, part.fps, part.max_frames, part.num_frames)
    return MediaPart(kind, source, options, f"{path}.{kind}_url")


def _url(place: str | UrlBody | None, path: str) -> str:
    return required(place.url if isinstance(place, UrlBody) else place, path)
