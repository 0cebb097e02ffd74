"""Finds where a rendered conversation may branch: prefixes that stay the same when it continues differently.

Found by rendering prefixes of the conversation and comparing. In a long conversation they are prefixes of its last
messages alone, rendered after a short question; they count as far as the conversation ends in the same text.

Text that two renderings share need not be shared tokens, because a merge may cross its end; so a boundary is moved back
to the end of the last control token that the template wrote, which nothing after it can change.
"""

from __future__ import annotations

import marshal
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from headrace.common_prefix import common_length
from headrace.text.normalise import num_leading_system
from headrace.text.template_probe import QUESTION, Render
from headrace.types.chat import ChatMessage, Role, TextPart
from headrace.types.request import BoundaryKind

MAX_MESSAGES = 8
"""The last messages have boundaries: a prefill leaves at most six snapshots, late ones first."""

_DIGEST_BYTES = 20

_MARSHAL_VERSION = 2
"""The last one in which equal values are equal bytes."""


@dataclass(frozen=True, slots=True)
class TextBoundary:
    """The first `length` characters of the rendered text stay the same."""

    length: int
    kind: BoundaryKind


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A rendered conversation.

    text: with the generation prompt, or with the last message unfinished. num_finished: messages without that one.
    render: renders the beginning of the conversation.
    num_agreed: length of the text's common suffix with the whole conversation, if these are its last messages.
    """

    text: str
    messages: tuple[ChatMessage, ...]
    num_finished: int
    render: Render
    num_agreed: int

    @property
    def finished(self) -> tuple[ChatMessage, ...]:
        return self.messages[: self.num_finished]


def last_messages(messages: tuple[ChatMessage, ...], num_finished: int) -> tuple[ChatMessage, ...]:
    """The end of a long conversation, as one that begins with a question; all messages of a short one."""
    start = num_finished - MAX_MESSAGES
    while start > 0 and messages[start].role not in ("user", "assistant"):
        start -= 1  # the results of a call follow it
    if start <= num_leading_system(messages) + 1:
        return messages
    return messages[start:] if messages[start].role == "user" else (QUESTION, *messages[start:])


def common_suffix_length(text: str, whole: str) -> int:
    # of a long text, only as much is reversed as may agree
    return common_length(text[::-1], whole[-len(text) :][::-1]) if text else 0


def find_boundaries(chat: RenderedChat, tail: RenderedChat) -> list[TextBoundary]:
    """Boundaries of the last messages, not yet moved to token borders and perhaps not rising.

    A template that refuses a prefix gives no boundary there.
    """
    finished = tail.finished
    first = max(num_leading_system(finished) + 1, len(finished) - MAX_MESSAGES)
    found = [
        (shared_length(tail, finished[:end], finished[end].role), BoundaryKind.MESSAGE)
        for end in range(first, len(finished))
    ]
    if finished:
        found.append((_prompt_length(tail), BoundaryKind.PROMPT))
    before = len(chat.text) - len(tail.text)
    return [
        TextBoundary(before + length, kind)
        for length, kind in found
        if length and len(tail.text) - length <= tail.num_agreed
    ]


def prompt_boundary(chat: RenderedChat) -> list[TextBoundary]:
    length = _prompt_length(chat) if chat.finished else 0
    return [TextBoundary(length, BoundaryKind.PROMPT)] if length else []


def _prompt_length(chat: RenderedChat) -> int:
    length = shared_length(chat, chat.finished, "assistant")
    answered = chat.render((*chat.finished, _probe("assistant")))
    return length if answered is None else min(length, common_length(chat.text, answered))


def shared_length(chat: RenderedChat, head: tuple[ChatMessage, ...], following: Role) -> int:
    """How many characters of the rendered text depend only on the head of the conversation; 0 if unknown.

    If the text begins with the head alone, that is all of it. Some templates change a turn once another one follows;
    then a head with another next turn is compared.
    """
    alone = chat.render(head) if head else None
    if alone is not None and chat.text.startswith(alone):
        return len(alone)
    followed = chat.render((*head, _probe(following)))
    return 0 if followed is None else common_length(chat.text, followed)


def _probe(role: Role) -> ChatMessage:
    tool_call_id = "000000000" if role == "tool" else None
    return ChatMessage(role=role, content=(TextPart("?"),), tool_call_id=tool_call_id)


def digest_of(value: Any) -> bytes:
    """The digest of plain values of Python, which tells 1 from True and from 1.0."""
    return blake2b(marshal.dumps(value, _MARSHAL_VERSION), digest_size=_DIGEST_BYTES).digest()


def digest_of_variables(variables: Mapping[str, Any]) -> bytes:
    return digest_of(sorted(variables.items(), key=lambda item: item[0]))
