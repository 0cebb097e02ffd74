"""The headers by which clients and gateways name a session."""

from __future__ import annotations

from collections.abc import Mapping

SESSION_HEADERS = (
    # of gateways, which operators set on purpose: the Gateway API inference extension and llm-d, then SMG
    "x-gateway-inference-fairness-id",
    "x-smg-routing-key",
    # of agents: opencode, Claude Code, Codex, older Codex, opencode; then of LiteLLM's clients
    "x-session-id",
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "x-session-affinity",
    "x-litellm-session-id",
)
"""Headers that name a client's session; the first one with a value counts."""


def session_header(headers: Mapping[str, str]) -> str:
    """The session in full; empty if no header names one."""
    return next((value for name in SESSION_HEADERS if (value := headers.get(name))), "")
