"""How every dialect asks for sparse prefill, and how it tells what became of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from api.responses_calls import Remembered
from fakes import describe

from headrace.api.answer_encoder import AnswerHeading, approximations
from headrace.api.anthropic_answer import MessagesAnswer
from headrace.api.anthropic_request import read_messages
from headrace.api.openai_answer import usage_body
from headrace.api.openai_chat import read_chat_completion
from headrace.api.openai_completion import read_completion
from headrace.api.responses_body import read_response
from headrace.errors import InvalidRequest
from headrace.session.settings import check_options
from headrace.types.chat import ChatRequest, CompletionRequest
from headrace.types.events import Finished, FinishReason, SparseUsage, Started, Text, Usage
from headrace.types.model import ModelTraits
from headrace.types.request import Bypass

ANY = ModelTraits()
MESSAGES = [{"role": "user", "content": "hello"}]


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


READERS: dict[str, Callable[..., ChatRequest | CompletionRequest]] = {
    "chat": lambda **fields: read_chat_completion(body(messages=MESSAGES, **fields), ANY).request,
    "completion": lambda **fields: read_completion(body(prompt="x", **fields), ANY).request,
    "response": lambda **fields: read_response(body(input="x", **fields), Remembered({}), ANY).request,
    "message": lambda **fields: read_messages(body(messages=MESSAGES, max_tokens=1, **fields), ANY).request,
}


@pytest.mark.parametrize("dialect", READERS)
def test_every_dialect_has_the_two_fields(dialect: str) -> None:
    def read(**fields: Any) -> tuple[bool | None, float | None]:
        options = READERS[dialect](**fields).options
        return options.sparse_prefill, options.sparse_keep

    assert read() == (None, None)
    assert read(sparse_prefill=True, sparse_keep=0.25) == (True, 0.25)
    assert read(sparse_prefill=False, sparse_keep=1) == (False, 1.0)
    assert read(sparse_prefill="auto") == (None, None)


@pytest.mark.parametrize("dialect", READERS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("sparse_prefill", value) for value in ("yes", 1, [], {})),
        *(("sparse_keep", value) for value in (0, -0.1, 1.1, True, "0.2")),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(dialect: str, field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_options(READERS[dialect](**{field: value}).options, describe())
    assert caught.value.param == field


def test_what_would_make_sense_is_told_whole() -> None:
    with pytest.raises(InvalidRequest, match="^sparse_prefill: input should be true or false or 'auto'$"):
        READERS["chat"](sparse_prefill="yes")


USAGE = Usage(100, 5, 10, sparse=SparseUsage(30, 60, (Bypass.SHORT, Bypass.TOOLS)))
DETAIL = {"kept_tokens": 30, "dropped_tokens": 60, "bypassed": ["short_prompt", "tools"]}


def test_usage_tells_what_was_kept_and_why_more_was_not_dropped() -> None:
    assert approximations(USAGE) == {"sparse_prefill": DETAIL}
    assert usage_body(USAGE)["prompt_tokens_details"] == {
        "cached_tokens": 10,
        "route": "text",
        "sparse_prefill": DETAIL,
    }
    events: Sequence[Any] = [Started(100), Text("a"), Finished(FinishReason.STOP, USAGE)]
    assert MessagesAnswer(AnswerHeading("msg_1", "m")).whole(events)["usage"]["sparse_prefill"] == DETAIL


def test_usage_tells_the_bits_of_keys_and_values_beside_it() -> None:
    usage = replace(USAGE, kv_bits=4)
    assert usage_body(usage)["prompt_tokens_details"] == {
        "cached_tokens": 10,
        "route": "text",
        "kv_bits": 4,
        "sparse_prefill": DETAIL,
    }
    events: Sequence[Any] = [Started(100), Text("a"), Finished(FinishReason.STOP, replace(usage, sparse=None))]
    answer = MessagesAnswer(AnswerHeading("msg_1", "m")).whole(events)["usage"]
    assert answer["kv_bits"] == 4
    assert "sparse_prefill" not in answer


def test_usage_says_nothing_where_it_is_off() -> None:
    assert approximations(Usage(1, 1)) == {}
    assert usage_body(Usage(1, 1))["prompt_tokens_details"] == {"cached_tokens": 0, "route": "text"}
