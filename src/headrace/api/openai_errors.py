"""Errors in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from headrace.errors import AuthenticationFailed, HeadraceError, OriginRefused, Overloaded


def error_body(error: HeadraceError) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`, as a response body or as the data of a stream's last event."""
    return {
        "error": {
            "message": error.message,
            "type": _error_type(error),
            "param": error.param,
            "code": error.code,
        }
    }


def _error_type(error: HeadraceError) -> str:
    if isinstance(error, AuthenticationFailed):
        return "authentication_error"
    if isinstance(error, OriginRefused):
        return "permission_error"
    if isinstance(error, Overloaded):
        return "rate_limit_error"
    return "server_error" if error.status >= 500 else "invalid_request_error"
