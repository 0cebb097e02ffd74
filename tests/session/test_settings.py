"""What a request asks for, completed with the model's defaults and checked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes import describe

from headrace.errors import InvalidRequest, ModelError
from headrace.session.settings import (
    Defaults,
    automatic_max_tokens,
    check_options,
    check_prompt_ids,
    check_sampling,
    default_options,
    explain_defaults,
    fit_max_tokens,
    model_defaults,
    with_banned_words,
)
from headrace.types.chat import GenerationOptions
from headrace.types.model import TokenIds
from headrace.types.request import SamplingParams

CONTEXT = 1000


def resolve(
    given: dict[str, Any], config: dict[str, Any] | None = None, server: Defaults | None = None
) -> SamplingParams:
    """Of a request with the given values to a model with this generation_config.json."""
    return default_options(model_defaults(config or {}), server or {}, CONTEXT).sampling.merged(given)


def test_the_request_wins_over_the_model_and_the_model_over_neutral_values() -> None:
    params = resolve({"temperature": 0.0, "seed": 3}, {"temperature": 0.6, "top_p": 0.95, "top_k": 20})
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.0, 0.95, 20, 0.0, 3)


def test_without_any_word_sampling_is_plain_at_temperature_one() -> None:
    params = resolve({})
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)


def test_a_model_that_does_not_sample_is_greedy_until_a_request_says_otherwise() -> None:
    config = {"do_sample": False, "temperature": 0.7, "top_p": 0.8}
    assert resolve({}, config).temperature == 0.0
    warmed = resolve({"temperature": 0.7}, config)
    assert (warmed.temperature, warmed.top_p) == (0.7, 0.8)


def test_draws_without_a_seed_differ_and_negative_seeds_are_kept_apart() -> None:
    unseeded = {resolve({}).seed for _ in range(20)}
    assert len(unseeded) == 20
    seeds = (-1, 1, 2**63 - 1, -(2**63), 0, -5, 5, 2**63 - 5)
    assert len({resolve({"seed": seed}).seed for seed in seeds}) == len(seeds)


NONSENSE = [
    *({"temperature": "warm"}, {"top_p": 3}, {"top_k": -7}, {"min_p": float("nan")}),
    *({"max_new_tokens": 0}, {"max_new_tokens": "512"}, {"max_new_tokens": 1.5}, {"max_new_tokens": True}),
]


@pytest.mark.parametrize("config", NONSENSE)
def test_a_generation_config_that_makes_no_sense_is_the_models_fault(config: dict[str, object]) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        model_defaults(config)


@pytest.mark.parametrize(("asked", "given"), [(None, 100), (7, 7), (100, 100), (128_000, 100)])
def test_max_tokens_is_cut_to_the_room_that_the_context_leaves(asked: int | None, given: int) -> None:
    assert fit_max_tokens(900, asked, 1000, "messages") == given


def test_the_models_penalties_are_defaults_like_its_temperature() -> None:
    config = {"repetition_penalty": 1.05, "presence_penalty": 0.5, "frequency_penalty": None}
    params = resolve({}, config)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.05, 0.5, 0.0)
    assert resolve({"repetition_penalty": 1.0}, config).repetition_penalty == 1.0


def test_a_whole_number_of_a_file_is_one_however_it_is_written() -> None:
    top_k = resolve({}, {"top_k": 50.0}).top_k
    assert (top_k, type(top_k)) == (50, int)


def test_defaults_are_explained_as_they_are_applied() -> None:
    assert explain_defaults(model_defaults({}), {}) == ()
    (line,) = explain_defaults(model_defaults({"temperature": 0.7, "top_k": 20}), {})
    assert line.endswith("temperature 0.7, top_k 20")


def test_the_servers_defaults_win_over_the_models_and_the_request_over_both() -> None:
    config = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "presence_penalty": 0.5}
    params = resolve({"min_p": 0.2}, config, {"temperature": 0.0, "top_k": 0, "min_p": 0.1})
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 0.95, 0, 0.2)
    assert params.presence_penalty == 0.5


def test_a_model_that_does_not_sample_does_so_by_the_servers_temperature() -> None:
    params = resolve({}, {"do_sample": False, "top_p": 0.8}, {"temperature": 0.7})
    assert (params.temperature, params.top_p) == (0.7, 0.8)


def test_the_servers_defaults_are_explained_beside_the_models() -> None:
    server = {"temperature": 0.0, "top_k": 5, "max_tokens": 99}
    model, flags = explain_defaults(model_defaults({"temperature": 0.7}), server)
    assert model.endswith("generation_config.json: temperature 0.7")
    assert flags.endswith("flags: temperature 0.0, top_k 5, max_tokens 99")
    assert explain_defaults({}, {}) == ()


def test_the_models_limit_of_new_tokens_yields_to_the_servers() -> None:
    model = model_defaults({"max_new_tokens": 512})
    assert default_options(model, {}, CONTEXT).max_tokens == 512
    assert default_options(model, {"max_tokens": 2000}, CONTEXT).max_tokens == 2000
    assert default_options(model_defaults({"max_new_tokens": None}), {}, CONTEXT).max_tokens == 4096
    assert explain_defaults(model, {}) == ("sampling of generation_config.json: max_tokens 512",)


def test_without_controls_every_one_is_off() -> None:
    params = resolve({"seed": 1})
    assert params == SamplingParams(1.0, 1.0, 0, 0.0, 1, 1.0, 0.0, 0.0, (), None, min_tokens=0)


def test_bad_words_are_forbidden_at_the_start_and_after_a_space() -> None:
    vocabulary = {"no": (7,), " no": (8,), "never": (9, 10), " never": (11, 10)}
    params = with_banned_words(SamplingParams(bad_words=("no", " no", "never")), vocabulary.__getitem__)
    assert params.banned_token_ids == {7, 8}
    assert sorted(params.banned_sequences) == [(9, 10), (11, 10)]


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (SamplingParams(temperature=2.1), "temperature"),
        (SamplingParams(temperature=-0.1), "temperature"),
        (SamplingParams(temperature=float("nan")), "temperature"),
        (SamplingParams(top_p=0.0), "top_p"),
        (SamplingParams(top_p=1.1), "top_p"),
        (SamplingParams(top_k=-2), "top_k"),
        (SamplingParams(top_k=2**31), "top_k"),
        (SamplingParams(min_p=-0.1), "min_p"),
        (SamplingParams(min_p=1.1), "min_p"),
        (SamplingParams(seed=2**63), "seed"),
        (SamplingParams(seed=-(2**63) - 1), "seed"),
        (SamplingParams(min_tokens=-1), "min_tokens"),
        (SamplingParams(min_tokens=2**31), "min_tokens"),
        (SamplingParams(repetition_penalty=0.0), "repetition_penalty"),
        (SamplingParams(repetition_penalty=1e-300), "repetition_penalty"),
        (SamplingParams(repetition_penalty=1e-40), "repetition_penalty"),
        (SamplingParams(repetition_penalty=float("inf")), "repetition_penalty"),
        (SamplingParams(frequency_penalty=2.1), "frequency_penalty"),
        (SamplingParams(presence_penalty=-2.1), "presence_penalty"),
        (SamplingParams(logit_bias=((100, 1.0),)), "logit_bias"),
        (SamplingParams(allowed_token_ids=frozenset({3, 100})), "allowed_token_ids"),
        (SamplingParams(allowed_token_ids=frozenset({-1})), "allowed_token_ids"),
        (SamplingParams(bad_words=("ok", " ")), "bad_words"),
    ],
)
def test_a_control_out_of_its_range_or_outside_the_vocabulary_is_refused_by_name(
    sampling: SamplingParams, param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_sampling(sampling, TokenIds(100))
    assert caught.value.param == param
    assert param in caught.value.message


def test_an_id_in_a_gap_between_tokens_is_refused_by_name() -> None:
    tokens = TokenIds(100, frozenset({7, 8}))
    for sampling in (SamplingParams(logit_bias=((7, 1.0),)), SamplingParams(allowed_token_ids=frozenset({3, 8}))):
        with pytest.raises(InvalidRequest, match="no token has the id [78]"):
            check_sampling(sampling, tokens)
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        check_options(GenerationOptions(stop_token_ids=(8,)), replace(describe(), tokens=tokens))
    with pytest.raises(InvalidRequest, match="prompt"):
        check_prompt_ids((1, 2, 7), tokens, "prompt")
    check_prompt_ids((1, 2, 9, 99), tokens, "prompt")


def test_more_tokens_than_allowed_can_not_be_demanded() -> None:
    model = describe()
    check_options(GenerationOptions(SamplingParams(min_tokens=5), max_tokens=5), model)
    check_options(GenerationOptions(SamplingParams(min_tokens=5)), model)
    with pytest.raises(InvalidRequest) as caught:
        check_options(GenerationOptions(SamplingParams(min_tokens=6), max_tokens=5), model)
    assert caught.value.param == "min_tokens"


def test_prompt_ids_outside_the_vocabulary_are_refused_with_the_first_of_them() -> None:
    check_prompt_ids((0, 99), TokenIds(100), "prompt")
    check_prompt_ids((), TokenIds(100), "prompt")
    for token_ids in ((1, 100, 200), (1, -5, 100)):
        with pytest.raises(InvalidRequest, match=rf"not {token_ids[1]}$"):
            check_prompt_ids(token_ids, TokenIds(100), "prompt")


@pytest.mark.parametrize(
    ("context", "limit"), [(1000, 4096), (16_384, 4096), (32_768, 8192), (131_072, 32_768), (1_000_000, 32_768)]
)
def test_an_answer_without_any_limit_gets_a_quarter_of_the_context_within_bounds(context: int, limit: int) -> None:
    assert automatic_max_tokens(context) == limit
