"""Fields that chats and completions share.

Types are strict (true is no number, "1" is not 1). Ranges are OpenAI's where it has the field, else vLLM's. The session
checks what depends on the model (token ids, context).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import Field

from headrace.api.json_body import StrictBody
from headrace.errors import InvalidRequest, UnsupportedField
from headrace.types.chat import RequestedSampling, RequestedSparse, RequestedStop

Asked = TypeVar("Asked")

MAX_LOGPROBS = 20
MAX_DRAFT_TOKENS = 16

StopText = Annotated[str, Field(min_length=1, max_length=1024)]
Penalty = Annotated[float | None, Field(ge=-2, le=2, allow_inf_nan=False)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]

_MAX_BIAS = 100

_TOKEN_ID = re.compile(r"[0-9]{1,9}")


class StreamOptionsBody(StrictBody):
    include_usage: bool | None = None
    # Padding against traffic analysis, which is not implemented.
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class SparseBody(StrictBody):
    """Whether sparse prefill may be used."""

    sparse_prefill: bool | Literal["auto"] | None = None
    sparse_keep: Annotated[float | None, Field(gt=0, le=1, allow_inf_nan=False)] = None


class SamplingBody(SparseBody):
    """Fields for sampling, stopping, streaming and the session."""

    model: str | None = None
    temperature: Annotated[float | None, Field(ge=0, le=2, allow_inf_nan=False)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1, allow_inf_nan=False)] = None
    top_k: Annotated[int | None, Field(ge=-1, lt=2**31)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1, allow_inf_nan=False)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    repetition_penalty: Annotated[float | None, Field(ge=0.01, le=100, allow_inf_nan=False)] = None
    frequency_penalty: Penalty = None
    presence_penalty: Penalty = None
    # Parsed by hand: pydantic would report an error per entry.
    logit_bias: Any = None
    allowed_token_ids: Annotated[list[TokenId], Field(fail_fast=True, min_length=1)] | None = None
    bad_words: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(fail_fast=True, max_length=1024)]
        | None
    ) = None
    min_tokens: Annotated[int | None, Field(ge=0, lt=2**31)] = None
    stop: StopText | Annotated[list[StopText], Field(fail_fast=True, max_length=64)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=1024)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int | None, Field(ge=1, le=128)] = None
    prompt_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    draft_tokens: Annotated[int | None, Field(ge=0, le=MAX_DRAFT_TOKENS)] = None
    stream: bool | None = None
    stream_options: StreamOptionsBody | None = None
    priority: Annotated[int | None, Field(gt=-(2**31), lt=2**31)] = None
    cache_salt: CacheSalt | None = None
    prompt_cache_key: str | None = None
    user: str | None = None


@dataclass(frozen=True, slots=True)
class Call(Generic[Asked]):
    """A parsed request and how its answer is sent.

    model: the requested name. ignored: unknown fields, for the `x-headrace-ignored` header.
    """

    request: Asked
    model: str | None
    stream: bool
    include_usage: bool
    ignored: tuple[str, ...]


def requested_sampling(parsed: SamplingBody) -> RequestedSampling:
    """The sampling fields. Raises InvalidRequest for invalid biases."""
    return RequestedSampling(
        temperature=parsed.temperature,
        top_p=parsed.top_p,
        top_k=parsed.top_k,
        min_p=parsed.min_p,
        seed=parsed.seed,
        repetition_penalty=parsed.repetition_penalty,
        frequency_penalty=parsed.frequency_penalty,
        presence_penalty=parsed.presence_penalty,
        logit_bias=_logit_bias(parsed.logit_bias),
        allowed_token_ids=None if parsed.allowed_token_ids is None else tuple(parsed.allowed_token_ids),
        bad_words=tuple(parsed.bad_words or ()),
        min_tokens=parsed.min_tokens,
    )


def requested_stop(parsed: SamplingBody, max_tokens: int | None) -> RequestedStop:
    stop = parsed.stop or ()
    return RequestedStop(
        max_tokens=max_tokens,
        strings=(stop,) if isinstance(stop, str) else tuple(stop),
        token_ids=tuple(parsed.stop_token_ids or ()),
        ignore_eos=bool(parsed.ignore_eos),
    )


def requested_sparse(parsed: SparseBody) -> RequestedSparse:
    return RequestedSparse(None if parsed.sparse_prefill == "auto" else parsed.sparse_prefill, parsed.sparse_keep)


def requested_session(parsed: SamplingBody) -> str:
    """The session named in the body, for fair scheduling."""
    return parsed.prompt_cache_key or parsed.user or ""


def includes_usage(parsed: SamplingBody) -> bool:
    """Whether a stream ends with a usage chunk."""
    return bool(parsed.stream_options and parsed.stream_options.include_usage)


def counts_progress(parsed: SamplingBody) -> bool:
    """Whether each chunk has token counts."""
    return bool(parsed.stream_options and parsed.stream_options.continuous_usage_stats)


def check_stream(parsed: SamplingBody) -> None:
    """Raise InvalidRequest and UnsupportedField for options that contradict `stream`."""
    if parsed.stream and parsed.prompt_logprobs is not None:
        message = "prompt_logprobs is not supported when stream is true"
        raise UnsupportedField(message, param="prompt_logprobs")
    if parsed.stream_options is not None and not parsed.stream:
        raise InvalidRequest("stream_options is only allowed when stream is true", param="stream_options")


def _logit_bias(biases: Any) -> tuple[tuple[int, float], ...]:
    if biases is None:
        return ()
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
