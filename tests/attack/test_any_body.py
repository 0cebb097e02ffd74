"""Random bodies that no client would send: every answer is a success or a refusal that names the field."""

from __future__ import annotations

import json
import string
from typing import Any

import httpx
from attack.in_process import Wire
from attack.inputs import CHAT, COMPLETIONS, MESSAGES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.api.anthropic_body import MessagesBody
from headrace.api.openai_chat import ChatCompletionBody
from headrace.api.openai_completion import CompletionBody
from headrace.api.openai_messages import ChatMessageBody

GOOD = {"messages": [{"role": "user", "content": "hello"}]}

FIELDS = sorted(
    {*ChatCompletionBody.model_fields, *ChatCompletionBody.neutral_values, *ChatCompletionBody.without_effect}
)
COMPLETION_NAMES = sorted(
    {*CompletionBody.model_fields, *CompletionBody.neutral_values, *CompletionBody.without_effect}
)
MESSAGES_NAMES = sorted({*MessagesBody.model_fields, *MessagesBody.neutral_values, *MessagesBody.without_effect})
NAMES = st.sampled_from(FIELDS) | st.text(max_size=8)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
    | st.sampled_from(["user", "assistant", "text", "high", "none", "auto", "enable_thinking"])
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=8
)
PARTS = st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=8)}) | st.fixed_dictionaries(
    {}, optional={"type": st.sampled_from(["text", "image_url", "refusal", ""]), "text": SCALARS}
)
# Mostly messages that are right, so that the fields beside them and the way back are reached too.
GOOD_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
            "content": st.none() | st.text(max_size=10) | st.lists(st.builds(lambda: {"type": "text", "text": "a"})),
        },
        optional={"reasoning": st.text(max_size=4), "name": st.text(max_size=4), "mood": VALUES},
    ),
    min_size=1,
    max_size=3,
)
ODD_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(ChatMessageBody.model_fields, VALUES),
            "role": st.sampled_from(["user", "assistant", "tool", "function"]),
            "content": st.text(max_size=10) | st.lists(PARTS, max_size=3) | VALUES,
        },
    ),
    max_size=3,
)
# Values that a field may well have, beside any others.
LIKELY = {
    "temperature": st.floats(-0.5, 2.5),
    "top_p": st.floats(-0.5, 1.5),
    "max_tokens": st.integers(-1, 2000),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=4),
    "stop_token_ids": st.lists(st.integers(-1, 300), max_size=3),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "chat_template_kwargs": st.dictionaries(NAMES, SCALARS, max_size=2),
    "logit_bias": st.dictionaries(st.integers(-1, 300).map(str), st.floats(-110, 110), max_size=3),
    "allowed_token_ids": st.lists(st.integers(-1, 300), max_size=3),
    "bad_words": st.lists(st.text(max_size=4), max_size=3),
    "min_tokens": st.integers(-1, 40),
    "n": st.integers(-1, 4),
    "repetition_penalty": st.floats(-0.5, 3),
    "frequency_penalty": st.floats(-2.5, 2.5),
    "prompt_logprobs": st.integers(-1, 22),
    "priority": st.integers(-5, 5),
    **{name: st.sampled_from(neutrals) for name, neutrals in ChatCompletionBody.neutral_values.items() if neutrals},
}
CHAT_LIKELY = {**LIKELY, "logprobs": st.booleans(), "top_logprobs": st.integers(-1, 22)}
COMPLETION_LIKELY = {
    **LIKELY,
    "logprobs": st.integers(-1, 22),
    "max_tokens": st.integers(-1, 40),
    "echo": st.booleans(),
    "best_of": st.integers(0, 4),
    "suffix": st.text(max_size=2),
}
TOKEN_IDS = st.lists(st.integers(-1, 300), max_size=4)
PROMPTS = st.text(max_size=8) | TOKEN_IDS | st.lists(st.text(max_size=4) | TOKEN_IDS, max_size=3) | VALUES

TOOLS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["function", "custom", "web_search_20250305"]) | SCALARS,
            "name": st.sampled_from(["f", "g", ""]),
            "function": st.fixed_dictionaries({"name": st.sampled_from(["f", "g"])}, optional={"parameters": VALUES}),
            "input_schema": VALUES,
            "defer_loading": st.booleans(),
        },
    ),
    max_size=3,
)
CHAT_LIKELY |= {
    "tools": TOOLS,
    "tool_choice": st.sampled_from(["none", "auto", "required", {"type": "function", "function": {"name": "f"}}]),
    "response_format": st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "json_schema"])}, optional={"json_schema": VALUES}
    ),
    "structured_outputs": st.dictionaries(st.sampled_from(["structural_tag", "json", "regex"]), VALUES, max_size=2),
}
BLOCK_TYPES = [
    "text",
    "thinking",
    "redacted_thinking",
    "tool_use",
    "tool_result",
    "image",
    "document",
    "tool_reference",
]
BLOCKS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(BLOCK_TYPES) | st.text(max_size=4)},
        optional={
            "content": VALUES,
            "input": VALUES,
            "is_error": st.booleans() | VALUES,
            "text": st.text(max_size=4),
            "thinking": st.text(max_size=4),
            "id": st.text(max_size=4),
            "name": st.text(max_size=4),
            "tool_use_id": st.text(max_size=4),
            "tool_name": st.sampled_from(["f", "g"]),
            "source": st.dictionaries(st.sampled_from(["type", "data", "url", "media_type", "content"]), VALUES),
        },
    ),
    max_size=3,
)
TURNS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"]), "content": st.text(max_size=6) | BLOCKS},
        optional={"mood": VALUES},
    ),
    min_size=1,
    max_size=3,
)
MESSAGES_LIKELY = {
    "system": st.text(max_size=4) | BLOCKS,
    "tools": TOOLS,
    "tool_choice": st.fixed_dictionaries(
        {"type": st.sampled_from(["auto", "any", "tool", "none"])}, optional={"name": st.sampled_from(["f", "h"])}
    ),
    "thinking": st.fixed_dictionaries({"type": st.sampled_from(["enabled", "disabled", "adaptive"])}),
    "stop_sequences": st.lists(st.text(max_size=3), max_size=4),
    "stream": st.booleans(),
    "max_tokens": st.integers(-1, 2000),
    "output_config": st.dictionaries(st.sampled_from(["effort", "format", "mood"]), VALUES, max_size=2),
}


