"""Bodies of completions: what is understood, what is refused, and under which name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from fakes import describe

from headrace.api.openai_completion import MAX_PROMPTS, CompletionBody, read_completion
from headrace.api.openai_sampling import Call
from headrace.errors import InvalidRequest, UnsupportedField
from headrace.session.settings import check_options
from headrace.types.chat import CompletionRequest, GenerationOptions
from headrace.types.model import ModelTraits
from headrace.types.request import SamplingParams


def read(prompt: Any = "once", **fields: Any) -> Call[CompletionRequest]:
    return read_completion(json.dumps({"model": "m", "prompt": prompt, **fields}).encode(), ModelTraits())


def unseeded(request: CompletionRequest) -> CompletionRequest:
    """Without what was drawn: the id and the seed."""
    options = replace(request.options, sampling=replace(request.options.sampling, seed=0))
    return replace(request, request_id="", options=options)


def refusal(prompt: Any = "once", **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        check_options(read(prompt, **fields).request.options, describe())
    return caught.value


def test_a_plain_body_asks_for_sixteen_tokens_and_leaves_the_rest_to_the_server() -> None:
    call = read()
    assert call.request.prompts == ("once",)
    assert unseeded(call.request).options == GenerationOptions(max_tokens=16)
    assert (call.request.echo, call.model, call.stream, call.ignored) == (False, "m", False, ())


def test_ids_are_random_and_of_the_dialects_form() -> None:
    ids = {read().request.request_id for _ in range(50)}
    assert len(ids) == 50
    assert all(each.startswith("cmpl-") for each in ids)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([0], ((0,),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        (["a", [3]], ("a", (3,))),
    ],
)
def test_prompts_come_in_four_shapes(prompt: Any, prompts: tuple[Any, ...]) -> None:
    assert read(prompt).request.prompts == prompts


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        (5, "prompt"),
        ({"a": 1}, "prompt"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ([None], "prompt[0]"),
        ([True], "prompt[0]"),
        ([1, "a"], "prompt[1]"),
        ([1, True], "prompt[1]"),
        ([1, -2], "prompt[1]"),
        ([1, 2**31], "prompt[1]"),
        ([[1], [2, 2.5]], "prompt[1][1]"),
        (["a", 5], "prompt[1]"),
        (["a"] * (MAX_PROMPTS + 1), "prompt"),
    ],
)
def test_a_prompt_of_no_shape_is_refused_by_its_path(prompt: Any, param: str) -> None:
    error = refusal(prompt)
    assert error.param == param
    assert param in error.message


def test_null_is_the_same_as_absent_for_every_field() -> None:
    fields = {*CompletionBody.neutral_values, *CompletionBody.without_effect, *CompletionBody.model_fields}
    call = read(**dict.fromkeys(fields - {"prompt", "model"}))
    assert unseeded(call.request) == unseeded(read().request)
    assert call.ignored == ()


def test_every_field_is_taken_over() -> None:
    request = read(
        temperature=0.5, seed=3, repetition_penalty=1.5, logit_bias={"1": 2}, bad_words=["x"], min_tokens=1,
        max_tokens=0, stop="END", stop_token_ids=[4], ignore_eos=True, n=3, best_of=3, logprobs=5, prompt_logprobs=2,
        draft_tokens=7, echo=True, user="eve", priority=1, cache_salt="tenant 7",
    ).request  # fmt: skip
    assert request.options == GenerationOptions(
        SamplingParams(
            temperature=0.5, seed=3, repetition_penalty=1.5, logit_bias=((1, 2.0),), bad_words=("x",), min_tokens=1
        ),
        max_tokens=0,
        stop_strings=("END",),
        stop_token_ids=(4,),
        ignore_eos=True,
        num_choices=3,
        num_logprobs=5,
        num_prompt_logprobs=2,
        max_draft_tokens=7,
        session="eve",
        priority=1,
        cache_salt="tenant 7",
    )
    assert request.echo


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -2), ("max_tokens", True), ("logprobs", True), ("logprobs", 21), ("logprobs", -1),
        ("echo", 1), ("n", 0), ("best_of", 0), ("best_of", "1"), ("stream", "yes"), ("temperature", 3),
        ("stream_options", {"include_usage": True}),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_or_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    error = refusal(**{field: value})
    assert error.param == field
    assert field in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"suffix": "the end"}, "suffix"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"add_special_tokens": False}, "add_special_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"use_beam_search": True}, "use_beam_search"),
    ],
)
def test_what_would_change_the_answer_and_is_not_built_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert isinstance(error, UnsupportedField)
    assert error.param == param


def test_all_prompts_together_have_a_bounded_number_of_choices() -> None:
    assert len(read(["a"] * 8, n=128).request.prompts) == 8
    assert refusal(["a"] * 9, n=128).param == "n"
    assert len(read(["a"] * MAX_PROMPTS).request.prompts) == MAX_PROMPTS


def test_neutral_values_of_the_same_fields_are_welcome() -> None:
    for field, neutrals in CompletionBody.neutral_values.items():
        for neutral in neutrals:
            assert read(**{field: neutral}).ignored == ()


def test_unknown_fields_are_named_and_those_of_chats_are_unknown_here() -> None:
    assert read(zeal=1, messages=[], metadata={}).ignored == ("messages", "zeal")


def test_a_long_prompt_of_token_ids_is_checked_element_by_element_not_branch_by_branch() -> None:
    token_ids = [1] * 200_000
    assert len(read(token_ids).request.prompts[0]) == 200_000
    assert refusal([*token_ids, "x"]).param == "prompt[200000]"
