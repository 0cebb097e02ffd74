"""Where a rendered conversation may branch: prefixes that stay the same when it goes on differently.

Found by rendering the beginning of the conversation by itself and comparing. Text that two renderings share need
not be tokens that they share, because a merge may reach over the seam; so a boundary is moved back to the end of
the last control token that the template wrote, which nothing after it can change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.text.normalise import num_leading_system
from headrace.types.chat import ChatMessage, Role, TextPart
from headrace.types.request import BoundaryKind

# Boundaries of older messages are seldom worth a rendering each.
MAX_MESSAGES = 16

Render = Callable[[tuple[ChatMessage, ...]], str | None]
"""Renders messages without a generation prompt; None if the template refuses them."""


@dataclass(frozen=True, slots=True)
class TextBoundary:
    """The first `length` characters of the rendered text stay the same."""

    length: int
    kind: BoundaryKind


def find_boundaries(
    rendered: str,
    messages: tuple[ChatMessage, ...],
    settled: tuple[ChatMessage, ...],
    render: Render,
    *,
    has_tools: bool,
) -> list[TextBoundary]:
    """Boundaries of a rendered prompt, not yet moved to token borders and perhaps not rising.

    settled: the messages without an unfinished last one, which belongs to the answer: the prompt ends before it.
    A template that refuses the beginning of a conversation gives no boundary there.
    """
    found = []
    num_system = num_leading_system(settled)
    following = messages[num_system].role if num_system < len(messages) else "user"
    if num_system or has_tools:
        found.append((shared_length(rendered, messages[:num_system], following, render), BoundaryKind.SYSTEM))
    for end in range(max(num_system + 1, len(settled) - MAX_MESSAGES), len(settled)):
        length = shared_length(rendered, settled[:end], settled[end].role, render)
        found.append((length, BoundaryKind.MESSAGE))
    if settled:
        found.append((_prompt_length(rendered, settled, render), BoundaryKind.PROMPT))
    return [TextBoundary(length, kind) for length, kind in found if length]


def _prompt_length(rendered: str, messages: tuple[ChatMessage, ...], render: Render) -> int:
    """Characters that also stand in the history once there is an answer."""
    answered = render((*messages, _probe("assistant")))
    length = shared_length(rendered, messages, "assistant", render)
    return length if answered is None else min(length, common_length(rendered, answered))


def shared_length(rendered: str, head: tuple[ChatMessage, ...], following: Role, render: Render) -> int:
    """How many characters of the rendered text the head of the conversation decides; 0 if that can't be known.

    Where the head by itself is a beginning of the text, that is all of it. Some templates write a turn
    differently once another one follows; then a head with some other next turn is compared.
    """
    alone = render(head) if head else None
    if alone is not None and rendered.startswith(alone):
        return len(alone)
    followed = render((*head, _probe(following)))
    return 0 if followed is None else common_length(rendered, followed)


def common_length(first: str | tuple[int, ...], second: str | tuple[int, ...]) -> int:
    """Length of the longest common beginning of two texts, or of two prompts."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _probe(role: Role) -> ChatMessage:
    tool_call_id = "000000000" if role == "tool" else None
    return ChatMessage(role=role, content=(TextPart("?"),), tool_call_id=tool_call_id)
