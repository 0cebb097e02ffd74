"""Events become named events of a stream, and one object, in the forms that clients read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from api.responses_calls import read
from openai.types.responses import Response, response_stream_event
from pydantic import TypeAdapter

from headrace.api.answer_encoder import AnswerHeading
from headrace.api.responses_answer import ResponsesAnswer
from headrace.errors import EngineDead, GenerationFailed, RequestCancelled
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

HEADING = AnswerHeading("resp_1", "model", created=5)
USAGE = Usage(num_prompt_tokens=7, num_output_tokens=5, num_cached_tokens=2, num_reasoning_tokens=3, route=Route.MEDIA)
STOP = Finished(FinishReason.STOP, USAGE)
CALLED = Finished(FinishReason.TOOL_CALLS, USAGE)

TOOLS = [
    {"type": "function", "name": "f", "parameters": {"type": "object"}},
    {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "close"}]},
    {"type": "custom", "name": "patch"},
]

CHECK = TypeAdapter(response_stream_event.ResponseStreamEvent)


def answer(**fields: Any) -> ResponsesAnswer:
    return ResponsesAnswer(HEADING, read(**fields))


def stream(events: Sequence[Event], form: ResponsesAnswer | None = None, **fields: Any) -> list[dict[str, Any]]:
    """Bodies of the stream's events, each checked to be sent under the name that it has."""
    form = form or answer(**fields)
    sent = b"".join(piece for event in events for piece in form.pieces(event)) + form.end()
    return list(bodies(sent))


def bodies(sent: bytes) -> Iterator[dict[str, Any]]:
    for each in sent.decode().split("\n\n")[:-1]:
        name, data = each.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        yield body


