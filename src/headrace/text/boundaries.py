"""Where a rendered conversation may branch: prefixes that stay the same when it goes on differently.

Found by rendering the beginning of the conversation by itself and comparing. What such a beginning looks like is
remembered by its digest, so that the next turn of the conversation renders only the beginnings that are new.

Text that two renderings share need not be tokens that they share, because a merge may reach over the seam; so a
boundary is moved back to the end of the last control token that the template wrote, which nothing after it can change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.text.memo import BeginningDigests, Memo, TextDigest, chain
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


class Beginnings:
    """Beginnings of one rendered conversation by themselves, rendered where that isn't remembered.

    memo: beginnings of any conversations. salt: digest of what decides a rendering beside the messages.
    """

    def __init__(
        self, rendered: str, messages: tuple[ChatMessage, ...], render: Render, memo: Memo[TextDigest], salt: bytes
    ) -> None:
        self.rendered = rendered
        self.render = render
        self._memo = memo
        self._keys = chain(messages, salt)
        self._digests = BeginningDigests(rendered)

    def length_of(self, head: tuple[ChatMessage, ...]) -> int | None:
        """Characters of the head by itself, if the rendered text begins with it. head: the first of the messages."""
        key = self._keys[len(head)]
        known = self._memo.get(key)
        if known is not None and self._digests.include(known):
            return known.length
        alone = self.render(head)
        if alone is None or not self.rendered.startswith(alone):
            return None
        self._memo.put(key, self._digests.of(len(alone)))
        return len(alone)


def find_boundaries(
    messages: tuple[ChatMessage, ...], settled: tuple[ChatMessage, ...], beginnings: Beginnings, *, has_tools: bool
) -> list[TextBoundary]:
    """Boundaries of a rendered prompt, not yet moved to token borders and perhaps not rising.

    settled: the messages without an unfinished last one, which belongs to the answer: the prompt ends before it.
    A template that refuses the beginning of a conversation gives no boundary there.
    """
    found = []
    num_system = num_leading_system(settled)
    following = messages[num_system].role if num_system < len(messages) else "user"
    if num_system or has_tools:
        found.append((shared_length(messages[:num_system], following, beginnings), BoundaryKind.SYSTEM))
    for end in range(max(num_system + 1, len(settled) - MAX_MESSAGES), len(settled)):
        found.append((shared_length(settled[:end], settled[end].role, beginnings), BoundaryKind.MESSAGE))
    if settled:
        found.append((_prompt_length(settled, beginnings), BoundaryKind.PROMPT))
    return [TextBoundary(length, kind) for length, kind in found if length]


def _prompt_length(messages: tuple[ChatMessage, ...], beginnings: Beginnings) -> int:
    """Characters that also stand in the history once there is an answer."""
    length = shared_length(messages, "assistant", beginnings)
    answered = beginnings.render((*messages, _probe("assistant")))
    return length if answered is None else min(length, common_length(beginnings.rendered, answered))


def shared_length(head: tuple[ChatMessage, ...], following: Role, beginnings: Beginnings) -> int:
    """How many characters of the rendered text the head of the conversation decides; 0 if that can't be known.

    Where the head by itself is a beginning of the text, that is all of it. Some templates write a turn
    differently once another one follows; then a head with some other next turn is compared.
    """
    alone = beginnings.length_of(head) if head else None
    if alone is not None:
        return alone
    followed = beginnings.render((*head, _probe(following)))
    return 0 if followed is None else common_length(beginnings.rendered, followed)


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
