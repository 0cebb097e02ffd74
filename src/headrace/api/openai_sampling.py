"""Fields that several routes share, and the options that they become.

Some are those of llama.cpp's server, for its web page and clients:
https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md.

Types are strict (true is no number, "1" is not 1). The session checks the ranges of SamplingParams and what depends on
the model (token ids, context).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, Field, PlainValidator

from headrace.api.json_body import StrictBody
from headrace.errors import InvalidRequest, UnsupportedField
from headrace.types.chat import GenerationOptions
from headrace.types.request import SamplingParams

RequestT = TypeVar("RequestT")

MAX_LOGPROBS = 20
MAX_DRAFT_TOKENS = 16

ALL_TOKENS = -1
"""As max_tokens of a chat or a completion: as many as the context leaves."""

ShortText = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]

_SAMPLING = frozenset(field.name for field in fields(SamplingParams))

# Fields of OpenAI and other open-model servers.
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "dry_multiplier": (0,),
    "grammar": ("",),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mirostat": (0,),
    "repeat_penalty": (1,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
}

WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
    }
)

_MAX_BIAS = 100

_TOKEN_ID = re.compile(r"[0-9]{1,9}")


def _logit_bias(biases: Any) -> tuple[tuple[int, float], ...] | None:
    """Parsed by hand: pydantic would report an error per entry. Raises InvalidRequest."""
    if biases is None:
        return None
    if not isinstance(biases, dict):
        raise InvalidRequest("logit_bias: input should be an object", param="logit_bias")
    added: dict[int, float] = {}
    for key, bias in biases.items():
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequest("logit_bias: a key must be a token id", param="logit_bias")
        if int(key) in added:
            raise InvalidRequest(f"logit_bias: token {int(key)} is given twice", param="logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -_MAX_BIAS <= bias <= _MAX_BIAS:
            path = f"logit_bias.{key}"
            raise InvalidRequest(f"{path}: input should be a number from -{_MAX_BIAS} to {_MAX_BIAS}", param=path)
        added[int(key)] = float(bias)
    return tuple(added.items())


# Functions, because pydantic 2.12 refuses `frozenset[int]` as a validator.
def _as_set(token_ids: list[int]) -> frozenset[int]:
    return frozenset(token_ids)


def _as_tuple(words: list[str]) -> tuple[str, ...]:
    return tuple(words)


class StreamOptionsBody(StrictBody):
    include_usage: bool | None = None
    # Padding against traffic analysis, which is not implemented.
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


OWN_FIELDS = frozenset({"handover", "sparse_prefill", "sparse_keep", "draft_tokens"})
"""Fields of a body that only this server defines: they are not sent on to another one."""


class GenerationBody(StrictBody):
    """Fields of every generating route."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    cache_salt: ShortText | None = None
    sparse_prefill: bool | Literal["auto"] | None = None
    sparse_keep: float | None = None
    handover: bool | None = None
    stream: bool | None = None


class SamplingBody(GenerationBody):
    """Fields of OpenAI's routes. Those for sampling are named as in SamplingParams."""

    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Annotated[tuple[tuple[int, float], ...] | None, PlainValidator(_logit_bias)] = None
    allowed_token_ids: Annotated[list[TokenId], Field(fail_fast=True, min_length=1), AfterValidator(_as_set)] | None = (
        None
    )
    bad_words: (
        Annotated[
            list[ShortText],
            Field(fail_fast=True, max_length=1024),
            AfterValidator(_as_tuple),
        ]
        | None
    ) = None
    min_tokens: int | None = None
    stop: ShortText | Annotated[list[ShortText], Field(fail_fast=True, max_length=64)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=1024)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int | None, Field(ge=1, le=128)] = None
    prompt_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    draft_tokens: Annotated[int | None, Field(ge=0, le=MAX_DRAFT_TOKENS)] = None
    stream_options: StreamOptionsBody | None = None
    priority: Annotated[int | None, Field(gt=-(2**31), lt=2**31)] = None
    prompt_cache_key: str | None = None
    user: str | None = None


