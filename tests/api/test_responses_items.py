"""Input items become the turns of a chat, and come back as they are listed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from api.responses_calls import Remembered, read, refusal
from hypothesis import given
from hypothesis import strategies as st

from headrace.api.responses_items import listed_items, read_items
from headrace.api.responses_turns import chat_turns, encode_reasoning
from headrace.errors import InvalidRequest, NotFound
from headrace.types.chat import ChatMessage, MediaPart, TextPart, ToolCall

PIXEL = "data:image/png;base64,AAAA"


def turns(*items: dict[str, Any]) -> tuple[ChatMessage, ...]:
    return read(input=list(items)).request.messages


def call(call_id: str, name: str = "f", arguments: str = "{}", **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **fields}


def output(call_id: str, said: Any = "done") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": said}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def asked(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "input_text", "text": text}]}


def text(role: Any, *texts: str, **fields: Any) -> ChatMessage:
    return ChatMessage(role, tuple(TextPart(each) for each in texts), **fields)


def test_roles_and_shapes_of_messages() -> None:
    assert turns(
        {"role": "developer", "content": "a"},
        {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "b"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "c"}, {"type": "text", "text": "d"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "e"},
        {"role": "assistant", "content": "f"},
    ) == (
        text("system", "a"),
        text("system", "b"),
        text("user", "c", "d"),
        text("assistant", "no"),
        text("user"),
        text("assistant", "e"),
        text("assistant", "f"),
    )


def test_thinking_text_and_calls_that_follow_each_other_are_one_turn() -> None:
    assert turns(asked("go"), thought("hm"), said("I call"), call("1"), call("2"), output("1"), output("2")) == (
        text("user", "go"),
        text("assistant", "I call", reasoning="hm", tool_calls=(ToolCall("1", "f", "{}"), ToolCall("2", "f", "{}"))),
        text("tool", "done", tool_call_id="1", name="f"),
        text("tool", "done", tool_call_id="2", name="f"),
    )


def test_thinking_or_text_after_a_call_begins_another_turn() -> None:
    first = ToolCall("1", "f", "{}")
    assert turns(call("1"), thought("hm"), said("a")) == (
        text("assistant", tool_calls=(first,)),
        text("assistant", "a", reasoning="hm"),
    )
    assert turns(call("1"), said("a")) == (text("assistant", tool_calls=(first,)), text("assistant", "a"))
    assert turns(said("a"), thought("hm"), asked("b")) == (
        text("assistant", "a"),
        text("assistant", reasoning="hm"),
        text("user", "b"),
    )


def test_thinking_is_read_from_its_text_else_from_what_we_sealed_else_from_its_summary() -> None:
    summary = [{"type": "summary_text", "text": "short"}]
    for item, expected in (
        ({"content": [{"text": "long"}], "encrypted_content": encode_reasoning("other"), "summary": summary}, "long"),
        ({"encrypted_content": encode_reasoning("grüße 🎉"), "summary": summary}, "grüße 🎉"),
        ({"encrypted_content": "gAAAA of another server", "summary": summary}, "short"),
        ({"encrypted_content": "headrace:!", "summary": summary}, "short"),
        ({"content": [{"text": "a"}, {"text": "b"}], "encrypted_content": None}, "a\nb"),
    ):
        assert turns({"type": "reasoning", **item}, said("x")) == (text("assistant", "x", reasoning=expected),)
    assert turns({"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}, asked("x")) == (text("user", "x"),)
    assert turns(thought("a"), thought("b"), said("x")) == (text("assistant", "x", reasoning="a\nb"),)


def test_arguments_stay_as_they_came_also_broken_ones() -> None:
    (turn,) = turns(call("1", arguments='{"file_path": "hello.txt'))
    assert turn.tool_calls == (ToolCall("1", "f", '{"file_path": "hello.txt'),)


def test_calls_in_a_namespace_and_of_custom_tools_read_as_the_model_wrote_them() -> None:
    custom = {"type": "custom_tool_call", "call_id": "2", "name": "apply_patch", "input": '*** "Begin"\n'}
    result = {"type": "custom_tool_call_output", "call_id": "2", "output": "ok"}
    assistant, tool = turns(call("1", "close_agent", namespace="multi_agent_v1"), custom, result)
    assert [each.name for each in assistant.tool_calls] == ["multi_agent_v1__close_agent", "apply_patch"]
    assert json.loads(assistant.tool_calls[1].arguments) == {"input": '*** "Begin"\n'}
    assert tool == text("tool", "ok", tool_call_id="2", name="apply_patch")


def test_results_may_hold_pictures() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": PIXEL, "detail": "high"}]
    assert turns(output("1", parts)) == (
        ChatMessage("tool", (TextPart("a"), MediaPart("image", PIXEL)), tool_call_id="1"),
    )
    linked = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}]}
    assert turns(linked) == (ChatMessage("user", (MediaPart("image", PIXEL),)),)


def test_calls_that_clients_carried_out_are_shown_under_their_own_name() -> None:
    action = {"type": "exec", "command": ["ls"]}
    assert turns(
        {"type": "local_shell_call", "call_id": "1", "action": action},
        {"type": "local_shell_call_output", "id": "1", "output": "a.txt"},
        {"type": "shell_call_output", "call_id": "2", "output": [{"stdout": "b"}]},
    ) == (
        text("assistant", tool_calls=(ToolCall("1", "local_shell", json.dumps(action)),)),
        text("tool", "a.txt", tool_call_id="1", name="local_shell"),
        text("tool", '[{"stdout": "b"}]', tool_call_id="2"),
    )


def test_what_other_servers_did_by_themselves_is_left_out_and_named() -> None:
    read_call = read(input=[{"type": "web_search_call", "id": "ws_1", "status": "completed"}, asked("x")])
    assert read_call.request.messages == (text("user", "x"),)
    assert read_call.ignored == ("input[].web_search_call",)


def test_a_reference_stands_for_an_item_that_was_there_before() -> None:
    remembered = Remembered(items=[{**said("before"), "id": "msg_1"}])
    for reference in ({"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}):
        assert read(remembered, input=[reference, asked("x")]).request.messages[0] == text("assistant", "before")
    with pytest.raises(NotFound):
        read(remembered, input=[{"type": "item_reference", "id": "msg_2"}])


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "compaction", "encrypted_content": "x"}, "input[1].type"),
        ({"type": "computer_call", "call_id": "1"}, "input[1].type"),
        ({"type": "of_tomorrow"}, "input[1].type"),
        ({"type": 3}, "input[1].type"),
        ({}, "input[1].type"),
        ({"role": "tool", "content": "x"}, "input[1].role"),
        ({"role": "user", "content": 3}, "input[1].content"),
        ({"role": "user", "content": [{"text": "x"}]}, "input[1].content[0].type"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[1].content[0].text"),
        ({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}, "input[1].content[0].image_url"),
        ({"role": "user", "content": [{"type": "input_file", "file_data": "x"}]}, "input[1].content[0]"),
        ({"role": "user", "content": [{"type": "smell", "text": "x"}]}, "input[1].content[0].type"),
        ({"type": "function_call", "call_id": "1", "name": "f"}, "input[1].arguments"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input[1].call_id"),
        ({"type": "function_call", "call_id": "1", "name": "f", "arguments": {}}, "input[1].arguments"),
        ({"type": "function_call_output", "call_id": "1"}, "input[1].output"),
        ({"type": "custom_tool_call", "call_id": "1", "name": "f"}, "input[1].input"),
        ({"type": "reasoning", "content": "x"}, "input[1].content"),
        ({"type": "local_shell_call"}, "input[1].call_id"),
        ({"type": "item_reference"}, "input[1].id"),
    ],
)
def test_a_wrong_item_is_refused_by_its_place(item: dict[str, Any], param: str) -> None:
    assert refusal(input=[asked("x"), item]).param == param


def test_places_of_a_request_that_goes_on_are_counted_in_its_own_input() -> None:
    remembered = Remembered({"resp_1": [asked("a"), said("b")]})
    error = refusal(remembered, previous_response_id="resp_1", input=[{"role": "user", "content": 1}])
    assert error.param == "input[0].content"


def test_listed_items_have_ids_types_and_parts() -> None:
    first, second, third = listed_items(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "id": "msg_own"}, output("1")]
    )
    assert first["id"].startswith("msg_")
    assert (first["type"], first["content"]) == ("message", [{"type": "input_text", "text": "a"}])
    assert (second["id"], second["content"]) == ("msg_own", [{"type": "output_text", "text": "b"}])
    assert third["id"].startswith("fco_")


LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
VALUES = LEAVES | st.dictionaries(st.sampled_from(["url", "a"]), LEAVES) | st.lists(LEAVES, max_size=2)
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["input_text", "output_text", "refusal", "input_image", "input_file", "reasoning_text"])},
    optional={"text": LEAVES, "refusal": LEAVES, "image_url": VALUES, "detail": LEAVES},
)
KINDS = st.sampled_from(
    [
        *("message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"),
        *("reasoning", "item_reference", "local_shell_call", "local_shell_call_output", "web_search_call", "other"),
    ]
)
FIELDS = {
    **dict.fromkeys(("id", "call_id", "name", "namespace", "arguments", "input", "encrypted_content"), LEAVES),
    "role": st.sampled_from(["user", "assistant", "system", "developer", "tool", 1]),
    **dict.fromkeys(("content", "output", "summary"), LEAVES | st.lists(PARTS, max_size=3)),
    "action": VALUES,
}
ITEMS = st.fixed_dictionaries({}, optional={"type": KINDS | LEAVES, **FIELDS})


@given(st.lists(ITEMS, max_size=6))
def test_any_items_are_either_read_or_refused_by_their_place(items: list[dict[str, Any]]) -> None:
    try:
        messages = read(input=items).request.messages
    except (InvalidRequest, NotFound) as error:
        assert error.param is not None
        assert error.param.startswith("input")
        return
    assert all(message.role in ("system", "user", "assistant", "tool") for message in messages)
    # What was understood once is understood again when it is part of a history.
    assert chat_turns(read_items(listed_items(items), "{}")) == messages


WORDS = st.text("abc", min_size=1, max_size=3)
SOUND = st.one_of(
    WORDS.map(asked),
    WORDS.map(said),
    WORDS.map(thought),
    WORDS.map(lambda word: call("1", word)),
    WORDS.map(lambda word: output("1", word)),
)


def words_of(message: ChatMessage) -> list[str]:
    """What a turn says, in the order in which it says it."""
    texts = [part.text for part in message.content if isinstance(part, TextPart)]
    calls = [call.name for call in message.tool_calls]
    return [*(message.reasoning or "").split("\n"), *texts, *calls]


def words_in(item: dict[str, Any]) -> str:
    part = item.get("content") or [{"text": item.get("name") or item.get("output")}]
    return str(part[0]["text"])


@given(st.lists(SOUND, min_size=1, max_size=12))
def test_every_word_of_a_conversation_stays_in_its_order(items: list[dict[str, Any]]) -> None:
    told = [word for message in turns(*items) for word in words_of(message) if word]
    assert told == [words_in(item) for item in items]
