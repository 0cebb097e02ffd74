"""DraftThrottle for drafts cost no more than their share, and what drafts gain pays for more of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headrace.speculate.draft_throttle import DraftThrottle

BASE_S = 0.01


def take(looks: DraftThrottle, num_steps: int, costs: Sequence[float], first: int = 100) -> list[bool]:
    """At which of so many steps of a row, its `first` one and following, there was a look.

    costs: of the looks, in turn, in steps; what is less than 0 is gained by drafts.
    """
    due: list[bool] = []
    for step in range(num_steps):
        due.append(looks.is_due(first + step))
        looks.step(attempted=due[-1])
        cost_s = costs[(sum(due) - 1) % len(costs)] * BASE_S if due[-1] else 0.0
        looks.charge(max(cost_s, 0.0))
        looks.earn(max(-cost_s, 0.0), BASE_S)
    return due


@pytest.mark.parametrize("share", [0.05, 0.1, 0.25])
def test_looks_that_find_nothing_take_a_hundredth_of_the_time(share: float) -> None:
    assert sum(take(DraftThrottle(), 2000, [share])) == pytest.approx(2000 * 0.01 / share, rel=0.08)


def test_there_are_looks_however_dear_they_are() -> None:
    due = take(DraftThrottle(), 330, [50])
    assert [step for step, attempted in enumerate(due) if attempted] == list(range(0, 330, 33))


def test_what_a_draft_gains_pays_for_looks() -> None:
    """One in ten looks gains a step's time, nine cost a tenth of it each."""
    assert all(take(DraftThrottle(), 500, [-1, *[0.1] * 9]))


def test_gains_of_long_ago_pay_for_three_steps_only() -> None:
    looks = DraftThrottle()
    take(looks, 100, [-1])
    assert 12 <= sum(take(looks, 60, [0.25])) <= 16


def test_a_row_that_begins_is_looked_at_where_others_wait_and_its_looks_have_a_share_of_their_own() -> None:
    looks = DraftThrottle()
    take(looks, 5, [0.25])
    assert not looks.is_due(16)
    assert take(looks, 16, [0.25], first=0) == [True] + [False] * 15


def test_a_right_draft_is_followed_by_a_look() -> None:
    looks = DraftThrottle()
    take(looks, 5, [0.25])
    assert not looks.is_due(100)
    looks.is_promising = True
    assert looks.is_due(100)
