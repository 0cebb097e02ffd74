"""The headers by which clients and gateways name a session."""

from __future__ import annotations

from collections.abc import Mapping

SESSION_HEADERS = ("x-session-id", "x-claude-code-session-id", "session-id")
"""The first one present counts."""


def session_header(headers: Mapping[str, str]) -> str:
    return next((headers[name] for name in SESSION_HEADERS if name in headers), "")
