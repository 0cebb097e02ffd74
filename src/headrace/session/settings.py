"""Completes a client's options with defaults, and checks them.

Defaults are merged in this order, the later one winning: neutral values, the model's generation_config.json, the
server's flags, the request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from headrace.errors import ContextTooLong, InvalidRequest, ModelError
from headrace.types.chat import GenerationOptions
from headrace.types.model import ModelDescription, TokenIds
from headrace.types.request import SamplingParams

Defaults = Mapping[str, Any]
"""Values of SamplingParams by name, and `max_tokens`."""

_DEFAULTED = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)


def model_defaults(generation_config: Mapping[str, Any]) -> Defaults:
    """Defaults from a generation_config.json. Raises ModelError for an invalid value."""
    given = {name: value for name in _DEFAULTED if (value := generation_config.get(name)) is not None}
    try:
        check_sampling(replace(SamplingParams(), **given), TokenIds(0))
    except (InvalidRequest, TypeError) as error:
        raise ModelError(f"generation_config.json: {error}") from error
    if "top_k" in given:  # some files have 50.0
        given["top_k"] = int(given["top_k"])
    if generation_config.get("do_sample") is False:
        # Greedy until a request sets a temperature; the other values then apply.
        given["temperature"] = 0.0
    max_tokens = generation_config.get("max_new_tokens")
    if max_tokens is None:
        return given
    if type(max_tokens) is not int or max_tokens < 1:
        raise ModelError(f"generation_config.json: max_new_tokens must be a whole number from 1, not {max_tokens!r}")
    return {**given, "max_tokens": max_tokens}


def default_options(model: Defaults, server: Defaults, max_model_len: int) -> GenerationOptions:
    """The options of a request that sets none. max_model_len: context in tokens."""
    given = {"max_tokens": automatic_max_tokens(max_model_len), **model, **server}
    max_tokens = given.pop("max_tokens")
    return GenerationOptions(replace(SamplingParams(), **given), max_tokens)


def explain_defaults(model: Defaults, server: Defaults) -> tuple[str, ...]:
    """Lines for start-up that name the model's defaults and what the server's flags set."""
    return tuple(
        f"sampling of {source}: {', '.join(f'{name} {given[name]}' for name in _shown(given))}"
        for source, given in (("generation_config.json", model), ("the --default flags", server))
        if given
    )


def _shown(given: Defaults) -> list[str]:
    return [name for name in (*_DEFAULTED, "max_tokens") if name in given]


def with_banned_words(sampling: SamplingParams, encode: Callable[[str], Sequence[int]]) -> SamplingParams:
    """Encodes bad words, at a text's start and after a space. encode: the tokenizer's."""
    spellings = (space + word.lstrip(" ") for word in sampling.bad_words for space in ("", " "))
    encoded = tuple(dict.fromkeys(tuple(encode(spelling)) for spelling in spellings))
    return replace(
        sampling,
        banned_token_ids=frozenset(token_ids[0] for token_ids in encoded if len(token_ids) == 1),
        banned_sequences=tuple(token_ids for token_ids in encoded if len(token_ids) > 1),
    )


def check_options(options: GenerationOptions, model: ModelDescription) -> None:
    """Raise InvalidRequest for the first option that is invalid in itself or for the model."""
    check_sampling(options.sampling, model.tokens)
    _check_token_ids("stop_token_ids", options.stop_token_ids, model.tokens)
    min_tokens, max_tokens = options.sampling.min_tokens, options.max_tokens
    if min_tokens and max_tokens is not None and min_tokens > max_tokens:
        message = f"min_tokens must be at most max_tokens ({max_tokens}), not {min_tokens}"
        raise InvalidRequest(message, param="min_tokens")
    _check_sparse(options, model.sparse_draft)


def check_sampling(sampling: SamplingParams, tokens: TokenIds) -> None:
    """Raise InvalidRequest for the first value out of its range, and for tokens that the model doesn't have."""
    for each in fields(sampling):
        if "range" in each.metadata:
            _check_range(each.name, getattr(sampling, each.name), *each.metadata["range"])
    if sampling.top_p == 0:
        raise InvalidRequest("top_p must be in (0, 1], not 0; a temperature of 0 is greedy", param="top_p")
    _check_token_ids("logit_bias", (token_id for token_id, _ in sampling.logit_bias), tokens)
    _check_token_ids("allowed_token_ids", sampling.allowed_token_ids or (), tokens)
    if not all(word.strip(" ") for word in sampling.bad_words):
        raise InvalidRequest("bad_words must not hold an empty word", param="bad_words")


