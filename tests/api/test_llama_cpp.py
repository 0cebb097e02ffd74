"""The words of llama.cpp's server: their values against arithmetic, their fields against its documentation."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from fakes import describe

from headrace.api.answer_encoder import AnswerHeading
from headrace.api.llama_cpp import progress_body, props_body, timings_body
from headrace.api.openai_answer import ChatAnswer, CompletionAnswer
from headrace.api.openai_chat import read_chat_completion
from headrace.api.openai_completion import read_completion
from headrace.errors import InvalidRequest
from headrace.types.chat import GenerationOptions
from headrace.types.events import Finished, FinishReason, PrefillProgress, Progress, Started, Text, Usage
from headrace.types.model import ModelTraits
from headrace.types.request import SamplingParams

HEADING = AnswerHeading("id", "name", created=1)
MODEL = ModelTraits(max_model_len=1000, defaults=GenerationOptions(max_tokens=50))
MESSAGES = [{"role": "user", "content": "hello"}]

# The example of llama.cpp's README: 236 tokens from the cache, 1 in 30.958 ms, 35 in 661.064 ms.
EXAMPLE = Usage(237, 35, num_cached_tokens=236, prompt_s=0.030958, output_s=0.661064)


def chat_options(**fields: Any) -> GenerationOptions:
    return read_chat_completion(json.dumps({"messages": MESSAGES, **fields}).encode(), MODEL).request.options


def completion_options(**fields: Any) -> GenerationOptions:
    return read_completion(json.dumps({"prompt": "once", **fields}).encode(), MODEL).request.options


def sent(pieces: Any) -> list[dict[str, Any]]:
    return [json.loads(piece.removeprefix(b"data: ")) for piece in pieces]


def test_timings_are_those_of_the_documentations_example() -> None:
    assert timings_body(EXAMPLE) == {
        "cache_n": 236,
        "prompt_n": 1,
        "prompt_ms": pytest.approx(30.958),
        "prompt_per_token_ms": pytest.approx(30.958),
        "prompt_per_second": pytest.approx(32.301828283480845),
        "predicted_n": 35,
        "predicted_ms": pytest.approx(661.064),
        "predicted_per_token_ms": pytest.approx(18.887542857142858),
        "predicted_per_second": pytest.approx(52.94494935437416),
    }


def test_drafts_are_counted_where_there_were_some() -> None:
    timings = timings_body(replace(EXAMPLE, num_drafted_tokens=20, num_accepted_tokens=15))
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (20, 15)


def test_no_time_and_no_tokens_give_no_speed() -> None:
    timings = timings_body(Usage(5, 1))
    assert (timings["prompt_per_second"], timings["predicted_per_second"]) == (0, 0)
    assert timings_body(Usage(5, 0, num_cached_tokens=5))["prompt_per_token_ms"] == 0


def test_progress_is_in_tokens_and_whole_milliseconds() -> None:
    progress = PrefillProgress(0, 1000, 200, 456, 1.2349)
    assert progress_body(progress) == {"total": 1000, "cache": 200, "processed": 456, "time_ms": 1234}


def test_a_stream_ends_with_timings() -> None:
    answer = ChatAnswer(HEADING, 2)
    chunks = sent(piece for event in two_choices() for piece in answer.pieces(event))
    assert ["timings" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["timings"] == timings_body(EXAMPLE)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert answer.end() == b"data: [DONE]\n\n"


def test_timings_come_with_the_usage_chunk_if_there_is_one() -> None:
    answer = ChatAnswer(HEADING, 2, include_usage=True)
    chunks = sent(piece for event in two_choices() for piece in answer.pieces(event))
    assert not any("timings" in chunk for chunk in chunks)
    (last, _) = answer.end().split(b"\n\n", 1)
    assert sent([last])[0]["timings"] == timings_body(EXAMPLE)


def test_every_chunk_from_the_first_token_on_has_timings_if_asked_for() -> None:
    answer = CompletionAnswer(HEADING, timings_in_chunks=True)
    so_far = Usage(237, 1, num_cached_tokens=236, prompt_s=0.030958)
    events = (Started(237), PrefillProgress(0, 237, 236, 237, 0.03), Progress(so_far), Text("a"))
    chunks = sent(piece for event in (*events, Finished(FinishReason.STOP, EXAMPLE)) for piece in answer.pieces(event))
    assert [chunk.get("timings") for chunk in chunks] == [None, timings_body(so_far), timings_body(EXAMPLE)]
    assert not any("usage" in chunk for chunk in chunks)


def test_progress_chunks_have_an_empty_delta_of_the_prompts_first_choice() -> None:
    progress = PrefillProgress(2, 10, 0, 8, 0.5)
    (chat,) = sent(ChatAnswer(HEADING, 4).pieces(progress))
    assert chat["prompt_progress"] == {"total": 10, "cache": 0, "processed": 8, "time_ms": 500}
    assert (chat["choices"][0]["index"], chat["choices"][0]["delta"], chat["object"]) == (
        2,
        {},
        "chat.completion.chunk",
    )
    (completion,) = sent(CompletionAnswer(HEADING, 4).pieces(progress))
    assert (completion["choices"][0]["index"], completion["choices"][0]["text"]) == (2, "")


def test_a_whole_answer_has_timings_and_no_progress() -> None:
    events = (Started(237), PrefillProgress(0, 237, 236, 237, 0.03), Text("a"), Finished(FinishReason.STOP, EXAMPLE))
    whole = ChatAnswer(HEADING).whole(events)
    assert whole["timings"] == timings_body(EXAMPLE)
    assert whole["choices"][0]["message"]["content"] == "a"
    assert "prompt_progress" not in whole


@pytest.mark.parametrize("options", [chat_options, completion_options])
def test_a_stream_may_ask_for_progress_and_timings(options: Any) -> None:
    asked = options(stream=True, return_progress=True, timings_per_token=True)
    assert (asked.reports_progress, asked.counts_progress) == (True, True)
    for quiet in (options(stream=True), options(return_progress=True, timings_per_token=True)):
        assert (quiet.reports_progress, quiet.counts_progress) == (False, False)


@pytest.mark.parametrize("options", [chat_options, completion_options])
@pytest.mark.parametrize("field", ["return_progress", "timings_per_token", "n_predict"])
def test_a_value_of_another_type_is_refused_by_name(options: Any, field: str) -> None:
    with pytest.raises(InvalidRequest, match=field):
        options(**{field: "yes"})


@pytest.mark.parametrize("options", [chat_options, completion_options])
@pytest.mark.parametrize("field", ["max_tokens", "n_predict"])
def test_minus_one_is_all_that_the_context_leaves(options: Any, field: str) -> None:
    assert options(**{field: -1}).max_tokens is None
    assert options(**{field: 7}).max_tokens == 7


@pytest.mark.parametrize("options", [chat_options, completion_options])
def test_limits_of_two_names_must_agree(options: Any) -> None:
    assert options(max_tokens=7, n_predict=7).max_tokens == 7
    with pytest.raises(InvalidRequest, match="max_tokens and n_predict contradict each other"):
        options(max_tokens=7, n_predict=8)


def props(defaults: GenerationOptions, chat_template: str | None = "{{ messages }}") -> dict[str, Any]:
    model = replace(describe("org/model", max_model_len=4096), takes_media=True)
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return props_body(model, defaults, tokens, chat_template, alias="alias", max_num_seqs=8, version="1.2")


def test_props_say_what_the_model_and_its_defaults_are() -> None:
    sampling = SamplingParams(temperature=0.6, top_p=0.9, top_k=20, min_p=0.05, presence_penalty=1.5)
    body = props(GenerationOptions(sampling, max_tokens=512))
    settings = body.pop("default_generation_settings")
    assert body == {
        "total_slots": 8,
        "model_alias": "alias",
        "model_path": "org/model",
        "modalities": {"vision": True, "audio": False},
        "endpoint_slots": False,
        "endpoint_props": False,
        "endpoint_metrics": True,
        "chat_template": "{{ messages }}",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "build_info": "headrace 1.2",
        "is_sleeping": False,
    }
    assert settings["n_ctx"] == 4096
    params = settings["params"]
    assert (params["temperature"], params["top_p"], params["top_k"], params["min_p"]) == (0.6, 0.9, 20, 0.05)
    assert (params["presence_penalty"], params["max_tokens"], params["n_predict"]) == (1.5, 512, 512)
    assert params["repeat_penalty"] == 1


def test_props_leave_out_what_is_not_the_same_here() -> None:
    body = props(GenerationOptions(SamplingParams(repetition_penalty=1.1)), chat_template=None)
    assert "repeat_penalty" not in body["default_generation_settings"]["params"]
    assert body["default_generation_settings"]["params"]["max_tokens"] == -1
    assert body["chat_template"] == ""


def test_the_default_params_may_be_sent_back() -> None:
    """llama.cpp's page has sent the server's defaults with each message."""
    params = props(GenerationOptions(max_tokens=512))["default_generation_settings"]["params"]
    assert chat_options(**params).max_tokens == 512


def two_choices() -> tuple[Any, ...]:
    return (
        Started(237),
        Text("a", 1),
        Finished(FinishReason.STOP, Usage(237, 20), 1),
        Text("b", 0),
        Finished(FinishReason.STOP, EXAMPLE, 0),
    )
