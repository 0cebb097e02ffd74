"""Errors in the shapes of OpenAI and Anthropic."""

from __future__ import annotations

from typing import Any

from headrace.errors import (
    AuthenticationFailed,
    ContextTooLong,
    HeadraceError,
    OriginRefused,
    UnsupportedField,
)


def openai_error(error: HeadraceError) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`, as a response body or as the data of a stream's last event."""
    return {
        "error": {
            "message": error.message,
            "type": _openai_type(error),
            "param": error.param,
            "code": error.code,
        }
    }


def _openai_type(error: HeadraceError) -> str:
    if isinstance(error, AuthenticationFailed):
        return "authentication_error"
    if isinstance(error, OriginRefused):
        return "permission_error"
    if error.status == 429:
        return "rate_limit_error"
    return "server_error" if error.status >= 500 else "invalid_request_error"


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}

# These tell the SDK's tool runner to go on without the field.
_DETAILS = {"thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}


def anthropic_error(error: HeadraceError) -> dict[str, Any]:
    """`{"type": "error", "error": {type, message}}`, as a response body or as the data of an `error` event."""
    body: dict[str, Any] = {"type": _anthropic_type(error), "message": _anthropic_message(error)}
    if isinstance(error, UnsupportedField) and error.param in _DETAILS:
        body["details"] = _DETAILS[error.param]
    return {"type": "error", "error": body}


def _anthropic_type(error: HeadraceError) -> str:
    return _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")


def _anthropic_message(error: HeadraceError) -> str:
    if isinstance(error, ContextTooLong) and error.num_tokens is not None and error.max_model_len is not None:
        # Claude Code parses both numbers and shortens its conversation. The answer needs a token too.
        return f"prompt is too long: {error.num_tokens} tokens > {error.max_model_len - 1} maximum"
    if error.param is None or error.message.startswith(error.param):
        return error.message
    return f"{error.param}: {error.message}"