def few_fields(likely: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    named = st.sampled_from(sorted(likely)).flatmap(lambda name: st.tuples(st.just(name), likely[name]))
    return st.lists(named | st.tuples(NAMES, VALUES), max_size=3).map(dict)


BODIES = st.builds(
    lambda messages, fields: {"messages": messages, **fields}, GOOD_MESSAGES | ODD_MESSAGES, few_fields(CHAT_LIKELY)
) | st.dictionaries(NAMES, VALUES, max_size=3)
COMPLETION_BODIES = st.builds(
    lambda prompt, fields: {"prompt": prompt, **fields}, PROMPTS, few_fields(COMPLETION_LIKELY)
)


def check_answer(response: httpx.Response, body: Any, required: str = "messages") -> None:
    if response.status_code == 200:
        if isinstance(body, dict) and body.get("stream") is True:
            assert response.text.endswith("data: [DONE]\n\n")
            assert "error" not in response.text
        else:
            choices = response.json()["choices"]
            assert [each["index"] for each in choices] == list(range(len(choices)))
            assert all(each["finish_reason"] in ("stop", "length") for each in choices)
        return
    error = response.json()["error"]
    assert 400 <= response.status_code < 500, error
    if isinstance(body, dict):
        name = error["param"].split(".")[0].split("[")[0]
        # The field stands in the body, or it is the one that must.
        assert name in body or name == required
        assert name in error["message"] or error["param"] in error["message"]


@given(BODIES)
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_fields_with_any_values_are_served_or_refused_by_name(body: dict[str, Any]) -> None:
    wire = Wire()
    check_answer(wire.post(json.dumps(body).encode(), CHAT), body)
    wire.check_alive()


@given(st.sampled_from(FIELDS), VALUES)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_one_odd_field_in_a_good_body_is_served_or_refused_by_its_name(name: str, value: Any) -> None:
    body = {**GOOD, name: value}
    response = Wire().post(json.dumps(body).encode(), CHAT)
    check_answer(response, body)
    if response.status_code != 200 and name != "messages":
        assert response.json()["error"]["param"].startswith(name)


@given(st.binary(max_size=200) | st.text(string.printable, max_size=100).map(str.encode))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_refused_and_the_server_lives(content: bytes) -> None:
    wire = Wire()
    response = wire.post(content, CHAT)
    assert response.status_code == 400
    assert "error" in response.json()
    wire.check_alive()


@given(COMPLETION_BODIES)
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_completion_is_served_or_refused_by_name(body: dict[str, Any]) -> None:
    wire = Wire()
    check_answer(wire.post(json.dumps(body).encode(), COMPLETIONS), body, "prompt")
    wire.check_alive()


@given(st.sampled_from(COMPLETION_NAMES), VALUES)
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_one_odd_field_in_a_good_completion_is_served_or_refused_by_its_name(name: str, value: Any) -> None:
    body = {"prompt": "once", name: value}
    response = Wire().post(json.dumps(body).encode(), COMPLETIONS)
    check_answer(response, body, "prompt")
    if response.status_code != 200 and name != "prompt":
        assert response.json()["error"]["param"].startswith(name)


def check_message(response: httpx.Response, body: dict[str, Any]) -> None:
    if response.status_code == 200:
        if body.get("stream") is True:
            assert response.text.endswith('data: {"type":"message_stop"}\n\n')
            assert "error" not in response.text
        else:
            assert response.json()["stop_reason"] in ("end_turn", "max_tokens", "stop_sequence")
        return
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert any(name in message for name in (*body, "messages"))


@given(st.builds(lambda turns, fields: {"messages": turns, **fields}, TURNS, few_fields(MESSAGES_LIKELY)))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_message_is_served_or_refused_by_name(body: dict[str, Any]) -> None:
    wire = Wire()
    check_message(wire.post(json.dumps(body).encode(), MESSAGES), body)
    wire.check_alive()


@given(st.sampled_from(MESSAGES_NAMES), VALUES)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_one_odd_field_in_a_good_message_is_served_or_refused_by_its_name(name: str, value: Any) -> None:
    body = {**GOOD, name: value}
    response = Wire().post(json.dumps(body).encode(), MESSAGES)
    check_message(response, body)
    if response.status_code != 200 and name != "messages":
        assert name in response.json()["error"]["message"]


@given(st.dictionaries(st.sampled_from(["prompt", "messages", "tokens", "model", "tools"]), PROMPTS, max_size=3))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_tokens_are_split_or_joined_or_refused_by_name(body: dict[str, Any]) -> None:
    wire = Wire()
    for path, required in (("/tokenize", "prompt"), ("/detokenize", "tokens")):
        response = wire.post(json.dumps(body).encode(), path)
        assert response.status_code in (200, 400)
        if response.status_code == 400:
            name = response.json()["error"]["param"].split(".")[0].split("[")[0]
            assert name in body or name == required
