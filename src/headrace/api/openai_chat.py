"""POST /v1/chat/completions: its body and its translation to a ChatRequest.

Fields are declared here and in openai_sampling.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from headrace.api.ids import new_id
from headrace.api.json_body import JsonBody, StrictBody, check, ignored_names, read_object, unknown_fields
from headrace.api.openai_messages import ChatMessageBody, chat_message, refuse_too_many
from headrace.api.openai_sampling import (
    MAX_LOGPROBS,
    NEUTRAL_VALUES,
    WITHOUT_EFFECT,
    Call,
    ChunkedBody,
    check_stream,
    chunked_call,
    chunked_options,
    requested_max_tokens,
)
from headrace.api.openai_structure import StructureBody, answer_structure
from headrace.api.openai_tools import (
    ChatToolBody,
    ToolsBody,
    refuse_large_arguments,
    tool_choice,
    tool_definitions,
)
from headrace.errors import InvalidRequest, UnsupportedField
from headrace.types.chat import ChatRequest
from headrace.types.model import ModelTraits

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class PromptBody(StrictBody):
    """The fields that make the prompt."""

    messages: Annotated[list[ChatMessageBody], Field(fail_fast=True, min_length=1)]
    tools: Annotated[list[ChatToolBody], Field(fail_fast=True, max_length=4096)] | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ChatCompletionBody(ChunkedBody, StructureBody, ToolsBody, PromptBody):
    """The supported fields."""

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **NEUTRAL_VALUES,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "add_special_tokens": (False,),
        "audio": (),
        "best_of": (1,),
        "chat_template": (),
        "documents": ([],),
        "echo": (False,),
        "mm_processor_kwargs": ({},),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "web_search_options": (),
    }
    # No open model's template reads verbosity.
    without_effect: ClassVar[frozenset[str]] = WITHOUT_EFFECT | {"verbosity"}

    max_completion_tokens: Annotated[int | None, Field(ge=0)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    thinking_token_budget: Annotated[int | None, Field(ge=0, lt=2**31)] = None


def read_chat_completion(body: JsonBody, model: ModelTraits) -> Call[ChatRequest]:
    """Parse and validate a body. Raises InvalidRequest, UnsupportedField with the field's path as its param.

    A chat of more messages than the context has tokens raises ContextTooLong before validation.
    """
    value = read_object(body)
    refuse_too_many(value.get("messages"), model.max_model_len)
    parsed = check(ChatCompletionBody, value)
    check_stream(parsed)
    prompt = chat_prompt(parsed, new_id("chatcmpl-"))
    request = replace(
        prompt,
        tool_choice=tool_choice(parsed, prompt.tools),
        structure=answer_structure(parsed),
        thinking_budget=parsed.thinking_token_budget,
        options=chunked_options(parsed, model.defaults, _max_tokens(parsed), _num_logprobs(parsed)),
    )
    return chunked_call(parsed, request, ignored_names(unknown_fields(parsed)))


def chat_prompt(parsed: PromptBody, request_id: str) -> ChatRequest:
    """A request with the prompt's fields only."""
    messages = tuple(chat_message(message, index) for index, message in enumerate(parsed.messages))
    refuse_large_arguments(messages, "messages")
    return ChatRequest(
        request_id=request_id,
        messages=messages,
        tools=tool_definitions(parsed.tools or ()),
        enable_thinking=_enable_thinking(parsed),
        reasoning_effort=_option("reasoning_effort", parsed.reasoning_effort, parsed.chat_template_kwargs),
        template_options=_template_options(parsed.chat_template_kwargs or {}),
        continue_final_message=_continues(parsed),
    )


def _max_tokens(parsed: ChatCompletionBody) -> int | None:
    names = ("max_tokens", "max_completion_tokens", "n_predict")
    return requested_max_tokens({name: getattr(parsed, name) for name in names})


def _num_logprobs(parsed: ChatCompletionBody) -> int | None:
    if parsed.logprobs:
        return parsed.top_logprobs or 0
    if parsed.top_logprobs:
        raise InvalidRequest("top_logprobs is only allowed when logprobs is true", param="top_logprobs")
    return None


def _option(name: str, field: Any, options: Mapping[str, Any] | None) -> Any:
    """A value from the body or chat_template_kwargs, which must agree."""
    option = (options or {}).get(name)
    if field is not None and option is not None and field != option:
        raise InvalidRequest(f"{name} and chat_template_kwargs.{name} contradict each other", param=name)
    return option if field is None else field


def _enable_thinking(parsed: PromptBody) -> bool | None:
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


def _continues(parsed: PromptBody) -> bool:
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
