"""Detects a family's traits in its chat template."""

from __future__ import annotations

import re

# Start and end markers in search order: a longer spelling before one that it contains.
THINK_MARKERS: tuple[tuple[str, str], ...] = (
    ("<think:opensource>", "</think:opensource>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("[THINK]", "[/THINK]"),
    ("<think>", "</think>"),
)

THINKING_WORDS = ("/think", "/no_think")

# Message fields for thinking, by template.
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")

# Template variables that switch thinking.
SWITCHES = ("enable_thinking", "thinking")

_CODE = re.compile(r"\{%.*?%\}|\{\{.*?\}\}", re.DOTALL)
_STRING = re.compile(r"'[^']*'|\"[^\"]*\"")


def detect_think_markers(chat_template: str) -> tuple[str, str] | None:
    """The thinking markers in the template, None if there are none.

    The end marker decides: templates whose prompt always opens the block may assemble the start marker.
    """
    return next((pair for pair in THINK_MARKERS if pair[1] in chat_template), None)


def detect_reasoning_keys(chat_template: str) -> tuple[str, ...]:
    """The message fields in which the template looks for thinking; the usual one if none."""
    field = r"""(?:\w\.|\[['"]|['"](?=\w+['"]\s+in\b)|\.get\(['"])"""
    found = (key for key in REASONING_KEYS if re.search(rf"{field}{key}\b", chat_template))
    return tuple(found) or REASONING_KEYS[:1]


def detect_thinking_key(chat_template: str) -> str | None:
    """The variable that switches thinking, None if the template reads none."""
    code = _STRING.sub("''", " ".join(_CODE.findall(chat_template)))
    return next((name for name in SWITCHES if _reads_variable(code, name)), None)


def detect_thinking_words(chat_template: str) -> tuple[str, str] | None:
    """Words in the system message that switch thinking on and off, None if the template has none."""
    return THINKING_WORDS if THINKING_WORDS[1] in chat_template else None


def _reads_variable(code: str, name: str) -> bool:
    """Whether the code reads a variable of this name before setting it; attributes don't count."""
    first = re.search(rf"(?<![\w.]){name}\b(?P<assigned>\s*=(?!=))?", code)
    return first is not None and first["assigned"] is None
