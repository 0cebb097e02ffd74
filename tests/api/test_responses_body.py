"""POST /v1/responses: fields become a chat request, or are refused by their name."""

from __future__ import annotations

from typing import Any

import pytest
from api.responses_calls import Remembered, read, refusal

from headrace.errors import ContextTooLong, PreviousResponseNotFound, UnsupportedField
from headrace.types.chat import ChatMessage, GenerationOptions, Structure, TextPart
from headrace.types.request import SamplingParams

HELLO = ChatMessage("user", (TextPart("hello"),))
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def test_a_text_is_one_turn_of_the_user() -> None:
    call = read()
    assert call.request.messages == (HELLO,)
    assert call.request.request_id.startswith("resp_")
    assert (call.model, call.stream, call.include_usage, call.ignored) == (None, False, False, ())
    assert (call.store, call.includes_logprobs, call.includes_encrypted) == (True, False, False)


def test_each_response_has_an_id_of_its_own() -> None:
    assert len({read().request.request_id for _ in range(50)}) == 50


def test_instructions_stand_before_everything_else() -> None:
    remembered = Remembered({"resp_1": [{"type": "message", "role": "user", "content": "before"}]})
    messages = read(remembered, instructions="Be brief.", previous_response_id="resp_1").request.messages
    assert messages == (
        ChatMessage("system", (TextPart("Be brief."),)),
        ChatMessage("user", (TextPart("before"),)),
        HELLO,
    )
    assert read(instructions="").request.messages == (HELLO,)


def test_a_response_goes_on_from_an_earlier_one_also_without_input() -> None:
    remembered = Remembered({"resp_1": [{"type": "message", "role": "user", "content": "before"}]})
    call = read(remembered, previous_response_id="resp_1", input=None)
    assert call.request.messages == (ChatMessage("user", (TextPart("before"),)),)
    assert call.items == ()
    with pytest.raises(PreviousResponseNotFound):
        read(remembered, previous_response_id="resp_2")


def test_sampling_and_ends_are_those_of_a_chat() -> None:
    asked = read(temperature=0.5, top_p=0.9, top_k=3, seed=7, max_output_tokens=9, stop=["x"], min_p=0.1).request
    sampling = SamplingParams(temperature=0.5, top_p=0.9, top_k=3, seed=7, min_p=0.1)
    assert asked.options == GenerationOptions(sampling, max_tokens=9, stop_strings=("x",))
    assert read(prompt_cache_key="a", user="b").request.options.session == "a"
    assert read(priority=3, cache_salt="s").request.options.priority == 3
    assert read(draft_tokens=2).request.options.max_draft_tokens == 2
    assert read(cache_salt="s").request.options.cache_salt == "s"


def test_the_effort_reaches_the_template_and_a_budget_the_engine() -> None:
    assert read(reasoning={"effort": "none", "summary": "auto"}).request.reasoning_effort == "none"
    assert read(reasoning={}).request.reasoning_effort is None
    assert read(thinking_token_budget=5).request.thinking_budget == 5


@pytest.mark.parametrize(
    ("form", "structure"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Structure("json_object")),
        ({"type": "json_schema", "name": "n", "strict": True, "schema": SCHEMA}, Structure("json_schema", SCHEMA)),
        ({"type": "json_schema", "schema": False}, Structure("json_schema", False)),
        (None, None),
    ],
)
def test_the_form_of_the_text_is_asked_for(form: Any, structure: Structure | None) -> None:
    assert read(text={"format": form, "verbosity": "low"}).request.structure == structure


def test_log_probabilities_are_told_if_included_or_counted() -> None:
    told = read(include=["message.output_text.logprobs"])
    assert (told.includes_logprobs, told.request.options.num_logprobs) == (True, 0)
    counted = read(top_logprobs=4)
    assert (counted.includes_logprobs, counted.request.options.num_logprobs) == (True, 4)
    assert read(top_logprobs=0).request.options.num_logprobs is None


def test_what_is_included_is_known_or_named() -> None:
    call = read(include=["reasoning.encrypted_content", "web_search_call.action.sources", "the.moon"])
    assert call.includes_encrypted is True
    assert call.ignored == ("include[].the.moon",)


def test_a_response_is_not_kept_if_its_client_says_so() -> None:
    assert read(store=False).store is False
    assert read(store=None).store is True


def test_thinking_is_sealed_for_clients_that_ask_for_it_or_have_no_stored_response_to_name() -> None:
    assert read(include=["reasoning.encrypted_content"]).includes_encrypted is True
    assert read(store=False).includes_encrypted is True
    assert read(store=True).includes_encrypted is False


def test_unknown_fields_are_named_and_known_ones_without_effect_are_not() -> None:
    call = read(
        zeal=1,
        text={"format": {"type": "text"}, "mood": 1},
        reasoning={"effort": "low", "zeal": 1},
        client_metadata={"a": "b"},
        truncation="auto",
        service_tier="flex",
        metadata={"k": "v"},
        max_tool_calls=3,
        input=[{"role": "user", "content": "hello", "mood": 1, "phase": "commentary", "id": "msg_1", "status": None}],
    )
    assert call.ignored == ("zeal", "input[].mood", "reasoning.zeal", "text.mood")


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("input", 3, "input"),
        ("input", None, "input"),
        ("input", ["x"], "input[0]"),
        ("input", [], "input"),
        ("instructions", ["x"], "instructions"),
        ("max_output_tokens", -1, "max_output_tokens"),
        ("max_output_tokens", "1", "max_output_tokens"),
        ("temperature", 3, "temperature"),
        ("top_logprobs", 21, "top_logprobs"),
        ("n", 2, "n"),
        ("prompt_logprobs", 1, "prompt_logprobs"),
        ("text", {"format": {"type": "yaml"}}, "text.format"),
        ("text", {"format": {"type": "json_schema"}}, "text.format.schema"),
        ("text", {"format": {"type": "json_schema", "schema": 1}}, "text.format.schema"),
        ("reasoning", {"effort": "a lot"}, "reasoning.effort"),
        ("reasoning", "high", "reasoning"),
        ("tools", {}, "tools"),
        ("store", "no", "store"),
        ("include", "all", "include"),
        ("stream_options", {"include_usage": 1}, "stream_options.include_usage"),
    ],
)
def test_a_wrong_value_is_refused_by_its_path(field: str, value: Any, param: str) -> None:
    assert refusal(**{field: value}).param == param


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("background", True),
        ("conversation", "conv_1"),
        ("conversation", {"id": "conv_1"}),
        ("prompt", {"id": "pmpt_1"}),
        ("context_management", [{"type": "compaction"}]),
        ("messages", [{"role": "user", "content": "hello"}]),
        ("response_format", {"type": "json_object"}),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(field: str, value: Any) -> None:
    error = refusal(**{field: value})
    assert isinstance(error, UnsupportedField)
    assert error.param == field


def test_more_items_than_the_context_has_tokens_are_refused_unread() -> None:
    items = [{"type": "message", "role": "user", "content": "a"}] * 11
    assert len(read(max_model_len=11, input=items).request.messages) == 11
    with pytest.raises(ContextTooLong) as caught:
        read(max_model_len=10, input=items)
    assert caught.value.param == "input"
    assert "maximum context length is 10 tokens" in caught.value.message
