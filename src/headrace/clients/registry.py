"""All clients, in the order in which they are listed."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.clients.agents import CLAUDE, CLINE, CODEX, CONTINUE, OPENCODE, QWEN
from headrace.clients.python_tools import AIDER, LLM
from headrace.clients.record import Client

CLIENTS: Mapping[str, Client] = {
    each.name: each for each in (CLAUDE, CODEX, OPENCODE, QWEN, CLINE, CONTINUE, AIDER, LLM)
}
