"""Where a prefill begins, where it takes snapshots, and what is told about it."""

from __future__ import annotations

import pytest
from prefix.made_up import HERE, Shelf, made_up_tokens

from headrace.prefix import snapshots
from headrace.prefix.node import Match
from headrace.prefix.snapshots import SnapshotPlan, plan_snapshots
from headrace.types.request import Boundary, BoundaryKind

SYSTEM, MESSAGE, PROMPT = BoundaryKind.SYSTEM, BoundaryKind.MESSAGE, BoundaryKind.PROMPT
TURNS = (
    Boundary(200, SYSTEM),
    Boundary(400, MESSAGE),
    Boundary(600, MESSAGE),
    Boundary(800, MESSAGE),
    Boundary(990, PROMPT),
)
KEY = made_up_tokens(1, 1000)
OTHER = made_up_tokens(2, 1000)


def match_of(*stored: tuple[tuple[int, ...], list[int]], prompt: tuple[int, ...] = KEY, spans: bool = True) -> Match:
    """What a tree of a hybrid model knows of a prompt after some keys with their snapshots."""
    shelf = Shelf(has_spans=spans, needs_snapshots=True)
    for key, lengths in stored:
        shelf.put(key, lengths)
    return shelf.find(prompt)


def plan(match: Match, boundaries: tuple[Boundary, ...] = TURNS, most: int = 9) -> SnapshotPlan:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(snapshots, "MAX_SNAPSHOTS", most)
        return plan_snapshots(match, boundaries, needs_snapshots=True)


def test_a_cold_prompt_is_marked_at_all_its_boundaries() -> None:
    cold = plan(match_of())
    assert cold.snapshot_points == (200, 400, 600, 800, 990)


def test_a_warm_prompt_is_marked_behind_its_beginning_only() -> None:
    warm = plan(match_of((KEY, [200, 600])))
    assert warm.snapshot_points == (800, 990)


@pytest.mark.parametrize(
    ("most", "points"),
    [
        (0, ()),
        (1, (990,)),
        (2, (700, 990)),
        (3, (200, 700, 990)),
        (4, (200, 700, 800, 990)),
        (5, (200, 600, 700, 800, 990)),
    ],
)
def test_the_best_snapshot_points_are_taken_when_there_are_too_many(most: int, points: tuple[int, ...]) -> None:
    match = match_of((KEY[:700] + OTHER, [1700]))
    assert match.branch_point == 700
    assert plan(match, TURNS, most=most).snapshot_points == points


def test_a_junction_close_behind_a_boundary_counts_as_the_boundary() -> None:
    match = match_of((KEY[:405] + OTHER, [1405]))
    assert match.branch_point == 405
    assert plan(match).snapshot_points == (200, 400, 600, 800, 990)
    assert plan(match, most=2).snapshot_points == (400, 990)


def test_a_junction_close_behind_the_restored_state_is_left_out() -> None:
    match = match_of((KEY[:405] + OTHER, [400, 1405]))
    assert (match.num_tokens, match.branch_point) == (400, 405)
    assert plan(match, TURNS[-1:]).snapshot_points == (990,)


def test_no_mark_is_where_a_snapshot_lies_already() -> None:
    match = match_of((KEY, [200, 1000]))
    assert match.snapshot_lengths == (1000,)
    assert plan(match, (Boundary(1000, PROMPT),)).snapshot_points == (
        999,
    )  # the branch_point serves the same prompt next time


def test_a_prompt_without_its_own_boundary_is_marked_before_its_last_token() -> None:
    assert plan(match_of(), ()).snapshot_points == (999,)
    assert plan(match_of(), TURNS[:2]).snapshot_points == (200, 400, 999)
    assert plan(match_of(), TURNS[:2], most=1).snapshot_points == (999,)
    assert plan(match_of((KEY, [999])), ()).snapshot_points == ()
    assert plan(match_of((KEY[:983], [983])), ()).snapshot_points == (999,)
    assert plan(match_of((KEY[:984], [984])), ()).snapshot_points == ()
    assert plan(match_of(prompt=KEY[:1]), ()).snapshot_points == ()
    # one that is made ready to go on ends with a message, from which the next one starts
    for end in (984, 1000):
        assert plan(match_of(), (Boundary(end, MESSAGE),)).snapshot_points == (end,)
    assert plan(match_of(), (Boundary(983, MESSAGE),)).snapshot_points == (983, 999)


def test_a_prompt_of_a_model_with_sliceable_layers_only_has_no_marks() -> None:
    shelf = Shelf(has_spans=True, needs_snapshots=False)
    shelf.put(KEY[:500])
    made = plan_snapshots(shelf.find(KEY), TURNS, needs_snapshots=False)
    assert made.snapshot_points == ()


def test_marks_beyond_the_prompt_are_refused() -> None:
    with pytest.raises(ValueError, match="1001"):
        plan(match_of(), (Boundary(1001, PROMPT),))
    with pytest.raises(ValueError, match="-5"):
        plan(match_of(), (Boundary(-5, MESSAGE),))


def test_the_report_names_the_boundaries_and_the_reason() -> None:
    assert plan(match_of((KEY[:700] + OTHER, [200, 1700]))).report == (
        "reused 200 of 1000 prompt tokens (at the system boundary of token 200); "
        "parted at token 700 (100 past the message boundary of token 600): "
        "another token follows in what is stored; no state is held after token 200"
    )


def test_the_report_of_a_first_prompt_says_that_nothing_is_stored() -> None:
    assert plan(match_of()).report == (
        "reused 0 of 1000 prompt tokens: nothing is stored for this model, adapter and salt"
    )


def test_the_report_of_a_full_hit_ends_with_the_prompt() -> None:
    shelf = Shelf(has_spans=True, needs_snapshots=False)
    shelf.put(KEY)
    assert plan_snapshots(shelf.find(KEY), (), needs_snapshots=False).report == (
        "reused 999 of 1000 prompt tokens (before the first boundary); "
        "parted at token 1000 (before the first boundary): the prompt ends there"
    )


def test_the_report_tells_when_more_could_have_been_reused() -> None:
    shelf = Shelf(has_spans=True, needs_snapshots=False)
    shelf.put(KEY)
    text = plan_snapshots(shelf.tree.match(HERE, KEY, 0), (), needs_snapshots=False).report
    assert text.endswith("the prompt ends there; no more than 0 were to be reused")


def test_the_report_quotes_no_tokens() -> None:
    secret = 149_999
    text = plan(match_of((KEY[:700] + OTHER, [1700]), prompt=KEY[:700] + (secret,) * 300)).report
    assert str(secret) not in text and str(OTHER[0]) not in text
