"""Bodies of Anthropic's messages: what is understood, what is refused, and under which name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from fakes import describe

from headrace.api.anthropic_body import MessagesBody
from headrace.api.anthropic_request import read_messages
from headrace.api.error_bodies import anthropic_error
from headrace.api.openai_sampling import Call
from headrace.errors import ContextTooLong, InvalidRequest, UnsupportedField
from headrace.session.settings import check_options
from headrace.types.chat import (
    ChatMessage,
    ChatRequest,
    GenerationOptions,
    MediaPart,
    Structure,
    TextPart,
    ToolCall,
    ToolChoice,
    ToolDefinition,
)
from headrace.types.model import ModelTraits
from headrace.types.request import SamplingParams

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
F = {"name": "f", "description": "does f", "input_schema": SCHEMA}
SWITCHABLE = ModelTraits(thinks=True, switches_thinking=True)
ALWAYS = ModelTraits(thinks=True, switches_thinking=False)
NEVER = ModelTraits(thinks=False, switches_thinking=False)
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


def read(messages: Any = HELLO, model: ModelTraits = SWITCHABLE, **fields: Any) -> Call[ChatRequest]:
    body = {"model": "m", "max_tokens": 9, "messages": messages, **fields}
    return read_messages(json.dumps(body).encode(), model)


def turns(*messages: dict[str, Any], **fields: Any) -> tuple[ChatMessage, ...]:
    return read(list(messages), **fields).request.messages


def refusal(messages: Any = HELLO, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        check_options(read(messages, **fields).request.options, describe())
    return caught.value


def said(role: Any, *texts: str, **fields: Any) -> ChatMessage:
    return ChatMessage(role, tuple(map(TextPart, texts)), **fields)


def test_a_plain_body_leaves_everything_but_thinking_to_the_server() -> None:
    call = read()
    request = call.request
    assert request.messages == (said("user", "hello"),)
    assert replace(request.options, sampling=SamplingParams()) == GenerationOptions(max_tokens=9)
    assert replace(request.options.sampling, seed=0) == SamplingParams()
    assert (request.tools, request.tool_choice, request.structure) == ((), ToolChoice(), None)
    assert (request.enable_thinking, request.thinking_budget, request.reasoning_effort) == (False, None, None)
    assert request.options.session == ""
    assert not request.continue_final_message
    assert (call.model, call.stream, call.ignored) == ("m", False, ())


def test_every_request_has_an_id_of_its_own() -> None:
    first, second = (read().request.request_id for _ in range(2))
    assert first != second
    assert first.startswith("msg_")


def test_what_is_said_about_the_answer_is_read() -> None:
    call = read(
        temperature=0.5, top_p=0.25, top_k=3, stop_sequences=["a", "b"], stream=True, metadata={"user_id": "eve"}
    )
    options = call.request.options
    assert replace(options.sampling, seed=0) == SamplingParams(temperature=0.5, top_p=0.25, top_k=3)
    assert options.stop_strings == ("a", "b")
    assert (options.session, call.stream) == ("eve", True)


def test_a_system_prompt_comes_as_text_or_blocks() -> None:
    blocks = [{"type": "text", "text": "be brief", **EPHEMERAL}, {"type": "text", "text": "be kind"}]
    assert turns(*HELLO, system="be brief") == (said("system", "be brief"), said("user", "hello"))
    assert turns(*HELLO, system=blocks)[0] == said("system", "be brief", "be kind")
    assert turns(*HELLO, system="") == turns(*HELLO, system=[]) == (said("user", "hello"),)


def test_a_system_message_in_mid_conversation_stays_in_its_place() -> None:
    note = {"role": "system", "content": [{"type": "text", "text": "it is noon"}], "output_config": {}}
    call = read([*HELLO, note, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "bye"}])
    assert [message.role for message in call.request.messages] == ["user", "system", "assistant", "user"]
    assert call.request.messages[1] == said("system", "it is noon")
    assert call.ignored == ("messages[].output_config",)


def test_text_alone_and_a_block_of_it_are_the_same() -> None:
    block = {"type": "text", "text": "hello", **EPHEMERAL}
    assert turns({"role": "user", "content": [block]}) == turns(*HELLO)


def test_an_assistants_thinking_text_and_calls_become_one_message() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "redacted_thinking", "data": "xyz"},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"x": 1, "a": "é"}, **EPHEMERAL},
        {"type": "tool_use", "id": "toolu_2", "name": "g", "input": {}},
    ]
    calls = (ToolCall("toolu_1", "f", '{"x":1,"a":"é"}'), ToolCall("toolu_2", "g", "{}"))
    results = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1"}]}
    assert turns(*HELLO, {"role": "assistant", "content": blocks}, results)[1] == said(
        "assistant", "Let me see.", reasoning="hm", tool_calls=calls
    )


def test_arguments_that_were_no_json_come_back_as_the_model_wrote_them() -> None:
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {"__unparsedToolInput": {"raw": '{"x": ', "len": 6}}}
    result = {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "t", "content": "no", "is_error": True}],
    }
    messages = turns(*HELLO, {"role": "assistant", "content": [use]}, result)
    assert messages[1].tool_calls == (ToolCall("t", "f", '{"x": '),)
    assert messages[2] == said("tool", "The tool call failed:", "no", tool_call_id="t")


def test_results_are_messages_of_their_own_and_text_between_them_stays_there() -> None:
    blocks = [
        {"type": "tool_result", "tool_use_id": "1", "content": "one"},
        {"tool_use_id": "2", "type": "tool_result", "content": [{"type": "text", "text": "two"}], "is_error": False},
        {"type": "text", "text": "and now?"},
        {"type": "tool_result", "tool_use_id": "3"},
    ]
    assert turns({"role": "user", "content": blocks}) == (
        said("tool", "one", tool_call_id="1"),
        said("tool", "two", tool_call_id="2"),
        said("user", "and now?"),
        said("tool", tool_call_id="3"),
    )
    assert turns({"role": "user", "content": []}) == (said("user"),)


def test_images_stand_where_they_were_sent_in_turns_and_results() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    link = {"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "look"}, image]}
    assert turns({"role": "user", "content": [result, link, {"type": "text", "text": "what?"}]}) == (
        ChatMessage("tool", (TextPart("look"), MediaPart("image", "data:image/png;base64,AAAA")), tool_call_id="1"),
        ChatMessage("user", (MediaPart("image", "https://a.example/b.png"), TextPart("what?"))),
    )


def test_documents_of_text_are_text() -> None:
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "one"}, "title": "t"}
    blocks = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "two"}]}}
    assert turns({"role": "user", "content": [plain, blocks]}) == (said("user", "one", "two"),)


def test_a_turn_that_the_client_began_is_continued() -> None:
    assert read([*HELLO, {"role": "assistant", "content": "It is"}]).request.continue_final_message


@pytest.mark.parametrize(
    "content",
    [
        "",
        [{"type": "tool_use", "id": "1", "name": "add", "input": {}}],
        [{"type": "text", "text": "So:"}, {"type": "tool_use", "id": "1", "name": "add", "input": {}}],
    ],
)
def test_a_last_turn_that_cannot_be_continued_is_named(content: Any) -> None:
    """The Messages API has no field that asks for it."""
    assert refusal([*HELLO, {"role": "assistant", "content": content}]).param == "messages[1]"


@pytest.mark.parametrize(
    ("fields", "model", "enable_thinking", "ignored"),
    [
        ({}, SWITCHABLE, False, False),
        ({"thinking": {"type": "disabled"}}, SWITCHABLE, False, False),
        ({"thinking": {"type": "adaptive", "display": "updates"}}, SWITCHABLE, True, False),
        ({"thinking": {"type": "between_tools"}}, SWITCHABLE, True, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, SWITCHABLE, True, False),
        ({}, ALWAYS, None, False),
        ({"thinking": {"type": "enabled"}}, ALWAYS, None, False),
        ({"thinking": {"type": "disabled"}}, ALWAYS, None, True),
        ({}, NEVER, None, False),
        ({"thinking": {"type": "disabled"}}, NEVER, None, False),
        ({"thinking": {"type": "adaptive"}}, NEVER, None, False),
        ({"thinking": {"type": "enabled"}}, NEVER, None, True),
    ],
)
def test_thinking_is_switched_where_it_can_be_and_never_refused(
    fields: dict[str, Any], model: ModelTraits, enable_thinking: bool | None, ignored: bool
) -> None:
    call = read(model=model, **fields)
    assert call.request.enable_thinking is enable_thinking
    assert call.ignored == (("thinking",) if ignored else ())


def test_a_budget_is_of_thinking_that_is_asked_for() -> None:
    assert read(thinking={"type": "enabled", "budget_tokens": 2000}).request.thinking_budget == 2000
    assert read(thinking={"type": "disabled", "budget_tokens": 2000}).request.thinking_budget is None


def test_effort_and_form_of_the_answer_are_read() -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    call = read(output_config={"effort": "max", "format": form, "task_budget": {}})
    assert (call.request.reasoning_effort, call.request.structure) == ("max", Structure("json_schema", SCHEMA))
    assert call.ignored == ("output_config.task_budget",)
    older = read(output_format={**form, "strict": True}, thinking={"type": "adaptive", "budget": 1})
    assert older.request.structure == Structure("json_schema", SCHEMA)
    assert older.ignored == ("output_format.strict", "thinking.budget")
    assert [each.request.structure.path for each in (call, older) if each.request.structure is not None] == [
        "output_config.format", "output_format"
    ]  # fmt: skip


def test_the_clients_own_tools_are_read_and_those_that_run_elsewhere_are_named() -> None:
    tools = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "custom", **F, "strict": True, "eager_input_streaming": True, **EPHEMERAL},
        {"name": "g", "mood": 1},
    ]
    call = read(tools=tools)
    assert call.request.tools == (
        ToolDefinition("f", "does f", SCHEMA, strict=True),
        ToolDefinition("g", None, {"type": "object", "properties": {}}),
    )
    assert call.ignored == ("tools[].mood", "tools[].web_search_20250305")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, ToolChoice()),
        ({"type": "auto"}, ToolChoice()),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(is_parallel=False)),
        ({"type": "none"}, ToolChoice("none")),
        ({"type": "any", "disable_parallel_tool_use": False}, ToolChoice("required")),
        ({"type": "tool", "name": "f"}, ToolChoice("required", ("f",))),
    ],
)
def test_a_choice_says_what_may_be_called_and_what_must(asked: Any, expected: ToolChoice) -> None:
    assert read(tools=[F], tool_choice=asked).request.tool_choice == expected


DEFERRED = {"name": "later", "input_schema": SCHEMA, "defer_loading": True}
PLACEHOLDER = {"name": "DeferredToolPlaceholder", "input_schema": {}, "defer_loading": True}
SEARCHED = [
    *HELLO,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "t",
                "content": [
                    {"type": "tool_reference", "tool_name": "later"},
                    {"type": "tool_reference", "tool_name": "gone"},
                ],
            }
        ],
    },
]


def test_a_deferred_tool_is_written_where_it_is_referred_to_and_may_be_called_from_there_on() -> None:
    before = read(HELLO, tools=[DEFERRED, F, PLACEHOLDER]).request
    after = read(SEARCHED, tools=[DEFERRED, F, PLACEHOLDER]).request
    shown = (ToolDefinition("f", "does f", SCHEMA),)
    assert before.tools == shown
    assert after.tools == (*shown, ToolDefinition("later", None, SCHEMA, is_deferred=True))
    definition, missing = (part.text for part in after.messages[2].content if isinstance(part, TextPart))
    assert json.loads(definition) == {"type": "function", "function": {"name": "later", "parameters": SCHEMA}}
    assert missing == "The tool gone is not available."


def test_a_conversation_can_add_tools_and_take_them_away() -> None:
    added = {"name": "new", "description": "d", "input_schema": SCHEMA}
    note = {
        "role": "system",
        "content": [
            {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "later"}},
            {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": added}},
            {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}},
        ],
    }
    request = read([*HELLO, note], tools=[F, DEFERRED, PLACEHOLDER]).request
    assert [(tool.name, tool.is_deferred) for tool in request.tools] == [("f", False), ("later", True), ("new", True)]
    first, second, third = (part.text for part in request.messages[1].content if isinstance(part, TextPart))
    assert json.loads(first)["function"]["name"] == "later"
    assert json.loads(second)["function"] == {"name": "new", "description": "d", "parameters": SCHEMA}
    assert third == "The tool f is not available any more."


def test_tools_that_the_server_would_have_to_search_are_shown() -> None:
    search = {"type": "tool_search_tool_regex_20251119", "name": "search"}
    request = read(HELLO, tools=[search, DEFERRED]).request
    assert request.tools == (ToolDefinition("later", None, SCHEMA),)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].name"),
        ({"messages": [{"role": "system", "content": [{"type": "tool_removal"}]}]}, "messages[0].content[0].tool.name"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": "a"}]}]},
            "messages[0].content[0].source",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "search_result", "source": "a"}]}]},
            "messages[0].content[0].type",
        ),
        ({"system": 5}, "system"),
        ({"system": [{"type": "text", "text": 5}]}, "system[0].text"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences[1]"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"thinking": True}, "thinking"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [F], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [F], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"tools": [F], "tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        ({"stream": 1}, "stream"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_path(fields: dict[str, Any], param: str) -> None:
    error = refusal(**{"messages": HELLO, **fields})
    assert error.param == param
    assert param in error.message


def test_two_tools_of_one_name_are_refused() -> None:
    assert "another tool of this name" in refusal(tools=[F, F]).message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "container_upload"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
            "messages[0].content[0].source.type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]},
            "messages[0].content[0].source.type",
        ),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"compaction": {}}, "compaction"),
    ],
)
def test_what_would_change_the_answer_and_is_not_built_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refusal(**{"messages": HELLO, **fields})
    assert isinstance(error, UnsupportedField)
    assert error.param == param


def test_two_forms_of_one_answer_are_refused_unless_they_are_equal() -> None:
    form, other = ({"type": "json_schema", "schema": schema} for schema in (SCHEMA, True))
    assert refusal(output_config={"format": form}, output_format=other).param == "output_format"
    once, twice = read(output_format=form), read(output_config={"format": form}, output_format=form)
    assert twice.request.structure == once.request.structure is not None


def test_a_thread_is_refused_with_the_details_that_the_sdk_looks_for() -> None:
    details = anthropic_error(refusal(thread={"type": "new"}))["error"]["details"]
    assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert "details" not in anthropic_error(refusal(container="c"))["error"]


def test_a_cache_salt_is_kept() -> None:
    assert read(cache_salt="mine").request.options.cache_salt == "mine"
    assert read().request.options.cache_salt == ""
    assert refusal(cache_salt="").param == "cache_salt"


def test_unknown_fields_are_named_and_those_without_effect_are_not() -> None:
    without = {name: {} for name in MessagesBody.without_effect}
    neutral = {name: values[0] for name, values in MessagesBody.neutral_values.items() if values}
    assert read(**without, **neutral, zeal=1, mood=2).ignored == ("mood", "zeal")


def test_more_messages_than_tokens_are_refused_unread() -> None:
    body = json.dumps({"messages": HELLO * 9}).encode()
    with pytest.raises(ContextTooLong, match="at least 9"):
        read_messages(body, ModelTraits(max_model_len=8))


def test_a_fields_name_means_nothing_where_its_route_has_no_such_field() -> None:
    call = read(min_p=0.5, messages=[{"role": "user", "content": [{"type": "text", "text": "a", "mood": 1}]}])
    assert call.ignored == ("min_p", "messages[].content[].mood")
    assert call.request.options.sampling.min_p == 0
