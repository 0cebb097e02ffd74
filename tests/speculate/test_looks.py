"""Looks for drafts cost no more than their share, and what drafts gain pays for more of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headrace.speculate.looks import Looks

BASE_S = 0.01


def take(looks: Looks, num_steps: int, costs: Sequence[float], first: int = 100) -> list[bool]:
    """At which of so many steps of a row, its `first` one and following, there was a look; each costs the next step."""
    looked: list[bool] = []
    for step in range(num_steps):
        looked.append(looks.is_due(first + step))
        looks.step(is_look=looked[-1])
        looks.pay(costs[step % len(costs)] if looked[-1] else 0.0, BASE_S)
    return looked


@pytest.mark.parametrize("share", [0.05, 0.1, 0.25])
def test_looks_that_find_nothing_take_a_hundredth_of_the_time(share: float) -> None:
    assert sum(take(Looks(), 2000, [share * BASE_S])) == pytest.approx(2000 * 0.01 / share, rel=0.08)


def test_there_are_looks_however_dear_they_are() -> None:
    looked = take(Looks(), 330, [50 * BASE_S])
    assert [step for step, is_look in enumerate(looked) if is_look] == list(range(0, 330, 33))


def test_what_a_draft_gains_pays_for_looks() -> None:
    """One in ten looks gains a step's time, nine cost a tenth of it each."""
    assert all(take(Looks(), 500, [-BASE_S, *[0.1 * BASE_S] * 9]))


def test_gains_of_long_ago_pay_for_three_steps_only() -> None:
    looks = Looks()
    take(looks, 100, [-BASE_S])
    assert 12 <= sum(take(looks, 60, [0.25 * BASE_S])) <= 16


def test_a_row_that_begins_is_looked_at_where_others_wait_and_its_looks_have_a_share_of_their_own() -> None:
    looks = Looks()
    take(looks, 5, [0.25 * BASE_S])
    assert not looks.is_due(16)
    assert take(looks, 16, [0.25 * BASE_S], first=0) == [True] + [False] * 15
