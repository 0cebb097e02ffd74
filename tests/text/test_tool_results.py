"""Tool results reach the model with the calls that they answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text.test_tool_turns import CALLS, called, render, said, template

from headrace.api.anthropic_request import read_messages
from headrace.api.openai_chat import read_chat_completion
from headrace.api.responses_body import read_response
from headrace.errors import InvalidRequest
from headrace.text.tool_turns import in_call_order, paired_results
from headrace.types.chat import ChatMessage, ChatRequest
from headrace.types.model import ModelTraits

WITHOUT_IDS = f"{CALLS}{{{{ c.function.arguments | tojson }}}};{{% endfor %}}"
ONE_CALL = "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
WITH_IDS = (
    f"{CALLS}{{{{ c.id }}}}={{{{ c.function.arguments | tojson }}}};{{% endfor %}}"
    "{% if m.tool_call_id %}{{ m.tool_call_id }}={% endif %}"
)
CITIES = called(("a", '{"a": "Oslo"}'), ("b", '{"a": "Rome"}'))
COLD, WARM = said("tool", "cold", tool_call_id="a"), said("tool", "warm", tool_call_id="b")


def test_without_ids_in_the_prompt_results_come_in_the_order_of_their_calls() -> None:
    text = render(template(WITHOUT_IDS), CITIES, WARM, COLD)
    assert text.endswith('assistant: {"a": "Oslo"};{"a": "Rome"};\ntool: cold\ntool: warm\n')


def test_with_ids_in_the_prompt_results_come_as_they_were_sent() -> None:
    text = render(template(WITH_IDS), CITIES, WARM, COLD)
    assert text.endswith("tool: b=warm\ntool: a=cold\n")


@pytest.mark.parametrize("shows", ["c.id", "m.tool_call_id"])
def test_ids_on_one_side_only_tell_nothing(shows: str) -> None:
    place = "{{ c.id }}=" if shows == "c.id" else ""
    side = "{{ m.tool_call_id }}=" if shows == "m.tool_call_id" else ""
    body = f"{CALLS}{place}{{{{ c.function.arguments | tojson }}}};{{% endfor %}}{side}"
    text = render(template(body), CITIES, WARM, COLD)
    assert text.index("cold") < text.index("warm")


@given(st.permutations(range(5)), st.integers(0, 5))
def test_results_of_any_order_are_sorted_and_strangers_stay_behind_them(order: list[int], num_left: int) -> None:
    calls = called(*((str(place), "{}") for place in range(5)))
    results = [said("tool", f"r{place}", tool_call_id=str(place)) for place in order][:num_left]
    strangers = [said("tool", "x", tool_call_id="x"), said("tool", "y", tool_call_id="y")]
    mixed = [strangers[0], *results, strangers[1]]
    expected = sorted(results, key=lambda result: int(result.tool_call_id or ""))
    assert in_call_order([calls, *mixed, said("user", "so?")]) == (calls, *expected, *strangers, said("user", "so?"))


def ids_of(*messages: ChatMessage) -> list[str | None]:
    return [message.tool_call_id for message in paired_results(messages) if message.role == "tool"]


def test_results_without_ids_answer_the_calls_that_are_left_in_order() -> None:
    turn = called(("a", "{}"), ("b", "{}"), ("c", "{}"))
    one, two, named = said("tool", "1"), said("tool", "2", tool_call_id=""), said("tool", "3", tool_call_id="b")
    assert ids_of(turn, one, two, named) == ["a", "c", "b"]


def test_calls_without_ids_or_with_equal_ones_get_their_own_and_each_result_comes_once() -> None:
    for sent in ("", "same"):
        turn = called((sent, '{"a": "Oslo"}'), (sent, '{"a": "Rome"}'))
        results = said("tool", "cold", tool_call_id=sent), said("tool", "warm", tool_call_id=sent)
        paired, first, second = paired_results((turn, *results))
        assert [call.id for call in paired.tool_calls] == [first.tool_call_id, second.tool_call_id]
        assert first.tool_call_id != second.tool_call_id
        text = render(
            template(ONE_CALL + WITHOUT_IDS),
            turn,
            *results,
        )
        assert text.endswith('assistant: {"a": "Oslo"};\ntool: cold\nassistant: {"a": "Rome"};\ntool: warm\n')


def test_an_id_that_a_later_turn_has_again_means_the_later_call() -> None:
    turn = called(("a", '{"a": 1}'))
    paired = paired_results((turn, said("tool", "one", tool_call_id="a"), turn, said("tool", "two", tool_call_id="a")))
    assert [message.name for message in paired if message.role == "tool"] == ["add", "add"]


def test_made_up_ids_do_not_change_when_the_conversation_goes_on() -> None:
    turn = called(("", "{}"), ("", "{}"))
    results = said("tool", "one"), said("tool", "two")
    longer = paired_results((turn, *results, turn, *results))
    assert longer[:3] == paired_results((turn, *results))
    assert len({call.id for message in longer for call in message.tool_calls}) == 4


def test_a_late_result_answers_the_call_of_an_earlier_turn() -> None:
    paired = paired_results((CITIES, COLD, called(("c", "{}")), said("tool", "3", tool_call_id="c"), WARM))
    assert [message.name for message in paired if message.role == "tool"] == ["add"] * 3
    with pytest.raises(InvalidRequest, match="already has a result"):
        paired_results((CITIES, COLD, called(("c", "{}")), COLD))


def test_many_calls_of_one_id_and_their_results_take_no_more_than_linear_work() -> None:
    """Twice as many compare no more than about twice as often."""

    def num_comparisons(number: int) -> int:
        count = 0

        class Id(str):
            __slots__ = ()

            def __eq__(self, other: object) -> bool:
                nonlocal count
                count += 1
                return str.__eq__(self, other)

            __hash__ = str.__hash__

        turn = called(*((Id("same"), "{}") for _ in range(number)))
        paired_results((turn, *(said("tool", "x", tool_call_id=Id("same")) for _ in range(number))))
        return count

    assert num_comparisons(400) < 3 * num_comparisons(200)


CHAT_CALLS = [{"id": None, "type": "function", "function": {"name": "f", "arguments": "{}"}}]
CHAT: list[dict[str, Any]] = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": CHAT_CALLS}]
NULL = {"role": "tool", "content": "1", "tool_call_id": None}


def chat(*messages: dict[str, Any]) -> ChatRequest:
    return read_chat_completion(json.dumps({"messages": messages}).encode(), ModelTraits()).request


def anthropic(*results: str) -> ChatRequest:
    uses = [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]
    told = [{"type": "tool_result", "tool_use_id": each, "content": "1"} for each in results]
    body = {"messages": [{"role": "assistant", "content": uses}, {"role": "user", "content": told}]}
    return read_messages(json.dumps(body).encode(), ModelTraits()).request


def responses(*results: str) -> ChatRequest:
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    told = [{"type": "function_call_output", "call_id": each, "output": "1"} for each in results]
    return read_response(json.dumps({"input": [call, *told]}).encode(), None, ModelTraits()).request


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (chat(*CHAT, NULL, NULL), "messages[3].tool_call_id"),
        (chat(CHAT[0], NULL), "messages[1].tool_call_id"),
        (anthropic("a", "a"), "messages[1].content[1].tool_use_id"),
        (responses("a", "a"), "input[2].call_id"),
    ],
)
def test_a_result_too_many_is_refused_with_its_path(request_: ChatRequest, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        paired_results(request_.messages)
    assert refused.value.param == param


def test_a_result_for_each_call_is_taken_by_every_api() -> None:
    for asked in (chat(*CHAT, NULL), anthropic("a"), responses("a")):
        assert paired_results(asked.messages)[-1].tool_call_id
