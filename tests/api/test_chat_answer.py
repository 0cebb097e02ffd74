"""Events as chunks and as one object."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from headrace.api.openai_chat_answer import AnswerHeading, answer_chunks, ping_chunk, server_sent, whole_answer
from headrace.types.events import Event, Finished, FinishReason, Reasoning, Started, Text, ToolCallStart, Usage

HEADING = AnswerHeading(id="chatcmpl-1", model="m")
EVENTS: list[Event] = [
    Started(7),
    Reasoning("hm"),
    Reasoning(" so"),
    Text("\n"),
    Text("yes"),
    Finished(FinishReason.LENGTH, Usage(7, 5, 3, 2)),
]
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 3},
    "completion_tokens_details": {"reasoning_tokens": 2},
}


def chunks(include_usage: bool = False, heading: AnswerHeading = HEADING) -> list[dict[str, Any]]:
    return [chunk for event in EVENTS for chunk in answer_chunks(heading, event, include_usage)]


def test_a_stream_says_the_role_then_the_text_then_the_reason() -> None:
    assert [chunk["choices"][0]["delta"] for chunk in chunks()] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"reasoning_content": " so"},
        {"content": "\n"},
        {"content": "yes"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks()] == [None] * 5 + ["length"]


def test_usage_stands_in_one_last_chunk_and_only_when_it_was_asked_for() -> None:
    assert all("usage" not in chunk for chunk in chunks())
    *others, last = chunks(include_usage=True)
    assert all("usage" not in chunk for chunk in others)
    assert (last["choices"], last["usage"]) == ([], USAGE)


def test_all_chunks_carry_one_id_and_satisfy_the_official_types() -> None:
    for chunk in [*chunks(include_usage=True), ping_chunk(HEADING)]:
        parsed = ChatCompletionChunk.model_validate(chunk, strict=True)
        assert (parsed.id, parsed.model, parsed.created) == ("chatcmpl-1", "m", HEADING.created)


def test_a_ping_is_a_chunk_that_says_nothing() -> None:
    choice = ping_chunk(HEADING)["choices"][0]
    assert (choice["delta"], choice["finish_reason"]) == ({}, None)


def test_a_whole_answer_holds_what_the_stream_said() -> None:
    answer = whole_answer(HEADING, EVENTS)
    ChatCompletion.model_validate(answer, strict=True)
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("\nyes", "hm so")
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == USAGE


def test_an_answer_without_thinking_has_no_field_for_it() -> None:
    message = whole_answer(HEADING, [Started(1), EVENTS[-1]])["choices"][0]["message"]
    assert message["content"] == ""
    assert "reasoning_content" not in message


def test_the_thinking_field_has_the_name_that_the_server_gives_it() -> None:
    heading = AnswerHeading(id="x", model="m", reasoning_field="reasoning")
    assert chunks(heading=heading)[1]["choices"][0]["delta"] == {"reasoning": "hm"}
    assert whole_answer(heading, EVENTS)["choices"][0]["message"]["reasoning"] == "hm so"


def test_an_event_that_has_no_form_here_is_not_swallowed() -> None:
    call = ToolCallStart(0, "call_1", "f")
    with pytest.raises(TypeError):
        list(answer_chunks(HEADING, call, False))
    with pytest.raises(TypeError):
        whole_answer(HEADING, [call])


def test_no_character_of_a_text_can_end_a_line_of_the_stream() -> None:
    text = "a\nb\rc\x0b\x0c\x1c\x85\u2028\u2029é😀"
    sent = server_sent({"text": text})
    assert sent.endswith(b"\n\n")
    assert len(sent.decode().splitlines()) == 2
    assert json.loads(sent.decode().removeprefix("data: ")) == {"text": text}
    assert "é😀".encode() in sent
