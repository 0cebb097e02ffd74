"""Plans where a prefill takes snapshots, and reports what it reuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.prefix.node import Match, Mismatch
from headrace.types.request import Boundary, BoundaryKind

MAX_SNAPSHOTS = 6
"""Snapshots taken in one prefill. A snapshot of a hybrid model is as large as the keys and values of some thousand
tokens, and one turn brings few new positions worth one."""
BRANCH_POINT_TOKENS = 16
"""A branch point fewer tokens after a boundary counts as that boundary: prompts often agree by chance in the first
words after one."""
REPEAT_TOKENS = 16
"""A snapshot before a prompt's last token is taken if it saves an identical prompt at least this many tokens."""


@dataclass(frozen=True, slots=True)
class SnapshotPlan:
    """snapshot_points: lengths at which to take snapshots, rising.

    report: how much of the prompt is reused, and where and why it differs from what is stored: one line for the log and
    the status page. It quotes no tokens.
    """

    snapshot_points: tuple[int, ...]
    report: str


def plan_snapshots(match: Match, boundaries: Sequence[Boundary], *, needs_snapshots: bool) -> SnapshotPlan:
    """The plan for a prompt.

    boundaries: of the prompt, rising.
    needs_snapshots: whether the model has windowed or opaque layers; otherwise there are no snapshot points.
    Raises ValueError for a boundary beyond the prompt.
    """
    boundaries = tuple(boundaries)
    for length in (boundary.num_tokens for boundary in boundaries):
        if not 0 <= length <= match.num_prompt_tokens:
            raise ValueError(f"a boundary at {length} lies outside of the prompt's {match.num_prompt_tokens} tokens")
    points = _snapshot_points(match, boundaries) if needs_snapshots else ()
    return SnapshotPlan(points, _report(match, boundaries))


def _report(match: Match, boundaries: tuple[Boundary, ...]) -> str:
    num_reused, num_agreed = match.num_tokens, match.num_agreed_tokens
    report = f"reused {num_reused} of {match.num_prompt_tokens} prompt tokens"
    if num_reused:
        report += f" ({_place(num_reused, boundaries)})"
    if match.mismatch is not Mismatch.EMPTY:
        report += f"; parted at token {num_agreed} ({_place(num_agreed, boundaries)})"
    report += f": {match.mismatch}"
    if num_reused < min(num_agreed, match.limit):
        report += f"; no state is held after token {num_reused}"
    elif match.limit < min(num_agreed, match.num_prompt_tokens - 1):
        report += f"; no more than {match.limit} were to be reused"
    return report


def _snapshot_points(match: Match, boundaries: tuple[Boundary, ...]) -> tuple[int, ...]:
    chosen: list[int] = []
    for length in _by_value(match, boundaries):
        if length > match.num_tokens and length not in match.snapshot_lengths and length not in chosen:
            chosen.append(length)
    return tuple(sorted(chosen[:MAX_SNAPSHOTS]))


def _by_value(match: Match, boundaries: tuple[Boundary, ...]) -> list[int]:
    """Lengths worth a snapshot, the best first.

    The next turn starts from the prompt boundary, and a repeated prompt without one from its last token but one; a
    branch point has proved that prompts branch there; every new conversation starts from the system prompt; an edited
    turn, from a message, late ones first.
    """
    lengths: dict[BoundaryKind, list[int]] = {kind: [] for kind in BoundaryKind}
    for boundary in reversed(boundaries):
        lengths[boundary.kind].append(boundary.num_tokens)
    places = [match.num_tokens, *(boundary.num_tokens for boundary in boundaries)]
    return [
        *(lengths[BoundaryKind.PROMPT] or _before_last_token(match, places)),
        *_branch_point(match, places),
        *lengths[BoundaryKind.SYSTEM],
        *lengths[BoundaryKind.MESSAGE],
    ]


def _before_last_token(match: Match, places: list[int]) -> list[int]:
    length = match.num_prompt_tokens - 1
    return [length] if length - max(places) >= REPEAT_TOKENS else []


def _branch_point(match: Match, places: list[int]) -> list[int]:
    """The branch point, or the position just before it that serves as well; none if there is none."""
    if match.branch_point is None:
        return []
    place = max(one for one in places if one <= match.branch_point)
    return [match.branch_point if match.branch_point - place >= BRANCH_POINT_TOKENS else place]


def _place(length: int, boundaries: tuple[Boundary, ...]) -> str:
    before = [one for one in boundaries if 0 < one.num_tokens <= length]
    if not before:
        return "before the first boundary"
    boundary = max(before, key=lambda one: one.num_tokens)
    distance = length - boundary.num_tokens
    return f"{f'{distance} past' if distance else 'at'} the {boundary.kind} boundary of token {boundary.num_tokens}"
