"""Events as a stream of Anthropic's, and as one message."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from headrace.api.answer_encoder import AnswerHeading
from headrace.api.anthropic_answer import MessagesAnswer
from headrace.errors import GenerationFailed
from headrace.types.events import (
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

HEADING = AnswerHeading(id="msg_1", model="m")
EVENTS: list[Event] = [
    Started(7, Route.MEDIA),
    Reasoning("hm"),
    Reasoning(" so"),
    Text("Let me"),
    Text(" see."),
    ToolCallStart(0, "call_a", "f"),
    ToolArguments(0, '{"x": '),
    ToolArguments(0, "1}"),
    ToolCallStart(1, "call_b", "g"),
    Finished(FinishReason.TOOL_CALLS, Usage(7, 5, 3, 2, route=Route.MEDIA)),
]
SIGNATURE = base64.b64encode(hashlib.sha256(b"hm so").digest()).decode()


def parsed(data: bytes) -> list[dict[str, Any]]:
    """The data of a stream's events; each has its type for a name."""
    events = []
    for event in data.decode().split("\n\n")[:-1]:
        name, value = event.split("\n")
        events.append(json.loads(value.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def stream(events: list[Event]) -> list[dict[str, Any]]:
    answer = MessagesAnswer(HEADING)
    pieces = [piece for event in events for piece in answer.pieces(event)]
    return parsed(b"".join([*pieces, answer.end()]))


def test_a_stream_is_blocks_between_a_start_and_a_stop() -> None:
    start, *inner, end, stop = stream(EVENTS)
    assert start["message"] == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": 7,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "input_tokens_details": {"route": "media"},
            "output_tokens": 0,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }
    deltas = [(each["index"], each.get("content_block") or each.get("delta")) for each in inner]
    assert deltas == [
        (0, {"type": "thinking", "thinking": "", "signature": ""}),
        (0, {"type": "thinking_delta", "thinking": "hm"}),
        (0, {"type": "thinking_delta", "thinking": " so"}),
        (0, {"type": "signature_delta", "signature": SIGNATURE}),
        (0, None),
        (1, {"type": "text", "text": ""}),
        (1, {"type": "text_delta", "text": "Let me"}),
        (1, {"type": "text_delta", "text": " see."}),
        (1, None),
        (2, {"type": "tool_use", "id": "toolu_a", "name": "f", "input": {}}),
        (2, {"type": "input_json_delta", "partial_json": '{"x": '}),
        (2, {"type": "input_json_delta", "partial_json": "1}"}),
        (2, None),
        (3, {"type": "tool_use", "id": "toolu_b", "name": "g", "input": {}}),
        (3, None),
    ]
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert end["usage"] == {
        "input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "input_tokens_details": {"route": "media"},
        "output_tokens": 5,
        "output_tokens_details": {"thinking_tokens": 2},
    }
    assert stop == {"type": "message_stop"}


def test_every_event_satisfies_the_official_types() -> None:
    official: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    for event in stream(EVENTS):
        official.validate_python(event, strict=True)


def test_the_whole_message_is_what_its_stream_comes_to() -> None:
    message = MessagesAnswer(HEADING).whole(EVENTS)
    Message.model_validate(message, strict=True)
    assert message["content"] == [
        {"type": "thinking", "thinking": "hm so", "signature": SIGNATURE},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "toolu_a", "name": "f", "input": {"x": 1}},
        {"type": "tool_use", "id": "toolu_b", "name": "g", "input": {}},
    ]
    assert message["stop_reason"] == "tool_use"
    assert message["usage"] == stream(EVENTS)[-2]["usage"]


def test_a_call_that_broke_off_is_told_as_it_was_written() -> None:
    broken = [Started(1), ToolCallStart(0, "call_a", "f"), ToolArguments(0, '{"x": ')]
    message = MessagesAnswer(HEADING).whole([*broken, Finished(FinishReason.LENGTH, Usage(1, 5))])
    assert message["content"][0]["input"] == {"__unparsedToolInput": {"raw": '{"x": ', "len": 6}}
    assert message["stop_reason"] == "max_tokens"


def test_a_number_that_no_float_holds_is_told_as_it_was_written() -> None:
    said = '{"x": 1e400}'
    events = [Started(1), ToolCallStart(0, "call_a", "f"), ToolArguments(0, said), EVENTS[-1]]
    message = MessagesAnswer(HEADING).whole(events)
    assert message["content"][0]["input"] == {"__unparsedToolInput": {"raw": said, "len": len(said)}}
    json.dumps(message, allow_nan=False)


def test_thinking_that_begins_again_is_a_block_of_its_own_with_its_own_signature() -> None:
    events = [Started(1), Reasoning("a"), Text("b"), Reasoning("c"), EVENTS[-1]]
    first, _, last = MessagesAnswer(HEADING).whole(events)["content"]
    assert (first["thinking"], last["thinking"]) == ("a", "c")
    assert last["signature"] == base64.b64encode(hashlib.sha256(b"c").digest()).decode()


@pytest.mark.parametrize(
    ("finished", "reason", "sequence"),
    [
        (Finished(FinishReason.STOP, Usage(1, 1)), "end_turn", None),
        (Finished(FinishReason.STOP, Usage(1, 1), stop_string="END"), "stop_sequence", "END"),
        (Finished(FinishReason.LENGTH, Usage(1, 1)), "max_tokens", None),
    ],
)
def test_an_end_is_told_in_the_words_of_this_dialect(finished: Finished, reason: str, sequence: str | None) -> None:
    message = MessagesAnswer(HEADING).whole([Started(1), Text("a"), finished])
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    assert stream([Started(1), finished])[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_an_answer_of_nothing_has_no_blocks() -> None:
    message = MessagesAnswer(HEADING).whole([Started(1), Finished(FinishReason.STOP, Usage(1, 0))])
    assert message["content"] == []


def test_a_sign_of_life_and_a_failure_are_events_of_their_own() -> None:
    answer = MessagesAnswer(HEADING)
    assert parsed(answer.ping()) == [{"type": "ping"}]
    assert parsed(answer.failure(GenerationFailed("the row failed"))) == [
        {"type": "error", "error": {"type": "api_error", "message": "the row failed"}}
    ]


def test_an_answer_that_did_not_finish_and_an_event_without_a_form_are_not_swallowed() -> None:
    with pytest.raises(ValueError, match="Finished"):
        MessagesAnswer(HEADING).whole(EVENTS[:-1])
    with pytest.raises(TypeError):
        MessagesAnswer(HEADING).whole([DecodedPromptLogprobs(0, ())])
