"""Events as chunks and as one object."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from headrace.api.answer_encoder import AnswerHeading, server_sent
from headrace.api.openai_answer import ChatAnswer
from headrace.types.events import (
    DecodedLogprob,
    DecodedPromptLogprobs,
    Event,
    Finished,
    FinishReason,
    Reasoning,
    Started,
    Text,
    ToolArguments,
    ToolCallStart,
    Usage,
)
from headrace.types.media import Route

HEADING = AnswerHeading(id="chatcmpl-1", model="m")
EVENTS: list[Event] = [
    Started(7),
    Reasoning("hm"),
    Reasoning(" so"),
    Text("\n"),
    Text("yes"),
    Finished(FinishReason.LENGTH, Usage(7, 5, 3, 2, num_drafted_tokens=5, num_accepted_tokens=3, route=Route.MEDIA)),
]
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 3, "route": "media"},
    "completion_tokens_details": {
        "reasoning_tokens": 2,
        "accepted_prediction_tokens": 3,
        "rejected_prediction_tokens": 2,
    },
}


def chunks(events: list[Event] = EVENTS, answer: ChatAnswer | None = None) -> list[dict[str, Any]]:
    answer = answer or ChatAnswer(HEADING)
    return [chunk for event in events for chunk in answer.chunks(event)]


def score(token_id: int, data: bytes | None, *top: DecodedLogprob, logprob: float = -0.5) -> DecodedLogprob:
    return DecodedLogprob(token_id, (data or b"<end>").decode(errors="replace"), data, logprob, 1, top)


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


def test_usage_stands_in_a_chunk_of_its_own_without_choices() -> None:
    assert all("usage" not in chunk for chunk in chunks())
    last = ChatAnswer(HEADING).usage_chunk(EVENTS[-1].usage)
    assert (last["choices"], last["usage"]) == ([], USAGE)


def test_all_chunks_carry_one_id_and_satisfy_the_official_types() -> None:
    answer = ChatAnswer(HEADING)
    for chunk in [answer.empty_chunk(), *chunks(answer=answer), answer.usage_chunk(EVENTS[-1].usage)]:
        parsed = ChatCompletionChunk.model_validate(chunk, strict=True)
        assert (parsed.id, parsed.model, parsed.created) == ("chatcmpl-1", "m", HEADING.created)


def test_a_ping_is_a_chunk_that_says_nothing() -> None:
    choice = ChatAnswer(HEADING).empty_chunk()["choices"][0]
    assert (choice["delta"], choice["finish_reason"]) == ({}, None)


def test_a_ping_never_belongs_to_a_choice_that_has_ended() -> None:
    answer = ChatAnswer(HEADING, 3)
    for choice, pinged in ((0, 1), (2, 1), (1, 0)):
        list(answer.chunks(Finished(FinishReason.STOP, Usage(1, 1), choice)))
        assert answer.empty_chunk()["choices"][0]["index"] == pinged


def test_a_whole_answer_holds_what_the_stream_said() -> None:
    answer = ChatAnswer(HEADING).whole(EVENTS)
    ChatCompletion.model_validate(answer, strict=True)
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("\nyes", "hm so")
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"] == USAGE
    assert "prompt_logprobs" not in answer


def test_choices_are_told_apart_by_their_index() -> None:
    events: list[Event] = [
        Started(2),
        Text("b", 1),
        Reasoning("hm", 0),
        Finished(FinishReason.STOP, Usage(2, 1), 1),
        Text("a", 0),
        Finished(FinishReason.LENGTH, Usage(2, 3), 0),
    ]
    streamed = chunks(events, ChatAnswer(HEADING, 2))
    assert [chunk["choices"][0]["index"] for chunk in streamed] == [0, 1, 1, 0, 1, 0, 0]
    assert [chunk["choices"][0]["delta"].get("role") for chunk in streamed[:2]] == ["assistant", "assistant"]
    whole = ChatAnswer(HEADING, 2).whole(events)
    ChatCompletion.model_validate(whole, strict=True)
    assert [(each["index"], each["message"]["content"], each["finish_reason"]) for each in whole["choices"]] == [
        (0, "a", "length"),
        (1, "b", "stop"),
    ]
    assert "reasoning_content" not in whole["choices"][1]["message"]
    assert whole["usage"]["completion_tokens"] == 3


def test_log_probabilities_stand_with_the_text_that_they_came_with() -> None:
    smile = "😀".encode()
    events: list[Event] = [
        Started(1),
        Text("a", logprobs=(score(1, b"a", score(1, b"a"), score(2, b"b", logprob=float("-inf"))),)),
        Text("😀", logprobs=(score(3, smile[:1]), score(4, smile[1:]))),
        Finished(FinishReason.STOP, Usage(1, 4), logprobs=(score(5, None),)),
    ]
    streamed = chunks(events)
    for chunk in streamed:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    told = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    assert [each and len(each["content"]) for each in told] == [None, 1, 2, 1]
    assert told[1]["content"][0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "b", "logprob": -9999.0, "bytes": [98]},
        ],
    }
    assert sum((entry["bytes"] for entry in told[2]["content"]), []) == list(smile)
    assert (told[3]["content"][0]["token"], told[3]["content"][0]["bytes"]) == ("<end>", None)
    whole = ChatAnswer(HEADING, includes_logprobs=True).whole(events)
    ChatCompletion.model_validate(whole, strict=True)
    assert whole["choices"][0]["logprobs"]["content"] == sum((each["content"] for each in told[1:]), [])


def test_log_probabilities_that_were_asked_for_are_a_list_even_without_tokens() -> None:
    whole = ChatAnswer(HEADING, includes_logprobs=True).whole([Started(1), Finished(FinishReason.STOP, Usage(1, 0))])
    assert whole["choices"][0]["logprobs"] == {"content": [], "refusal": None}


def test_a_prompts_log_probabilities_are_told_by_token_id() -> None:
    first = DecodedLogprob(7, "<s>", None, None, None)
    second = DecodedLogprob(8, "x", b"x", -2.0, 3, (DecodedLogprob(9, "y", b"y", -0.5, 1),))
    whole = ChatAnswer(HEADING).whole([Started(2), DecodedPromptLogprobs(0, (first, second)), *EVENTS[1:]])
    ChatCompletion.model_validate(whole)
    assert whole["prompt_logprobs"] == [
        None,
        {
            "9": {"logprob": -0.5, "rank": 1, "decoded_token": "y"},
            "8": {"logprob": -2.0, "rank": 3, "decoded_token": "x"},
        },
    ]


def test_a_choice_that_did_not_finish_is_no_answer() -> None:
    with pytest.raises(ValueError, match="Finished"):
        ChatAnswer(HEADING, 2).whole(EVENTS)
    with pytest.raises(ValueError, match="Finished"):
        ChatAnswer(HEADING).whole(EVENTS[:-1])


def test_an_answer_without_thinking_has_no_field_for_it() -> None:
    message = ChatAnswer(HEADING).whole([Started(1), EVENTS[-1]])["choices"][0]["message"]
    assert message["content"] == ""
    assert "reasoning_content" not in message


def test_the_thinking_field_has_the_name_that_the_server_gives_it() -> None:
    answer = ChatAnswer(HEADING, reasoning_field="reasoning")
    assert chunks(answer=answer)[1]["choices"][0]["delta"] == {"reasoning": "hm"}
    answer = ChatAnswer(HEADING, reasoning_field="reasoning")
    assert answer.whole(EVENTS)["choices"][0]["message"]["reasoning"] == "hm so"


CALLS: list[Event] = [
    Started(7),
    Reasoning("hm"),
    ToolCallStart(0, "call_a", "f"),
    ToolArguments(0, '{"x": '),
    ToolArguments(0, "1}"),
    ToolCallStart(1, "call_b", "g"),
    ToolArguments(1, "{}"),
    Finished(FinishReason.TOOL_CALLS, Usage(7, 5)),
]


def test_a_calls_id_and_name_come_first_then_its_arguments_in_pieces() -> None:
    streamed = chunks(CALLS)
    assert [chunk["choices"][0]["delta"] for chunk in streamed[2:-1]] == [
        {"tool_calls": [{"index": 0, "id": "call_a", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
        {"tool_calls": [{"index": 1, "id": "call_b", "type": "function", "function": {"name": "g", "arguments": ""}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
    ]
    assert streamed[-1]["choices"][0]["finish_reason"] == "tool_calls"
    for chunk in streamed:
        ChatCompletionChunk.model_validate(chunk, strict=True)


def test_the_whole_of_a_call_is_its_pieces_joined_and_there_is_no_content() -> None:
    answer = ChatAnswer(HEADING).whole(CALLS)
    ChatCompletion.model_validate(answer, strict=True)
    message = answer["choices"][0]["message"]
    assert message["content"] is None
    assert message["reasoning_content"] == "hm"
    assert message["tool_calls"] == [
        {"id": "call_a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"id": "call_b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


def test_text_before_a_call_is_kept() -> None:
    message = ChatAnswer(HEADING).whole([Started(7), Text("Let me see."), *CALLS[2:]])["choices"][0]["message"]
    assert (message["content"], len(message["tool_calls"])) == ("Let me see.", 2)


def test_calls_of_different_choices_are_counted_apart() -> None:
    both = [replace(event, choice=choice) for event in CALLS[2:] for choice in (0, 1)]
    whole = ChatAnswer(HEADING, 2).whole([Started(7), *both])
    for choice in whole["choices"]:
        assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ['{"x": 1}', "{}"]
    streamed = chunks([Started(7), *both], ChatAnswer(HEADING, 2))
    starts = [each["choices"][0]["index"] for each in streamed if "id" in str(each["choices"][0]["delta"])]
    assert starts == [0, 1, 0, 1]


def test_no_character_of_a_text_can_end_a_line_of_the_stream() -> None:
    text = "a\nb\rc\x0b\x0c\x1c\x85\u2028\u2029é😀"
    sent = server_sent({"text": text})
    assert sent.endswith(b"\n\n")
    assert len(sent.decode().splitlines()) == 2
    assert json.loads(sent.decode().removeprefix("data: ")) == {"text": text}
    assert "é😀".encode() in sent
