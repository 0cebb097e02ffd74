"""Errors as Anthropic writes them."""

from __future__ import annotations

import pytest

from headrace.api.anthropic_errors import error_body
from headrace.errors import (
    AuthenticationFailed,
    BodyTooLarge,
    ContextTooLong,
    EngineDead,
    GenerationFailed,
    HeadraceError,
    InvalidRequest,
    ModelNotFound,
    OriginRefused,
    Overloaded,
)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("m"), "invalid_request_error"),
        (AuthenticationFailed("m"), "authentication_error"),
        (OriginRefused("m"), "permission_error"),
        (ModelNotFound("m"), "not_found_error"),
        (BodyTooLarge("m"), "request_too_large"),
        (Overloaded("m", retry_after_s=1), "rate_limit_error"),
        (GenerationFailed("m"), "api_error"),
        (EngineDead("m"), "api_error"),
    ],
)
def test_each_error_has_the_type_that_clients_know(error: HeadraceError, kind: str) -> None:
    assert error_body(error) == {"type": "error", "error": {"type": kind, "message": "m"}}


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_make_clients_shorten_it() -> None:
    error = ContextTooLong.of_prompt(1000, 1234, "messages")
    # The longest prompt leaves room for one token of an answer.
    assert error_body(error)["error"]["message"] == "prompt is too long: 1234 tokens > 999 maximum"


def test_an_answer_that_is_too_long_is_told_as_it_is() -> None:
    error = ContextTooLong("7 and 4 make 11, but the context holds 10", param="max_tokens")
    assert error_body(error)["error"]["message"] == "7 and 4 make 11, but the context holds 10"
