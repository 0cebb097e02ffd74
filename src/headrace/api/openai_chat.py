"""POST /v1/chat/completions: its body, and what it means.

Types are strict (true is no number, "1" is not 1). What is known and honoured is declared here, what is known and
not honoured in openai_fields.py.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from headrace.api.json_body import check, read_object
from headrace.api.openai_fields import refuse_unbuilt, unknown_fields
from headrace.api.openai_messages import MessageBody, chat_message, unknown_message_fields
from headrace.errors import InvalidRequest, UnsupportedField
from headrace.types.chat import ChatRequest, RequestedSampling, RequestedStop

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]


class StreamOptionsBody(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    # Padding against traffic analysis; there is none here, whatever is asked.
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class ChatCompletionBody(BaseModel):
    """Fields that are honoured. Ranges are OpenAI's where it has the field."""

    model_config = ConfigDict(strict=True)

    messages: Annotated[list[MessageBody], Field(min_length=1)]
    model: str | None = None
    temperature: Annotated[float | None, Field(ge=0, le=2, allow_inf_nan=False)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1, allow_inf_nan=False)] = None
    top_k: Annotated[int | None, Field(ge=-1, lt=2**31)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1, allow_inf_nan=False)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    stop: StopText | Annotated[list[StopText], Field(max_length=64)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]] | None, Field(max_length=1024)] = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptionsBody | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


@dataclass(frozen=True, slots=True)
class ChatCompletionCall:
    """A chat request, and how its client wants the answer.

    model: the name that was asked for. ignored: names of unknown fields, for the `x-headrace-ignored` header.
    """

    request: ChatRequest
    model: str | None
    stream: bool
    include_usage: bool
    ignored: tuple[str, ...]


def read_chat_completion(body: bytes) -> ChatCompletionCall:
    """The call in a body. Raises InvalidRequest, UnsupportedField with the field's path as its param."""
    value = read_object(body)
    refuse_unbuilt(value)
    parsed = check(ChatCompletionBody, value)
    _check_stream_options(parsed)
    request = ChatRequest(
        request_id=f"chatcmpl-{secrets.token_hex(16)}",
        messages=tuple(chat_message(message, index) for index, message in enumerate(parsed.messages)),
        sampling=RequestedSampling(parsed.temperature, parsed.top_p, parsed.top_k, parsed.min_p, parsed.seed),
        stop=_stop(parsed),
        enable_thinking=_enable_thinking(parsed),
        reasoning_effort=_option("reasoning_effort", parsed.reasoning_effort, parsed.chat_template_kwargs),
        template_options=_template_options(parsed.chat_template_kwargs or {}),
        continue_final_message=_continues(parsed),
    )
    return ChatCompletionCall(
        request=request,
        model=parsed.model,
        stream=bool(parsed.stream),
        include_usage=bool(parsed.stream_options and parsed.stream_options.include_usage),
        ignored=unknown_fields(value, ChatCompletionBody.model_fields) + unknown_message_fields(value["messages"]),
    )


def _stop(parsed: ChatCompletionBody) -> RequestedStop:
    asked = {parsed.max_tokens, parsed.max_completion_tokens} - {None}
    if len(asked) > 1:
        message = "max_tokens and max_completion_tokens say different things; send one of them"
        raise InvalidRequest(message, param="max_tokens")
    stop = parsed.stop or ()
    return RequestedStop(
        max_tokens=asked.pop() if asked else None,
        strings=(stop,) if isinstance(stop, str) else tuple(stop),
        token_ids=tuple(parsed.stop_token_ids or ()),
        ignore_eos=bool(parsed.ignore_eos),
    )


def _check_stream_options(parsed: ChatCompletionBody) -> None:
    if parsed.stream_options is None:
        return
    if not parsed.stream:
        raise InvalidRequest("stream_options is only allowed when stream is true", param="stream_options")
    if parsed.stream_options.continuous_usage_stats:
        name = "stream_options.continuous_usage_stats"
        raise UnsupportedField(f"{name} is not supported: usage comes once, in the last chunk", param=name)


def _option(name: str, field: Any, options: Mapping[str, Any] | None) -> Any:
    """A value that may stand in the body or in chat_template_kwargs, but not differently in both."""
    option = (options or {}).get(name)
    if field is not None and option is not None and field != option:
        raise InvalidRequest(f"{name} and chat_template_kwargs.{name} say different things", param=name)
    return option if field is None else field


def _enable_thinking(parsed: ChatCompletionBody) -> bool | None:
    enabled = _option("enable_thinking", parsed.enable_thinking, parsed.chat_template_kwargs)
    if enabled is not None and not isinstance(enabled, bool):
        path = "chat_template_kwargs.enable_thinking"
        raise InvalidRequest(f"{path} must be true or false", param=path)
    return enabled


def _template_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
    effort = options.get("reasoning_effort")
    if effort is not None and not isinstance(effort, str):
        path = "chat_template_kwargs.reasoning_effort"
        raise InvalidRequest(f"{path} must be a string", param=path)
    return {name: option for name, option in options.items() if name not in ("enable_thinking", "reasoning_effort")}


def _continues(parsed: ChatCompletionBody) -> bool:
    continues = bool(parsed.continue_final_message)
    if continues and parsed.messages[-1].role != "assistant":
        message = "continue_final_message needs an assistant message at the end"
        raise InvalidRequest(message, param="continue_final_message")
    if continues and parsed.add_generation_prompt:
        message = "add_generation_prompt and continue_final_message exclude each other"
        raise InvalidRequest(message, param="add_generation_prompt")
    if parsed.add_generation_prompt is False and not continues:
        message = "add_generation_prompt can only be false together with continue_final_message"
        raise UnsupportedField(message, param="add_generation_prompt")
    return continues
