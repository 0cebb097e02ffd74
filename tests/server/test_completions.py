"""/v1/completions, and what chats share with it, through the real application."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fakes import BEGIN, END, FakeEngine, app_over, describe, fake_logprobs, fake_session

from headrace.config import ServerConfig
from headrace.errors import Overloaded

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def post(path: str, engine: FakeEngine, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    app = app_over(fake_session(engine), ServerConfig())

    async def exchange() -> httpx.Response:
        transport = httpx.ASGITransport(app, client=("203.0.113.7", 1234))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(path, json=body, headers=headers)

    return asyncio.run(exchange())


def stream_data(response: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in response.text.split("\n") if line]


def streamed_choices(response: httpx.Response) -> list[dict[str, Any]]:
    *chunks, done = stream_data(response)
    assert done == "[DONE]"
    return [choice for chunk in chunks for choice in json.loads(chunk)["choices"]]


def test_a_prompt_is_continued() -> None:
    engine = FakeEngine("upon a time", (END,))
    answer = post(COMPLETIONS, engine, prompt="Once ", max_tokens=50).json()
    assert engine.requests[0].prompt == (BEGIN, *b"Once ")
    assert (answer["object"], answer["model"]) == ("text_completion", "fake-model")
    assert answer["choices"] == [{"index": 0, "text": "upon a time", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"]["prompt_tokens"] == 6
    assert answer["usage"]["completion_tokens"] == 11 + 1  # and the end token


def test_without_a_word_a_completion_has_sixteen_tokens() -> None:
    (choice,) = post(COMPLETIONS, FakeEngine("0123456789abcdefghi"), prompt="x").json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("0123456789abcdef", "length")


def test_several_prompts_with_several_choices_are_one_answer() -> None:
    engine = FakeEngine("a", "b")
    response = post(COMPLETIONS, engine, prompt=["x", "yz"], n=2, echo=True)
    answer = response.json()
    assert [each["text"] for each in answer["choices"]] == ["xab", "xab", "yzab", "yzab"]
    assert [each["index"] for each in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"] == {
        "prompt_tokens": 2 + 3,
        "completion_tokens": 8,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 0, "route": "text"},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_interleaves_choices_and_ends_each_once(path: str) -> None:
    prompt = HELLO if path == CHAT else {"prompt": ["x", "y"]}
    num_choices = 3 if path == CHAT else 6
    engine = FakeEngine("a", "b", (END,))
    response = post(path, engine, **prompt, n=3, stream=True, stream_options={"include_usage": True})
    choices = streamed_choices(response)
    for index in range(num_choices):
        own = [each for each in choices if each["index"] == index]
        texts = [each["delta"].get("content", "") if path == CHAT else each["text"] for each in own]
        assert "".join(texts) == "ab"
        assert [each["finish_reason"] for each in own if each["finish_reason"]] == ["stop"]
        assert own[-1]["finish_reason"] == "stop"
    usage = json.loads(stream_data(response)[-2])
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 3 * num_choices)


def test_a_scored_echo_without_new_tokens_is_the_prompts_own_likelihood() -> None:
    engine = FakeEngine("never")
    (choice,) = post(COMPLETIONS, engine, prompt="ab", max_tokens=0, echo=True, logprobs=1).json()["choices"]
    assert choice["text"] == "ab"
    told = choice["logprobs"]
    assert told["tokens"] == ["<begin>", "a", "b"]
    assert told["token_logprobs"] == [None, *(fake_logprobs(byte, 0).logprob for byte in b"ab")]
    assert told["top_logprobs"] == [None, {"a": told["token_logprobs"][1]}, {"b": told["token_logprobs"][2]}]
    assert told["text_offset"] == [0, 0, 1]
    assert (engine.requests[0].max_tokens, engine.aborted) == (0, [])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_chunk_counts_the_tokens_so_far_if_that_is_asked_for(path: str) -> None:
    prompt = HELLO if path == CHAT else {"prompt": "x"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    engine = FakeEngine("ab", "c", (END,))
    *chunks, _ = stream_data(post(path, engine, **prompt, stream=True, stream_options=options))
    parsed = [json.loads(chunk) for chunk in chunks]
    counted = [chunk["usage"]["completion_tokens"] for chunk in parsed]
    assert counted == ([0, 2, 3, 4, 4] if path == CHAT else [2, 3, 4, 4])
    assert {chunk["usage"]["prompt_tokens"] for chunk in parsed} == {len(engine.requests[0].prompt)}
    assert parsed[-1]["choices"] == []
    *chunks, _ = stream_data(
        post(path, FakeEngine("ab"), **prompt, stream=True, stream_options={"include_usage": True})
    )
    assert ["usage" in json.loads(chunk) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


@pytest.mark.parametrize("steps", [((END,),), ("z",)], ids=["the end at once", "a token"])
def test_an_evaluation_gets_the_scores_of_all_of_its_tokens_whatever_comes_behind_them(steps: tuple[Any, ...]) -> None:
    """lm_eval asks for one token behind the text and takes `token_logprobs[len(context):-1]`."""
    context, scored = (BEGIN, *b"ab"), tuple(b"cd")
    asked = {"max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0, "seed": 1}
    answer = post(COMPLETIONS, FakeEngine(*steps), prompt=[context + scored], **asked).json()
    told = answer["choices"][0]["logprobs"]
    assert told["token_logprobs"][len(context) : -1] == [fake_logprobs(byte, 0).logprob for byte in scored]
    assert len({len(entries) for entries in told.values()}) == 1
    assert answer["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("steps", [("<think>hm</think>\n\nyes",), tuple("<think>hm</think>\n\nyes")])
def test_in_a_stream_content_comes_with_the_scores_of_its_own_tokens(steps: tuple[Any, ...]) -> None:
    choices = streamed_choices(post(CHAT, FakeEngine(*steps, (END,)), **HELLO, logprobs=True, stream=True))
    told = [(each["delta"], each["logprobs"]["content"]) for each in choices if each["logprobs"]]
    texts = [(delta, "".join(entry["token"] for entry in entries)) for delta, entries in told]
    for delta, tokens in texts:
        if text := delta.get("content") or delta.get("reasoning_content"):
            assert tokens == text
    assert "".join(tokens for _, tokens in texts) == "<think>hm</think>\n\nyes<end>"
    assert [tokens for delta, tokens in texts if delta == {}] == ["<think>", "</think>\n\n", "<end>"]


@pytest.mark.parametrize("steps", [("é🎉!",), ("é", "🎉", "!"), tuple(bytes([each]) for each in "é🎉!".encode())])
def test_streamed_log_probabilities_are_those_of_the_whole_answer(steps: tuple[Any, ...]) -> None:
    fields = {**HELLO, "logprobs": True, "top_logprobs": 2}
    whole = post(CHAT, FakeEngine(*steps, (END,)), **fields).json()["choices"][0]["logprobs"]["content"]
    choices = streamed_choices(post(CHAT, FakeEngine(*steps, (END,)), **fields, stream=True))
    streamed = [entry for each in choices if each["logprobs"] for entry in each["logprobs"]["content"]]
    assert streamed == whole
    assert b"".join(bytes(entry["bytes"] or ()) for entry in whole) == "é🎉!".encode()
    assert (whole[-1]["token"], whole[-1]["bytes"]) == ("<end>", None)
    assert all(len(entry["top_logprobs"]) == 2 for entry in whole)
    # A chunk's tokens are whole characters here, so its bytes are its text.
    for each in choices:
        if each["logprobs"]:
            said = b"".join(bytes(entry["bytes"] or ()) for entry in each["logprobs"]["content"])
            assert said.decode() == each["delta"].get("content", "")


def test_a_chats_prompt_can_be_scored() -> None:
    answer = post(CHAT, FakeEngine("a"), **HELLO, prompt_logprobs=1).json()
    told = answer["prompt_logprobs"]
    assert len(told) == answer["usage"]["prompt_tokens"]
    assert told[0] is None
    assert (
        told[1] == {str(ord("s")): {"logprob": -ord("s") / 64, "rank": 1, "decoded_token": "s"}}
        or told[1][str(ord("s"))]["rank"] == ord("s") + 1
    )


def test_controls_reach_the_engine() -> None:
    engine = FakeEngine("a")
    post(
        CHAT, engine, **HELLO, repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=-0.5, min_tokens=1,
        logit_bias={"7": -100}, allowed_token_ids=[97, 98], bad_words=["no"], n=2, priority=3, seed=11,
    )  # fmt: skip
    (request,) = engine.requests
    sampling = request.sampling
    assert (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) == (1.2, 0.5, -0.5)
    assert (sampling.logit_bias, sampling.allowed_token_ids, sampling.min_tokens) == (((7, -100.0),), {97, 98}, 1)
    assert set(sampling.banned_sequences) == {(*b"no",), (*b" no",)}
    assert (request.num_choices, request.priority, sampling.seed) == (2, 3, 11)


def test_ids_outside_the_vocabulary_are_refused_by_the_field_that_holds_them() -> None:
    for field, value in (("logit_bias", {"258": 1}), ("allowed_token_ids", [258]), ("stop_token_ids", [258])):
        response = post(CHAT, FakeEngine("a"), **HELLO, **{field: value})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("headers", "fields", "session"),
    [
        ({"x-session-id": "thread"}, {"prompt_cache_key": "key", "user": "eve"}, "thread"),
        ({}, {"prompt_cache_key": "key", "user": "eve"}, "key"),
        ({}, {"user": "eve"}, "eve"),
        ({}, {}, "203.0.113.7"),
        ({"x-session-id": "x" * 1000}, {}, "x" * 256),
    ],
)
def test_requests_of_one_session_share_a_turn(headers: dict[str, str], fields: dict[str, str], session: str) -> None:
    engine = FakeEngine("a")
    post(CHAT, engine, headers, **HELLO, **fields)
    post(COMPLETIONS, engine, headers, prompt="x", **fields)
    assert [request.session for request in engine.requests] == [session, session]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_full_queue_is_told_before_any_stream_begins(path: str, stream: bool) -> None:
    engine = FakeEngine("a")
    engine.refusal = Overloaded("the queue is full", retry_after_s=4.5)
    response = post(path, engine, **HELLO, prompt="x", stream=stream)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "5"
    assert response.json()["error"]["type"] == "rate_limit_error"


def test_a_text_and_a_chat_are_split_and_joined() -> None:
    engine = FakeEngine(model=describe(max_model_len=77))
    assert post("/tokenize", engine, prompt="hé").json() == {
        "tokens": [BEGIN, *"hé".encode()],
        "count": 4,
        "max_model_len": 77,
        "token_strs": None,
    }
    chat = post("/tokenize", engine, **HELLO, zeal=1)
    assert bytes(chat.json()["tokens"]) == b"user: hello\n"
    assert chat.headers["x-headrace-ignored"] == "zeal"
    assert post("/detokenize", engine, tokens=[BEGIN, *"hé".encode()]).json() == {"prompt": "<begin>hé"}
    refused = post("/detokenize", engine, tokens=[258])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")
    assert engine.requests == []


def test_an_echo_tells_where_special_tokens_stand_in_it() -> None:
    asked = {"max_tokens": 2, "echo": True, "logprobs": 0, "temperature": 0}
    answer = post(COMPLETIONS, FakeEngine("c", "d"), prompt=[BEGIN, *b"a", END], **asked).json()
    (choice,) = answer["choices"]
    assert choice["text"] == "<begin>a<end>cd"
    assert choice["logprobs"]["text_offset"] == [0, 7, 8, 13, 14]
