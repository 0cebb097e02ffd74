"""Errors as Anthropic writes them."""

from __future__ import annotations

import pytest

from headrace.api.error_bodies import anthropic_error
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
    assert anthropic_error(error) == {"type": "error", "error": {"type": kind, "message": "m"}}


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_make_clients_shorten_it() -> None:
    error = ContextTooLong.of_prompt(1000, 1234, "messages")
    # The longest prompt leaves room for one token of an answer.
    assert anthropic_error(error)["error"]["message"] == "prompt is too long: 1234 tokens > 999 maximum"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ContextTooLong("7 and 4 make 11", param="max_tokens"), "max_tokens: 7 and 4 make 11"),
        (InvalidRequest("not a JSON schema", param="output_format"), "output_format: not a JSON schema"),
        (InvalidRequest("top_p must not be 2", param="top_p"), "top_p must not be 2"),
    ],
)
def test_a_message_begins_with_the_field_that_is_at_fault(error: HeadraceError, message: str) -> None:
    assert anthropic_error(error)["error"]["message"] == message