def _check_sparse(options: GenerationOptions, draft: str | None) -> None:
    if options.sparse_keep is not None and not 0 < options.sparse_keep <= 1:
        raise InvalidRequest(f"sparse_keep must be in (0, 1], not {options.sparse_keep}", param="sparse_keep")
    if draft is not None:
        return
    for name, is_set in (("sparse_prefill", options.sparse_prefill), ("sparse_keep", options.sparse_keep is not None)):
        if is_set:
            message = f"{name} needs a draft model, and the server was started without one (--sparse-draft)"
            raise InvalidRequest(message, param=name)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    # The comparison is false for NaN, which is refused like any value out of range.
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be in [{low}, {high}], not {value}", param=name)


def _check_token_ids(name: str, token_ids: Iterable[int], tokens: TokenIds) -> None:
    unknown = tokens.first_unknown(token_ids)
    if unknown is None:
        return
    is_inside = 0 <= unknown < tokens.end
    rest = f"and no token has the id {unknown}" if is_inside else f"not {unknown}"
    raise InvalidRequest(f"{name} must hold token ids in [0, {tokens.end}), {rest}", param=name)


def check_prompt_ids(token_ids: Sequence[int], tokens: TokenIds, param: str) -> None:
    """Raise InvalidRequest for the first id that is no token of the model."""
    is_inside = not token_ids or (min(token_ids) >= 0 and max(token_ids) < tokens.end)
    if not is_inside or not tokens.missing.isdisjoint(token_ids):
        _check_token_ids(param, token_ids, tokens)


_AUTOMATIC_MAX_TOKENS = (4096, 32768)
"""At least and at most. Small models repeat themselves until they are stopped; long thinking takes up to 32768."""


def automatic_max_tokens(max_model_len: int) -> int:
    low, high = _AUTOMATIC_MAX_TOKENS
    return min(max(max_model_len // 4, low), high)


def output_limit(context: int) -> int:
    """The limit of an answer for clients that send one: as without any, but never more than half of the context."""
    return min(automatic_max_tokens(context), context // 2)


def fit_max_tokens(num_prompt_tokens: int, requested: int | None, max_model_len: int, param: str) -> int:
    """Output tokens of the answer: as requested, at most what the context leaves.

    Clients routinely request far more than the context, so that is no error. A prompt that leaves no room raises
    ContextTooLong. `param`: the prompt's field.
    """
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextTooLong.of_prompt(max_model_len, num_prompt_tokens, param)
    return room if requested is None else min(requested, room)


def naming(param: str, encode: Callable[[str], Sequence[int]]) -> Callable[[str], Sequence[int]]:
    """A tokenizer's function whose InvalidRequest names the text's field."""

    def encode_named(text: str) -> Sequence[int]:
        try:
            return encode(text)
        except InvalidRequest as error:
            raise InvalidRequest(f"{param}: {error.message}", param=param) from error

    return encode_named


MAX_TEXT = 8_000_000
"""Characters accepted for any context; longer contexts accept 8 per token."""


def refuse_oversized(texts: Sequence[str], max_model_len: int, param: str) -> int:
    """The number of characters in parts of a prompt. Raises ContextTooLong for more than are ever encoded."""
    num_characters, most = sum(map(len, texts)), max(MAX_TEXT, 8 * max_model_len)
    if num_characters > most:
        message = f"{param} must hold at most {most} characters, not {num_characters}"
        raise ContextTooLong(message, param=param, max_model_len=max_model_len)
    return num_characters


def refuse_too_long(
    texts: Sequence[str], least_num_tokens: Callable[[Sequence[str]], int], max_model_len: int, param: str
) -> None:
    """Raise ContextTooLong if these parts of a prompt can't fit, without encoding them.

    Applied before rendering: rendering and encoding megabytes takes seconds. least_num_tokens: the tokenizer's lower
    bound.
    """
    num_characters = refuse_oversized(texts, max_model_len, param)
    # No text has more tokens than characters, so the lower bound is only computed where it can matter.
    if num_characters >= max_model_len and (num_tokens := least_num_tokens(texts)) >= max_model_len:
        raise ContextTooLong.of_prompt(max_model_len, num_tokens, param, at_least=True)
