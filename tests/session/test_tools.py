"""Tool calls in a chat from end to end, over a fake engine."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence

import pytest
from fakes import END, ByteTokenizer, FakeEngine, PlainTemplate, Step, describe, in_options

from headrace.families.family import ModelFamily
from headrace.session.session import Session
from headrace.types.chat import (
    ChatMessage,
    ChatRequest,
    TextPart,
    ToolCall,
    ToolChoice,
    ToolDefinition,
)
from headrace.types.events import Event, Finished, FinishReason, Text, ToolArguments, ToolCallStart

ADD = ToolDefinition("add", None, {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
WRITE = ToolDefinition("write", None, {"type": "object", "properties": {"text": {"type": "string"}}})
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
HERMES = ModelFamily("hermes", tool_format="hermes", think_open="<think>", think_close="</think>")


def events_of(*script: Step, family: ModelFamily = HERMES, **fields: object) -> list[Event]:
    async def collect() -> list[Event]:
        engine = FakeEngine(*script, model=describe(max_model_len=10_000))
        session = Session(engine, ByteTokenizer(), PlainTemplate(), family)
        message = ChatMessage("user", (TextPart("hi"),))
        request = ChatRequest("request-1", (message,), **in_options({"tools": (ADD, WRITE), **fields}))
        return [event async for event in session.chat(request)]

    return asyncio.run(collect())


def arguments(events: Sequence[Event], choice: int = 0) -> str:
    return "".join(e.text for e in events if isinstance(e, ToolArguments) and e.choice == choice)


def text(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


def reasons(events: Sequence[Event]) -> list[FinishReason]:
    return [event.reason for event in events if isinstance(event, Finished)]


def test_a_call_is_told_and_is_why_the_answer_ended() -> None:
    events = events_of("On it.\n" + CALL, (END,))
    (start,) = (event for event in events if isinstance(event, ToolCallStart))
    assert (start.index, start.name, text(events)) == (0, "add", "On it.")
    assert json.loads(arguments(events)) == {"a": 1}
    assert reasons(events) == [FinishReason.TOOL_CALLS]


def test_every_choice_has_calls_of_its_own() -> None:
    events = events_of(CALL, (END,), num_choices=2)
    assert [event.choice for event in events if isinstance(event, ToolCallStart)] == [0, 1]
    assert [json.loads(arguments(events, choice)) for choice in (0, 1)] == [{"a": 1}, {"a": 1}]
    ids = {event.id for event in events if isinstance(event, ToolCallStart)}
    assert len(ids) == 2


def test_a_call_in_an_answer_that_was_cut_does_not_hide_that() -> None:
    assert reasons(events_of(CALL + "tail", max_tokens=len(CALL))) == [FinishReason.LENGTH]


def test_a_stop_string_behind_a_call_ends_the_answer() -> None:
    events = events_of(CALL + "\nDone. And", (END,), stop_strings=(". And",))
    assert (text(events), reasons(events)) == ("Done", [FinishReason.STOP])
    assert events_of(CALL, (END,), stop_strings=("arguments",))[-1].reason is FinishReason.TOOL_CALLS


def test_white_space_before_a_stop_string_is_text() -> None:
    assert text(events_of("Well, \nSTOP", (END,), stop_strings=("STOP",))) == "Well, \n"


@pytest.mark.parametrize("choice", [ToolChoice("none"), ToolChoice(names=("write",))])
def test_a_tool_that_may_not_be_called_is_not(choice: ToolChoice) -> None:
    events = events_of(CALL, (END,), tool_choice=choice)
    assert (text(events), reasons(events)) == (CALL, [FinishReason.STOP])


def test_the_prompt_shows_the_tools_whatever_may_be_called() -> None:
    template = PlainTemplate()

    async def render(choice: ToolChoice) -> None:
        session = Session(FakeEngine("x", (END,)), ByteTokenizer(), template, HERMES)
        message = ChatMessage("user", (TextPart("hi"),))
        async for _ in session.chat(ChatRequest("r", (message,), tools=(ADD,), tool_choice=choice)):
            pass

    for choice in (ToolChoice("none"), ToolChoice("auto")):
        asyncio.run(render(choice))
    assert [request.tools for request in template.requests] == [(ADD,), (ADD,)]


def test_long_arguments_come_in_pieces_while_they_are_written() -> None:
    content = "line\n" * 600
    call = f'<tool_call>\n{{"name": "write", "arguments": {json.dumps({"text": content})}}}\n</tool_call>'
    pieces = [call[start : start + 50] for start in range(0, len(call), 50)]
    events = events_of(*pieces, (END,))
    assert json.loads(arguments(events)) == {"text": content}
    assert sum(isinstance(event, ToolArguments) for event in events) > len(pieces) / 2


def test_broken_calls_are_counted_for_the_status() -> None:
    session = Session(
        FakeEngine('<tool_call>\n{"name": "add"\n</tool_call>', (END,)), ByteTokenizer(), PlainTemplate(), HERMES
    )

    async def count() -> list[int]:
        counts = [(await session.status()).num_malformed_calls]
        for tools in ((ADD,), (), (ADD,)):
            async for _ in session.chat(ChatRequest("r", (ChatMessage("user", (TextPart("hi"),)),), tools=tools)):
                pass
            counts.append((await session.status()).num_malformed_calls)
        return counts

    assert asyncio.run(count()) == [0, 1, 1, 2]


def test_a_broken_call_is_text_and_is_logged_without_what_it_said(caplog: pytest.LogCaptureFixture) -> None:
    broken = '<tool_call>\n{"name": "add", "arguments": {"a": secret}}\n</tool_call>'
    with caplog.at_level(logging.INFO, "headrace.session"):
        events = events_of(broken, (END,))
    assert (text(events), reasons(events)) == (broken, [FinishReason.STOP])
    assert "malformed call" in caplog.text
    assert "secret" not in caplog.text


def test_values_of_a_wrong_type_are_counted_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    tags = ModelFamily("tags", tool_format="qwen_xml")
    both = ToolDefinition("add", None, {"type": "object", "properties": {"a": {"type": "integer"}, "text": {}}})

    def call(text: str) -> str:
        parameters = f"<parameter=text>\n{text}\n</parameter>\n<parameter=a>\nsecret\n</parameter>"
        return f"<tool_call>\n<function=add>\n{parameters}\n</function>\n</tool_call>"

    async def count(script: str) -> tuple[int, int, int]:
        engine = FakeEngine(script, (END,), model=describe(max_model_len=10_000))
        session = Session(engine, ByteTokenizer(), PlainTemplate(), tags)
        request = ChatRequest("r", (ChatMessage("user", (TextPart("hi"),)),), tools=(both,))
        events = [event async for event in session.chat(request)]
        status = await session.status()
        num_calls = sum(isinstance(event, ToolCallStart) for event in events)
        return num_calls, status.num_malformed_calls, status.num_schema_violations

    with caplog.at_level(logging.INFO, "headrace.session"):
        assert asyncio.run(count(call("short"))) == (0, 1, 1)
        # The beginning of a long call has been sent, so it stays one.
        assert asyncio.run(count(call("long " * 300))) == (1, 0, 1)
    assert "a value is no integer" in caplog.text
    assert "secret" not in caplog.text


def test_ids_of_a_family_that_counts_go_on_where_the_conversation_stands() -> None:
    kimi = ModelFamily("kimi", tool_format="kimi_k2")
    written = '<|tool_call_begin|>add<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
    history = (
        ChatMessage("user", (TextPart("hi"),)),
        ChatMessage("assistant", tool_calls=(ToolCall("functions.add:0", "add", "{}"),)),
        ChatMessage("tool", (TextPart("1"),), tool_call_id="functions.add:0"),
    )

    async def collect() -> list[Event]:
        session = Session(FakeEngine(written, (END,)), ByteTokenizer(), PlainTemplate(), kimi)
        return [event async for event in session.chat(ChatRequest("r", history, tools=(ADD,)))]

    assert [event.id for event in asyncio.run(collect()) if isinstance(event, ToolCallStart)] == ["functions.add:1"]
