"""Reads the bodies of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.api.anthropic_body import FormatBody, MessagesBody, ThinkingBody
from headrace.api.anthropic_messages import ChatMessages, added_tools, declared_tools, own_tools, tool_choice
from headrace.api.ids import new_id
from headrace.api.json_body import JsonBody, check, ignored_names, read_object, unknown_fields
from headrace.api.openai_messages import refuse_too_many
from headrace.api.openai_sampling import Call, generation_options
from headrace.api.openai_structure import agreed_structure
from headrace.api.openai_tools import refuse_large_arguments
from headrace.errors import InvalidRequest, UnsupportedField
from headrace.types.chat import ChatMessage, ChatRequest, Structure
from headrace.types.model import ModelTraits


def read_messages(body: JsonBody, model: ModelTraits) -> Call[ChatRequest]:
    """Parse and validate a body. Raises InvalidRequest, UnsupportedField with the field's path as its param.

    A chat of more messages than the context has tokens raises ContextTooLong before validation.
    """
    value = read_object(body)
    refuse_too_many(value.get("messages"), model.max_model_len)
    parsed = check(MessagesBody, value)
    return Call(
        request=_request(parsed, model),
        model=parsed.model,
        stream=bool(parsed.stream),
        ignored=_ignored(parsed, model),
    )


def count_answer(num_tokens: int) -> dict[str, Any]:
    return {"input_tokens": num_tokens}


def _request(parsed: MessagesBody, model: ModelTraits) -> ChatRequest:
    tools = own_tools(parsed.tools or ())
    tools += added_tools(parsed.messages, tools)
    declared = declared_tools(tools, parsed.messages)
    thinks = _is_to_think(parsed.thinking)
    messages = _messages(parsed, ChatMessages({tool.name: tool for tool in tools}))
    # The model continues an assistant turn that the client began.
    is_continued = parsed.messages[-1].role == "assistant"
    if is_continued and not messages[-1].can_be_continued:
        path = f"messages[{len(parsed.messages) - 1}]"
        raise InvalidRequest(
            f"{path}: an assistant's message at the end is continued: it needs text, and no tool_use", param=path
        )
    return ChatRequest(
        request_id=new_id("msg_"),
        messages=messages,
        tools=declared,
        tool_choice=tool_choice(parsed.tool_choice, declared),
        structure=_structure(parsed),
        options=replace(
            generation_options(parsed, model.defaults, parsed.max_tokens),
            stop_strings=tuple(parsed.stop_sequences or ()),
            session=(parsed.metadata.user_id if parsed.metadata is not None else None) or "",
        ),
        enable_thinking=thinks if model.switches_thinking else None,
        reasoning_effort=None if parsed.output_config is None else parsed.output_config.effort,
        thinking_budget=parsed.thinking.budget_tokens if parsed.thinking is not None and thinks else None,
        continue_final_message=is_continued,
    )


def _messages(parsed: MessagesBody, translate: ChatMessages) -> tuple[ChatMessage, ...]:
    turns = [
        turn for index, message in enumerate(parsed.messages) for turn in translate.turn(message, f"messages[{index}]")
    ]
    refuse_large_arguments(turns, "messages")
    return (*translate.system(parsed.system), *turns)


def _is_to_think(thinking: ThinkingBody | None) -> bool:
    return thinking is not None and thinking.type != "disabled"


def _structure(parsed: MessagesBody) -> Structure | None:
    newer = parsed.output_config.format if parsed.output_config is not None else None
    forms = ((newer, "output_config.format"), (parsed.output_format, "output_format"))
    return agreed_structure([_json_structure(form, path) for form, path in forms if form is not None])


def _json_structure(form: FormatBody, path: str) -> Structure:
    if form.type != "json_schema":
        raise UnsupportedField(f"{path}.type must be json_schema", param=f"{path}.type")
    if form.schema_ is None:
        raise InvalidRequest(f"{path}.schema is missing", param=f"{path}.schema")
    return Structure("json_schema", form.schema_, path)


def _ignored(parsed: MessagesBody, model: ModelTraits) -> tuple[str, ...]:
    names = unknown_fields(parsed) | {f"tools[].{tool.type}" for tool in parsed.tools or () if tool.is_foreign}
    # Agents stop working if their thinking setting is refused.
    asked = parsed.thinking
    if asked is not None and not model.switches_thinking and asked.type == ("disabled" if model.thinks else "enabled"):
        names.add("thinking")
    return ignored_names(names)
