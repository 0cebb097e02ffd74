"""Bodies of /tokenize and /detokenize."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.api.openai_models import (
    DetokenizeCall,
    TokenizeCall,
    detokenize_answer,
    read_detokenize,
    read_tokenize,
    tokenize_answer,
)
from headrace.errors import InvalidRequest
from headrace.types.chat import ChatMessage, ChatRequest, TextPart

HELLO = [{"role": "user", "content": "hello"}]


def tokenize(**fields: Any) -> TokenizeCall:
    return read_tokenize(json.dumps(fields).encode())


def detokenize(**fields: Any) -> DetokenizeCall:
    return read_detokenize(json.dumps(fields).encode())


def test_a_text_is_split_as_a_document_unless_told_otherwise() -> None:
    call = tokenize(prompt="hi", model="m", zeal=1)
    assert (call.prompt, call.adds_special_tokens, call.model, call.ignored) == ("hi", True, "m", ("zeal",))
    assert tokenize(prompt="", add_special_tokens=False).adds_special_tokens is False


def test_a_chat_is_read_like_that_of_a_completion() -> None:
    call = tokenize(messages=HELLO, chat_template_kwargs={"enable_thinking": False, "style": 1}, prompt=None)
    assert isinstance(call.prompt, ChatRequest)
    assert call.prompt.messages == (ChatMessage("user", (TextPart("hello"),)),)
    assert (call.prompt.enable_thinking, call.prompt.template_options) == (False, {"style": 1})
    assert call.ignored == ()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a", "messages": HELLO}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": HELLO, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": HELLO, "add_generation_prompt": False}, "add_generation_prompt"),
        ({"messages": HELLO, "tools": [{"type": "function"}]}, "tools[0].function"),
        ({"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ({"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
    ],
)
def test_what_can_not_be_split_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tokenize(**fields)
    assert caught.value.param == param


def test_tokens_are_ids_and_nothing_else() -> None:
    assert detokenize(tokens=[1, 2], zeal=1) == DetokenizeCall((1, 2), None, ("zeal",))
    assert detokenize(tokens=[]).token_ids == ()
    for tokens, param in ((None, "tokens"), ("12", "tokens"), ([1, "2"], "tokens[1]"), ([-1], "tokens[0]")):
        with pytest.raises(InvalidRequest) as caught:
            detokenize(tokens=tokens)
        assert caught.value.param == param


def test_answers_have_the_shapes_that_clients_know() -> None:
    assert tokenize_answer((5, 6), 100) == {"tokens": [5, 6], "count": 2, "max_model_len": 100, "token_strs": None}
    assert detokenize_answer("hi") == {"prompt": "hi"}
