"""Which tokens of a prompt sparse prefill must keep, and which prompts it doesn't apply to."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import InvalidRequest
from headrace.types.chat import ChatMessage, ChatRequest, RequestedSparse
from headrace.types.request import Boundary, BoundaryKind, Bypass, SparseOptions

LONG_TURN = 1024
"""Tokens of a last turn that is kept whole. A longer one holds a document, and documents need not be kept whole."""
TURN_EDGE = 128
"""Tokens kept at either end of a longer last turn: the question about the document is usually there."""


def check_sparse(sparse: RequestedSparse, draft: str | None) -> None:
    """Raises InvalidRequest for an invalid share, and for options that need a draft model if there is none."""
    if sparse.keep is not None and not 0 < sparse.keep <= 1:
        raise InvalidRequest(f"sparse_keep must be in (0, 1], not {sparse.keep}", param="sparse_keep")
    if draft is not None:
        return
    for name, is_asked in (("sparse_prefill", sparse.prefill is True), ("sparse_keep", sparse.keep is not None)):
        if is_asked:
            raise InvalidRequest(
                f"{name} needs a draft model, and the server was started without one (--sparse-draft)", param=name
            )


def completion_sparse_options(sparse: RequestedSparse, draft: str | None, num_tokens: int) -> SparseOptions | None:
    """Sparse prefill's options for a prompt without messages, whose ends are kept; None where it is off."""
    if draft is None or sparse.prefill is False:
        return None
    return SparseOptions(sparse.keep, _edges(0, num_tokens))


def chat_sparse_options(
    request: ChatRequest, draft: str | None, num_tokens: int, boundaries: Sequence[Boundary]
) -> SparseOptions | None:
    """Sparse prefill's options for a chat's prompt; None where it is off.

    The head of the prompt up to the end of the system prompt is kept, and the user's last turn with everything after
    it. A conversation with tools or tool results is computed whole.
    """
    sparse = request.sparse
    if draft is None or sparse.prefill is False:
        return None
    if request.tools or any(message.tool_calls or message.role == "tool" for message in request.messages):
        return SparseOptions(sparse.keep, bypass=Bypass.TOOLS)
    head = _head(request.messages, boundaries)
    if head is None:
        return SparseOptions(sparse.keep, bypass=Bypass.UNLOCATED)
    start = _last_turn(request.messages, boundaries)
    is_long = num_tokens - start > LONG_TURN
    turn = _edges(start, num_tokens) if is_long else (range(start, num_tokens),)
    return SparseOptions(sparse.keep, (range(head), *turn))


def _head(messages: Sequence[ChatMessage], boundaries: Sequence[Boundary]) -> int | None:
    """Tokens up to the end of the system prompt; None if the conversation has one that can't be located."""
    num_leading = next((index for index, each in enumerate(messages) if each.role != "system"), len(messages))
    if any(each.role == "system" for each in messages[num_leading:]):
        return None
    if not num_leading:
        return 0
    return next((each.num_tokens for each in boundaries if each.kind is BoundaryKind.SYSTEM), None)


def _last_turn(messages: Sequence[ChatMessage], boundaries: Sequence[Boundary]) -> int:
    """Where the last message of the user's begins, or something before it."""
    num_behind = next((index for index, each in enumerate(reversed(messages)) if each.role == "user"), len(messages))
    ends = [each.num_tokens for each in boundaries if each.kind is not BoundaryKind.PROMPT]
    # a boundary may be missing: then one that is further ahead takes its place, and more is kept
    return ends[-1 - num_behind] if num_behind < len(ends) else 0


def _edges(start: int, end: int) -> tuple[range, ...]:
    return range(start, min(start + TURN_EDGE, end)), range(max(start, end - TURN_EDGE), end)
