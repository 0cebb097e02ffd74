"""POST /v1/completions: prompts to continue without a chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from headrace.api.ids import new_id
from headrace.api.json_body import JsonBody, check, ignored_names, read_object, unknown_fields
from headrace.api.openai_sampling import (
    MAX_LOGPROBS,
    NEUTRAL_VALUES,
    WITHOUT_EFFECT,
    Call,
    ChunkedBody,
    check_stream,
    chunked_call,
    chunked_options,
    requested_max_tokens,
)
from headrace.errors import InvalidRequest, UnsupportedField
from headrace.types.chat import CompletionRequest
from headrace.types.model import ModelTraits

TextOrIds = str | tuple[int, ...]

MAX_PROMPTS = 1024
MAX_CHOICES = 1024
"""Over all prompts."""

# OpenAI's default. A chat ends with the model's end token; plain text may never end.
_DEFAULT_MAX_TOKENS = 16


class CompletionBody(ChunkedBody):
    """The supported fields."""

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **NEUTRAL_VALUES,
        # Structured output is for chats.
        "response_format": ({"type": "text"},),
        "guided_choice": (),
        "guided_grammar": (),
        "guided_json": (),
        "guided_regex": (),
        "structured_outputs": (),
        "add_special_tokens": (True,),
        "prompt_embeds": (),
        "suffix": ("",),
    }
    without_effect: ClassVar[frozenset[str]] = WITHOUT_EFFECT

    # Of four shapes; see read_texts_or_ids.
    prompt: Any = None
    echo: bool | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    best_of: Annotated[int | None, Field(ge=1)] = None


def read_completion(body: JsonBody, model: ModelTraits) -> Call[CompletionRequest]:
    """Parse and validate a body. Raises InvalidRequest, UnsupportedField with the field's path as its param."""
    value = read_object(body)
    parsed = check(CompletionBody, value)
    check_stream(parsed)
    num_choices = parsed.n or 1
    if parsed.best_of not in (None, num_choices):
        message = f"best_of is not supported with any value but that of n, which is {num_choices}"
        raise UnsupportedField(message, param="best_of")
    prompts = read_texts_or_ids(parsed.prompt, "prompt", MAX_PROMPTS)
    if len(prompts) * num_choices > MAX_CHOICES:
        message = f"n must be at most {MAX_CHOICES // len(prompts)} with {len(prompts)} prompts, not {num_choices}"
        raise InvalidRequest(message, param="n")
    asked = requested_max_tokens({"max_tokens": parsed.max_tokens, "n_predict": parsed.n_predict})
    max_tokens = _DEFAULT_MAX_TOKENS if asked is None else asked
    request = CompletionRequest(
        request_id=new_id("cmpl-"),
        prompts=prompts,
        options=chunked_options(parsed, model.defaults, max_tokens, parsed.logprobs),
        echo=bool(parsed.echo),
    )
    return chunked_call(parsed, request, ignored_names(unknown_fields(parsed)))


def read_texts_or_ids(value: object, field: str, most: int, *, allows_empty: bool = True) -> tuple[TextOrIds, ...]:
    """A text, a list of texts, token ids, or a list of lists of ids, `most` in all. Raises InvalidRequest.

    The first element decides which: a pydantic union would report an error for each token. allows_empty: whether
    texts may be empty.
    """
    if value is None:
        raise InvalidRequest(f"{field} is missing", param=field)
    if isinstance(value, str):
        return (_text_or_ids(value, field, allows_empty),)
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"{field} must be a text, token ids, or a list of these that is not empty", param=field)
    if type(value[0]) is int:
        return (read_token_ids(value, field),)
    if len(value) > most:
        raise InvalidRequest(f"{field} must hold at most {most} {field}s, not {len(value)}", param=field)
    return tuple(_text_or_ids(each, f"{field}[{index}]", allows_empty) for index, each in enumerate(value))


def _text_or_ids(value: object, path: str, allows_empty: bool) -> TextOrIds:
    if isinstance(value, str):
        if not value and not allows_empty:
            raise InvalidRequest(f"{path} must not be empty", param=path)
        return value
    if isinstance(value, list) and value:
        return read_token_ids(value, path)
    raise InvalidRequest(f"{path} must be a text or token ids", param=path)


def read_token_ids(value: list[object], path: str) -> tuple[int, ...]:
    """The ids in a list. Raises InvalidRequest for the first invalid element."""
    for index, token_id in enumerate(value):
        if type(token_id) is not int or not 0 <= token_id < 2**31:
            raise InvalidRequest(f"{path}[{index}] must be a token id", param=f"{path}[{index}]")
    return tuple(token_id for token_id in value if type(token_id) is int)
