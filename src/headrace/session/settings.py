"""Checks and completes a client's settings: merges defaults, encodes words.

Defaults are merged in this order, the later one winning: neutral values, the model's generation_config.json, the
server's flags, the request.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from headrace.errors import ContextTooLong, InvalidRequest, ModelError
from headrace.types.chat import RequestedSampling, RequestedStop
from headrace.types.model import TokenIds
from headrace.types.request import SamplingParams

Number = TypeVar("Number", int, float)

_DEFAULTED = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)

# Bounds beyond any use of the penalty: a logit divided by less could become infinite, and 0 times more NaN.
_REPETITION_PENALTIES = (0.01, 100.0)


@dataclass(frozen=True, slots=True)
class Defaults:
    """Defaults of requests, from the model's files or the server's flags, which win.

    sampling: `None` leaves a value open. max_tokens: of a chat's answer; None for an automatic limit.
    """

    sampling: RequestedSampling = RequestedSampling()
    max_tokens: int | None = None


NO_DEFAULTS = Defaults()


def model_defaults(generation_config: Mapping[str, Any]) -> Defaults:
    """Defaults from a generation_config.json. Raises ModelError for an invalid value."""
    given: dict[str, Any] = {name: generation_config.get(name) for name in _DEFAULTED}
    sampling = replace(RequestedSampling(), **given)
    try:
        check_sampling(sampling, TokenIds(0))
    except (InvalidRequest, TypeError) as error:
        raise ModelError(f"generation_config.json: {error}") from error
    if generation_config.get("do_sample") is False:
        # Greedy until a request sets a temperature; the other values then apply.
        sampling = replace(sampling, temperature=0.0)
    return Defaults(sampling, _max_new_tokens(generation_config))


def _max_new_tokens(generation_config: Mapping[str, Any]) -> int | None:
    value = generation_config.get("max_new_tokens")
    if value is not None and (type(value) is not int or value < 1):
        raise ModelError(f"generation_config.json: max_new_tokens must be a whole number from 1, not {value!r}")
    return value


def merge_defaults(model: Defaults, server: Defaults) -> Defaults:
    """The model's defaults where the server's flags set none."""
    max_tokens = model.max_tokens if server.max_tokens is None else server.max_tokens
    return Defaults(replace(model.sampling, **_given(server.sampling)), max_tokens)


def explain_defaults(model: Defaults, server: Defaults) -> tuple[str, ...]:
    """Lines for start-up that name the model's defaults and what the server's flags set."""
    lines = []
    for source, defaults in (("generation_config.json", model), ("the --default flags", server)):
        given = _given(defaults.sampling)
        if defaults.max_tokens is not None:
            given["max_tokens"] = defaults.max_tokens
        if given:
            lines.append(f"sampling of {source}: {', '.join(f'{name} {value}' for name, value in given.items())}")
    return tuple(lines)


def _given(sampling: RequestedSampling) -> dict[str, Any]:
    """The given values among those that can have a default."""
    return {name: value for name in _DEFAULTED if (value := getattr(sampling, name)) is not None}


def resolve_sampling(
    requested: RequestedSampling, defaults: RequestedSampling, encode: Callable[[str], Sequence[int]]
) -> SamplingParams:
    """The request's values, else the defaults, else the neutral ones; without a seed, draws differ each time.

    encode: the tokenizer's, for bad words.
    """
    forbidden = _forbidden(requested.bad_words, encode)
    allowed = requested.allowed_token_ids
    return SamplingParams(
        temperature=_first(requested.temperature, defaults.temperature, 1.0),
        top_p=_first(requested.top_p, defaults.top_p, 1.0),
        # Clients of other servers use -1 for "off".
        top_k=int(max(0, _first(requested.top_k, defaults.top_k, 0))),
        min_p=_first(requested.min_p, defaults.min_p, 0.0),
        seed=secrets.randbits(63) if requested.seed is None else requested.seed,
        repetition_penalty=_first(requested.repetition_penalty, defaults.repetition_penalty, 1.0),
        frequency_penalty=_first(requested.frequency_penalty, defaults.frequency_penalty, 0.0),
        presence_penalty=_first(requested.presence_penalty, defaults.presence_penalty, 0.0),
        logit_bias=requested.logit_bias,
        allowed_token_ids=None if allowed is None else frozenset(allowed),
        banned_token_ids=forbidden.token_ids,
        bad_words=forbidden.sequences,
        min_tokens=requested.min_tokens or 0,
    )


def _first(requested: Number | None, default: Number | None, neutral: Number) -> Number:
    if requested is not None:
        return requested
    return neutral if default is None else default


@dataclass(frozen=True, slots=True)
class _Forbidden:
    """Banned single tokens, and sequences whose last token is banned after the others."""

    token_ids: frozenset[int]
    sequences: tuple[tuple[int, ...], ...]


def _forbidden(words: Iterable[str], encode: Callable[[str], Sequence[int]]) -> _Forbidden:
    """The tokens of each word, at a text's start and after a space."""
    spelled = {tuple(encode(space + word.lstrip(" "))): None for word in words for space in ("", " ")}
    return _Forbidden(
        frozenset(token_ids[0] for token_ids in spelled if len(token_ids) == 1),
        tuple(token_ids for token_ids in spelled if len(token_ids) > 1),
    )


def check_sampling(sampling: RequestedSampling, tokens: TokenIds) -> None:
    """Raise InvalidRequest for the first value that is invalid in itself or for the model."""
    _check("temperature", sampling.temperature, 0.0, 2.0)
    _check("top_p", sampling.top_p, 0.0, 1.0)
    if sampling.top_p == 0:
        raise InvalidRequest("top_p must be in (0, 1], not 0; a temperature of 0 is greedy", param="top_p")
    _check("top_k", sampling.top_k, -1, 2**31 - 1)
    _check("min_p", sampling.min_p, 0.0, 1.0)
    _check("repetition_penalty", sampling.repetition_penalty, *_REPETITION_PENALTIES)
    _check("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    _check("presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    _check_token_ids("logit_bias", (token_id for token_id, _ in sampling.logit_bias), tokens)
    _check_token_ids("allowed_token_ids", sampling.allowed_token_ids or (), tokens)
    if not all(word.strip(" ") for word in sampling.bad_words):
        raise InvalidRequest("bad_words must not hold an empty word", param="bad_words")


def check_stop(sampling: RequestedSampling, stop: RequestedStop, tokens: TokenIds) -> None:
    """Raise InvalidRequest for tokens that the model doesn't have, and for a minimum above the maximum."""
    _check_token_ids("stop_token_ids", stop.token_ids, tokens)
    if sampling.min_tokens and stop.max_tokens is not None and sampling.min_tokens > stop.max_tokens:
        message = f"min_tokens must be at most max_tokens ({stop.max_tokens}), not {sampling.min_tokens}"
        raise InvalidRequest(message, param="min_tokens")


def _check(name: str, value: float | None, low: float, high: float) -> None:
    # The comparison is false for NaN, which is refused like any value out of range.
    if value is not None and not low <= value <= high:
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
    """Tokens of an answer whose request, server and model set no limit."""
    low, high = _AUTOMATIC_MAX_TOKENS
    return min(max(max_model_len // 4, low), high)


def fit_max_tokens(num_prompt_tokens: int, requested: int | None, max_model_len: int, param: str = "messages") -> int:
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