class ChunkedBody(SamplingBody):
    """Fields of chats and completions. The last three are llama.cpp's."""

    max_tokens: Annotated[int | None, Field(ge=ALL_TOKENS)] = None
    n_predict: Annotated[int | None, Field(ge=ALL_TOKENS)] = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[RequestT]):
    """A parsed request and how its answer is sent.

    model: the requested name. ignored: unknown fields, for the `x-headrace-ignored` header.
    include_usage: a stream ends with the usage. usage_in_chunks, timings_in_chunks: each of its chunks has them.
    """

    request: RequestT
    model: str | None
    stream: bool
    ignored: tuple[str, ...]
    include_usage: bool = False
    usage_in_chunks: bool = False
    timings_in_chunks: bool = False

    @property
    def continues_stored(self) -> bool:
        """Whether its prompt has parts that are stored here."""
        return False


def generation_options(
    parsed: GenerationBody, defaults: GenerationOptions, max_tokens: int | None
) -> GenerationOptions:
    """The options that a body of any dialect sets, else the defaults. max_tokens: None for the default."""
    sent = {name: getattr(parsed, name) for name in _SAMPLING & type(parsed).model_fields.keys()}
    given = {name: value for name, value in sent.items() if value is not None}
    return GenerationOptions(
        sampling=defaults.sampling.merged(given),
        max_tokens=_limit(defaults.max_tokens if max_tokens is None else max_tokens),
        sparse_prefill=None if parsed.sparse_prefill == "auto" else parsed.sparse_prefill,
        sparse_keep=parsed.sparse_keep,
        may_hand_over=parsed.handover is not False,
        cache_salt=parsed.cache_salt or "",
    )


def _limit(max_tokens: int | None) -> int | None:
    return None if max_tokens == ALL_TOKENS else max_tokens


def sampling_options(
    parsed: SamplingBody, defaults: GenerationOptions, max_tokens: int | None, num_logprobs: int | None
) -> GenerationOptions:
    stop = parsed.stop or ()
    return replace(
        generation_options(parsed, defaults, max_tokens),
        stop_strings=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(parsed.stop_token_ids or ()),
        ignore_eos=bool(parsed.ignore_eos),
        num_choices=parsed.n or 1,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=parsed.prompt_logprobs,
        max_draft_tokens=parsed.draft_tokens,
        session=parsed.prompt_cache_key or parsed.user or "",
        priority=parsed.priority or 0,
    )


def requested_max_tokens(given: Mapping[str, int | None]) -> int | None:
    """The one limit among fields that mean the same, by name; None if none is set. Raises InvalidRequest."""
    named = {name: limit for name, limit in given.items() if limit is not None}
    if len(set(named.values())) > 1:
        message = f"{' and '.join(named)} contradict each other; send one of them"
        raise InvalidRequest(message, param=next(iter(named)))
    return next(iter(named.values()), None)


def chunked_options(
    parsed: ChunkedBody, defaults: GenerationOptions, max_tokens: int | None, num_logprobs: int | None
) -> GenerationOptions:
    return replace(
        sampling_options(parsed, defaults, max_tokens, num_logprobs),
        counts_progress=_counts_in_chunks(parsed) or _times_chunks(parsed),
        reports_progress=bool(parsed.stream and parsed.return_progress),
    )


def chunked_call(parsed: ChunkedBody, request: RequestT, ignored: tuple[str, ...]) -> Call[RequestT]:
    return Call(
        request=request,
        model=parsed.model,
        stream=bool(parsed.stream),
        ignored=ignored,
        include_usage=bool(parsed.stream_options and parsed.stream_options.include_usage),
        usage_in_chunks=_counts_in_chunks(parsed),
        timings_in_chunks=_times_chunks(parsed),
    )


def _counts_in_chunks(parsed: ChunkedBody) -> bool:
    return bool(parsed.stream_options and parsed.stream_options.continuous_usage_stats)


def _times_chunks(parsed: ChunkedBody) -> bool:
    return bool(parsed.stream and parsed.timings_per_token)


def check_stream(parsed: SamplingBody) -> None:
    """Raise InvalidRequest and UnsupportedField for options that contradict `stream`."""
    if parsed.stream and parsed.prompt_logprobs is not None:
        message = "prompt_logprobs is not supported when stream is true"
        raise UnsupportedField(message, param="prompt_logprobs")
    if parsed.stream_options is not None and not parsed.stream:
        raise InvalidRequest("stream_options is only allowed when stream is true", param="stream_options")