def types(events: Sequence[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_a_stream_of_text_has_every_part_that_some_client_needs() -> None:
    events = stream([Started(7), Text("Hel"), Text("lo"), STOP])
    assert types(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(10))
    added, part_added, first, _, text_done, part_done, item_done, completed = events[2:]
    item_id = added["item"]["id"]
    assert item_id.startswith("msg_")
    assert added["item"] == {
        "id": item_id, "type": "message", "status": "in_progress", "role": "assistant", "content": [],
    }  # fmt: skip
    assert {event["item_id"] for event in events[3:8]} == {item_id}
    assert {event["output_index"] for event in events[2:9]} == {0}
    assert part_added["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    assert (first["delta"], first["content_index"], first["logprobs"]) == ("Hel", 0, [])
    assert text_done["text"] == part_done["part"]["text"] == "Hello"
    assert item_done["item"]["content"] == [part_done["part"]]
    assert item_done["item"]["status"] == "completed"
    assert completed["response"]["output"] == [item_done["item"]]


def test_the_end_has_the_usage_and_the_head_has_not() -> None:
    events = stream([Started(7), Text("a"), STOP])
    assert events[0]["response"]["usage"] is None
    assert (events[0]["response"]["status"], events[0]["response"]["output"]) == ("in_progress", [])
    assert (events[-1]["response"]["status"], events[-1]["response"]["id"]) == ("completed", "resp_1")
    assert events[-1]["response"]["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0, "route": "media"},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 12,
    }


def test_thinking_is_an_item_of_its_own_before_the_text() -> None:
    events = stream([Started(7), Reasoning("hm"), Reasoning("m"), Text("a"), STOP])
    assert types(events)[2:9] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ]
    item = events[8]["item"]
    assert item["id"].startswith("rs_")
    assert (item["summary"], item["encrypted_content"]) == ([], None)
    assert item["content"] == [{"type": "reasoning_text", "text": "hmm"}]
    assert [each["type"] for each in events[-1]["response"]["output"]] == ["reasoning", "message"]
    assert [event["output_index"] for event in events if event["type"] == "response.output_item.done"] == [0, 1]


def test_sealed_thinking_is_read_again_as_it_was() -> None:
    form = answer(include=["reasoning.encrypted_content"])
    whole = form.whole([Started(7), Reasoning("grüße\n🎉"), Text("a"), STOP])
    reasoning, message = whole["output"]
    (turn,) = read(input=[{**reasoning, "content": None}, message]).request.messages
    assert turn.reasoning == "grüße\n🎉"


def test_calls_stream_their_arguments_and_end_whole() -> None:
    events = stream(
        [
            Started(7),
            Text("I call"),
            ToolCallStart(0, "call_a", "f"),
            ToolArguments(0, '{"a":'),
            ToolArguments(0, "1}"),
            ToolCallStart(1, "call_b", "agents__close"),
            ToolArguments(1, "{}"),
            CALLED,
        ],
        tools=TOOLS,
    )
    assert types(events)[8:] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    added, delta, _, done, item = events[8:13]
    assert (added["item"]["arguments"], added["item"]["status"]) == ("", "in_progress")
    assert added["item"]["id"].startswith("fc_")
    assert (delta["delta"], delta["item_id"], delta["output_index"]) == ('{"a":', added["item"]["id"], 1)
    assert done["arguments"] == '{"a":1}'
    assert item["item"] == {
        "id": added["item"]["id"], "type": "function_call", "status": "completed", "call_id": "call_a", "name": "f",
        "arguments": '{"a":1}',
    }  # fmt: skip
    inner = events[16]["item"]
    assert (inner["name"], inner["namespace"], inner["call_id"]) == ("close", "agents", "call_b")
    assert events[-1]["response"]["output"][1:] == [item["item"], inner]


def test_a_custom_call_is_told_as_plain_text() -> None:
    arguments = json.dumps({"input": '*** "Begin"\n+é\n'})
    pieces = [ToolArguments(0, character) for character in arguments]
    events = stream([Started(7), ToolCallStart(0, "call_a", "patch"), *pieces, CALLED], tools=TOOLS)
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == '*** "Begin"\n+é\n'
    assert "" not in deltas
    assert types(events)[-3:] == ["custom_tool_call_input.done", "output_item.done", "completed"]
    done, item, _ = events[-3:]
    assert done["input"] == item["item"]["input"] == '*** "Begin"\n+é\n'
    assert item["item"]["id"].startswith("ctc_")
    assert (item["item"]["type"], item["item"]["name"], item["item"]["call_id"]) == (
        *("custom_tool_call", "patch", "call_a"),
    )


def test_what_a_model_called_comes_back_as_it_wrote_it() -> None:
    events = [
        Started(7), Reasoning("hm"), Text("I call"), ToolCallStart(0, "call_a", "agents__close"),
        ToolArguments(0, '{"target": "x"}'), ToolCallStart(1, "call_b", "patch"), ToolArguments(1, '{"input": "p"}'),
        CALLED,
    ]  # fmt: skip
    (turn,) = read(input=answer(tools=TOOLS).whole(events)["output"]).request.messages
    assert (turn.reasoning, [part.text for part in turn.content]) == ("hm", ["I call"])
    assert [(call.id, call.name, call.arguments) for call in turn.tool_calls] == [
        ("call_a", "agents__close", '{"target": "x"}'),
        ("call_b", "patch", '{"input": "p"}'),
    ]


def test_an_answer_that_was_cut_is_incomplete_with_the_reason_and_the_usage() -> None:
    events = stream([Started(7), Reasoning("hm"), Finished(FinishReason.LENGTH, USAGE)])
    assert events[-1]["type"] == "response.incomplete"
    response = events[-1]["response"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"
    assert response["usage"]["total_tokens"] == 12


def test_an_answer_of_nothing_is_whole() -> None:
    events = stream([Started(7), STOP])
    assert types(events) == ["created", "in_progress", "completed"]
    assert events[-1]["response"]["output"] == []


def test_a_sign_of_life_is_an_event_of_the_api_with_the_next_number() -> None:
    form = answer()
    numbers = [event["sequence_number"] for event in stream([Started(7)], form)]
    (ping,) = bodies(form.ping())
    (later,) = bodies(form.ping())
    assert ping["type"] == later["type"] == "response.in_progress"
    assert (ping["response"]["id"], ping["response"]["status"]) == ("resp_1", "in_progress")
    assert [*numbers, ping["sequence_number"], later["sequence_number"]] == [0, 1, 2, 3]


def test_a_sign_of_life_before_the_first_event_begins_the_stream() -> None:
    form = answer()
    sent = [*bodies(form.ping()), *bodies(form.ping())]
    after = stream([Started(7), STOP], ResponsesAnswer(HEADING, read(), num_sent=form.num_sent))
    assert types([*sent, *after]) == ["created", "in_progress", "in_progress", "completed"]
    assert [event["sequence_number"] for event in (*sent, *after)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (GenerationFailed("it broke"), "failed", "server_error"),
        (EngineDead("it is gone"), "failed", "server_error"),
        (RequestCancelled("somebody ended it"), "cancelled", "request_cancelled"),
    ],
)
def test_a_failure_ends_the_stream_with_what_was_made_until_then(error: Any, status: str, code: str) -> None:
    ended: list[dict[str, Any]] = []
    form = ResponsesAnswer(HEADING, read(), ended.append)
    stream([Started(7), Reasoning("hm"), Text("a")], form)
    *closing, failed = bodies(form.failure(error))
    assert [event["type"] for event in closing] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    assert closing[-1]["item"]["status"] == "incomplete"
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == status
    assert failed["response"]["error"] == {"code": code, "message": error.message}
    assert [(item["type"], item["status"]) for item in failed["response"]["output"]] == [
        ("reasoning", "completed"),
        ("message", "incomplete"),
    ]
    assert failed["response"]["output"][-1]["content"][0]["text"] == "a"
    assert ended == [failed["response"]]
    assert not form.is_open


@pytest.mark.parametrize("asked", [{"summary": "auto"}, {"generate_summary": "concise"}])
def test_thinking_comes_as_a_summary_too_where_one_is_asked_for(asked: dict[str, str]) -> None:
    events = stream([Started(7), Reasoning("h"), Reasoning("m"), Text("a"), STOP], reasoning=asked)
    told = [event for event in events if "summary" in event["type"]]
    assert [event["type"].removeprefix("response.reasoning_summary_") for event in told] == [
        "part.added", "text.delta", "text.delta", "text.done", "part.done",
    ]  # fmt: skip
    texts = [event.get("delta") or event.get("text") or event["part"]["text"] for event in told]
    assert texts == ["", "h", "m", "hm", "hm"]
    item = events[-1]["response"]["output"][0]
    assert item["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert item["content"] == [{"type": "reasoning_text", "text": "hm"}]
    # Sent back, it is not thought twice.
    sent = {"role": "user", "content": "?"}, item, {"role": "assistant", "content": "a"}
    assert read(input=list(sent)).request.messages[1].reasoning == "hm"


@pytest.mark.parametrize("asked", [None, {}, {"summary": None}, {"summary": "none"}])
def test_without_being_asked_for_there_is_no_summary(asked: dict[str, Any] | None) -> None:
    events = stream([Started(7), Reasoning("hm"), STOP], reasoning=asked)
    assert not [event for event in events if "summary" in event["type"]]
    assert events[-1]["response"]["output"][0]["summary"] == []


def test_the_whole_answer_is_what_the_stream_ends_with() -> None:
    events = [Started(7), Reasoning("hm"), Text("a"), ToolCallStart(0, "call_a", "f"), ToolArguments(0, "{}"), CALLED]
    whole = answer(tools=TOOLS).whole(events)
    streamed = stream(events, tools=TOOLS)[-1]["response"]
    for each in (whole, streamed):
        del each["completed_at"]
        for item in each["output"]:
            del item["id"]
    assert whole == streamed


def test_a_whole_answer_needs_its_end() -> None:
    with pytest.raises(ValueError, match="Finished"):
        answer().whole([Started(7), Text("a")])


def test_ids_of_items_are_never_the_same() -> None:
    events = [Started(7), Reasoning("hm"), Text("a"), Reasoning("hm"), Text("b"), STOP]
    ids = [item["id"] for _ in range(3) for item in answer().whole(events)["output"]]
    assert len(set(ids)) == 12


def test_a_response_repeats_what_was_asked() -> None:
    asked = {
        "instructions": "Be brief.", "max_output_tokens": 9, "temperature": 0.5, "top_p": 0.5, "top_logprobs": 1,
        "previous_response_id": None, "metadata": {"k": "v"}, "user": "u", "parallel_tool_calls": False,
        "tools": TOOLS, "tool_choice": {"type": "function", "name": "f"}, "prompt_cache_key": "p",
        "text": {"format": {"type": "json_object"}, "verbosity": "low"}, "store": False,
        "reasoning": {"effort": "low", "summary": "auto"},
    }  # fmt: skip
    response = answer(**asked).response()
    function, space, custom = response["tools"]
    assert function == {**TOOLS[0], "description": None, "strict": False}
    assert (space["description"], space["tools"][0]["strict"], custom) == ("", False, TOOLS[2])
    del asked["tools"]
    assert {name: response[name] for name in asked} == asked
    assert (response["object"], response["created_at"], response["model"]) == ("response", 5, "model")
    assert (response["background"], response["truncation"], response["service_tier"]) == (False, "disabled", "default")


def score(text: str, logprob: float, top: tuple[DecodedLogprob, ...] = ()) -> DecodedLogprob:
    return DecodedLogprob(1, text, text.encode(), logprob, 1, top)


def test_log_probabilities_stand_beside_the_text_each_once() -> None:
    first, last = score("a", -0.5, (score("a", -0.5), score("b", -1.0))), score("", -0.25)
    events = [
        Started(7),
        Text("a", logprobs=(first,)),
        Finished(FinishReason.STOP, USAGE, logprobs=(last,)),
    ]
    a, b = {"token": "a", "logprob": -0.5, "bytes": [97]}, {"token": "b", "logprob": -1.0, "bytes": [98]}
    sent = stream(events, include=["message.output_text.logprobs"])
    assert sent[4]["logprobs"] == [{**a, "top_logprobs": [a, b]}]
    assert [each["token"] for each in sent[5]["logprobs"]] == ["a", ""]
    assert sent[-1]["response"]["output"][0]["content"][0]["logprobs"] == sent[5]["logprobs"]
    assert stream(events)[-1]["response"]["output"][0]["content"][0]["logprobs"] == []


def test_events_that_a_response_cannot_tell_are_a_mistake_of_ours() -> None:
    with pytest.raises(TypeError, match="DecodedPromptLogprobs"):
        stream([DecodedPromptLogprobs(0, ())])


def test_every_event_is_one_that_the_official_sdk_knows() -> None:
    scored = Text("a", logprobs=(score("a", -0.5),))
    form = answer(tools=TOOLS, include=["message.output_text.logprobs", "reasoning.encrypted_content"])
    events = [
        Started(7), Reasoning("hm"), scored, ToolCallStart(0, "call_a", "agents__close"), ToolArguments(0, "{}"),
        ToolCallStart(1, "call_b", "patch"), ToolArguments(1, '{"input": "p"}'), CALLED,
    ]  # fmt: skip
    sent = stream(events, form) + list(bodies(form.ping())) + list(bodies(form.failure(GenerationFailed("no"))))
    assert len({event["type"] for event in sent}) == 16
    for event in sent:
        # Their types are open to further fields, ours must have all of theirs.
        parsed = CHECK.validate_python(event)
        assert parsed.type == event["type"]
    Response.model_validate(sent[-1]["response"])
