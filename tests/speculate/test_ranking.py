"""Which drafts are tried, by how often their like were right."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.speculate.ranking import Proposal, Ranking, RowAcceptance


def copied(*token_ids: int, confidence: float = 0.8) -> Proposal:
    return Proposal(token_ids, (confidence,) * len(token_ids))


def taught(ranking: Ranking, acceptance: RowAcceptance, proposal: Proposal, num_accepted: int, times: int = 40) -> None:
    for _ in range(times):
        ranking.report(acceptance, ranking.best(acceptance, 9, copied=proposal), num_accepted)


def test_survival_is_the_product_of_the_estimates() -> None:
    best = Ranking().best(RowAcceptance(), 4, copied=Proposal((5, 6, 7), (0.6, 0.7, 0.8)))
    assert best.token_ids == (5, 6, 7)
    assert best.survival == pytest.approx((0.6, 0.42, 0.336))
    assert not best.uses_model
    assert best.first(2).survival == pytest.approx((0.6, 0.42))


def test_a_long_sound_copy_is_preferred_to_two_drafts_of_the_head_and_a_doubtful_one_is_not() -> None:
    ranking, acceptance = Ranking(), RowAcceptance()
    assert ranking.best(acceptance, 6, copied=copied(*range(6), confidence=0.9), num_model=2).token_ids == tuple(
        range(6)
    )
    best = ranking.best(acceptance, 6, copied=copied(*range(6), confidence=0.4), num_model=2)
    assert (best.token_ids, len(best.ranked), best.uses_model) == ((), 2, True)


def test_of_equals_the_copy_is_taken() -> None:
    best = Ranking().best(RowAcceptance(), 1, copied=copied(4, confidence=0.75), num_model=1)
    assert best.token_ids == (4,)


def test_forced_tokens_come_first_and_are_certain() -> None:
    best = Ranking().best(RowAcceptance(), 5, forced=(1, 2), copied=copied(9, 9, 9), num_model=4)
    assert (best.token_ids, best.survival) == ((1, 2), (1.0, 1.0))


def test_a_copy_that_agrees_goes_on_behind_forced_tokens() -> None:
    best = Ranking().best(RowAcceptance(), 3, forced=(1, 2), copied=copied(1, 2, 3, 4, confidence=0.6), num_model=4)
    assert best.token_ids == (1, 2, 3)
    assert best.survival == pytest.approx((1, 1, 0.6))


def test_no_more_is_drafted_than_there_is_room_for() -> None:
    ranking, acceptance = Ranking(), RowAcceptance()
    assert len(ranking.best(acceptance, 2, num_model=4).ranked) == 2
    assert ranking.best(acceptance, 1, forced=(1, 2)).token_ids == (1,)
    assert ranking.best(acceptance, 0, forced=(1,), copied=copied(1, 2), num_model=3).ranked == ()
    assert ranking.best(acceptance, 4).ranked == ()


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_estimates_come_to_what_really_happens(chance: float) -> None:
    rng = np.random.default_rng(2)
    ranking, records = Ranking(), [RowAcceptance() for _ in range(4)]
    survivals = []
    for number in range(2000):
        best = ranking.best(records[number % 4], 1, num_model=1)
        survivals.append(best.survival[0])
        ranking.report(records[number % 4], best, int(rng.random() < chance))
    assert abs(np.mean(survivals[500:]) - chance) < 0.05


def test_each_place_of_the_head_has_an_estimate_of_its_own() -> None:
    ranking, acceptance = Ranking(), RowAcceptance()
    for _ in range(60):
        ranking.report(acceptance, ranking.best(acceptance, 3, num_model=3), 1)
    first, second, third = (draft.estimate for draft in ranking.best(acceptance, 3, num_model=3).ranked)
    assert first > 0.75 > 0.2 > second
    assert third > 0.3  # it was never reached


def test_confident_copies_have_estimates_of_their_own() -> None:
    ranking, acceptance = Ranking(), RowAcceptance()
    for _ in range(30):
        taught(ranking, acceptance, copied(1, confidence=0.9), 1, times=1)
        taught(ranking, acceptance, copied(1, confidence=0.6), 0, times=1)
    assert ranking.best(acceptance, 1, copied=copied(1, confidence=0.9)).survival[0] > 0.7
    assert ranking.best(acceptance, 1, copied=copied(1, confidence=0.6)).survival[0] < 0.3


def test_a_row_whose_drafts_are_rejected_falls_fast_and_takes_no_other_with_it() -> None:
    ranking, good, bad = Ranking(), RowAcceptance(), RowAcceptance()
    for _ in range(50):
        ranking.report(good, ranking.best(good, 1, num_model=1), 1)
    for _ in range(8):
        for _ in range(5):
            ranking.report(good, ranking.best(good, 1, num_model=1), 1)
        ranking.report(bad, ranking.best(bad, 1, num_model=1), 0)
    assert ranking.best(bad, 1, num_model=1).survival[0] < 0.35
    assert ranking.best(good, 1, num_model=1).survival[0] > 0.8


def test_forced_tokens_teach_nothing() -> None:
    ranking, acceptance = Ranking(), RowAcceptance()
    before = ranking.best(acceptance, 3, copied=copied(1, 2, 3), num_model=3)
    ranking.report(acceptance, ranking.best(acceptance, 3, forced=(1, 2)), 0)
    assert ranking.best(acceptance, 3, copied=copied(1, 2, 3), num_model=3).ranked == before.ranked
