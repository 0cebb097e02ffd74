"""Which tokens of a prompt sparse prefill must keep, and which prompts it doesn't apply to."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.text.normalise import num_leading_system
from headrace.types.chat import ChatMessage, ChatRequest, GenerationOptions
from headrace.types.request import Boundary, BoundaryKind, Bypass, SparseOptions

LONG_TURN = 1024
"""Tokens of a last turn that is kept whole. A longer one holds a document, and documents need not be kept whole."""
TURN_EDGE = 128
"""Tokens kept at either end of a longer last turn: the question about the document is usually there."""


def completion_sparse_options(options: GenerationOptions, draft: str | None, num_tokens: int) -> SparseOptions | None:
    """Sparse prefill's options for a prompt without messages, whose ends are kept; None where it is off."""
    if draft is None or options.sparse_prefill is False:
        return None
    return SparseOptions(options.sparse_keep, _edges(0, num_tokens))


def chat_sparse_options(
    request: ChatRequest, draft: str | None, num_tokens: int, boundaries: Sequence[Boundary]
) -> SparseOptions | None:
    """Sparse prefill's options for a chat's prompt; None where it is off.

    The head of the prompt up to the end of the system prompt is kept, and the user's last turn with everything after
    it. A conversation with tools or tool results is computed whole.
    """
    keep = request.options.sparse_keep
    if draft is None or request.options.sparse_prefill is False:
        return None
    if request.tools or any(message.tool_calls or message.role == "tool" for message in request.messages):
        return SparseOptions(keep, bypass=Bypass.TOOLS)
    system_end = _system_end(request.messages, boundaries)
    if system_end is None:
        return SparseOptions(keep, bypass=Bypass.UNLOCATED)
    start = _last_turn_start(request.messages, boundaries)
    is_long = num_tokens - start > LONG_TURN
    turn = _edges(start, num_tokens) if is_long else (range(start, num_tokens),)
    return SparseOptions(keep, (range(system_end), *turn))


def _system_end(messages: Sequence[ChatMessage], boundaries: Sequence[Boundary]) -> int | None:
    """Tokens up to the end of the system prompt; None if the conversation has one that can't be located."""
    num_leading = num_leading_system(messages)
    if any(each.role == "system" for each in messages[num_leading:]):
        return None
    if not num_leading:
        return 0
    return next((each.num_tokens for each in boundaries if each.kind is BoundaryKind.SYSTEM), None)


def _last_turn_start(messages: Sequence[ChatMessage], boundaries: Sequence[Boundary]) -> int:
    """Where the last message of the user's begins, or something before it."""
    num_behind = next((index for index, each in enumerate(reversed(messages)) if each.role == "user"), len(messages))
    ends = [each.num_tokens for each in boundaries if each.kind is not BoundaryKind.PROMPT]
    # a boundary may be missing: then one that is further ahead takes its place, and more is kept
    return ends[-1 - num_behind] if num_behind < len(ends) else 0


def _edges(start: int, end: int) -> tuple[range, ...]:
    return range(start, min(start + TURN_EDGE, end)), range(max(start, end - TURN_EDGE), end)
