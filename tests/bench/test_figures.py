"""Figures are what hand arithmetic says they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.bench.answer import Answer
from headrace.bench.figures import (
    Difference,
    Sameness,
    Spread,
    faults,
    figures_of,
    gaps_s,
    kinds_of,
    ratio,
    sameness,
    spread,
    tpot_s,
    ttft_s,
)
from headrace.bench.rounds import Outcome, PlayedLevel, PlayedRound

# Sent at 1 s; text at 1.5, 1.6 and 2.1 s, seven tokens; over at 2.2 s.
ANSWER = Answer(
    started_s=1.0,
    ended_s=2.2,
    arrivals_s=(1.5, 1.6, 2.1),
    content="abc",
    finish_reason="stop",
    num_prompt_tokens=20,
    num_output_tokens=7,
)


def played(*answers: Answer, wall_s: float = 4.0, kinds: str = "") -> PlayedRound:
    kinds = kinds or "a" * len(answers)
    outcomes = (Outcome(0, at, 0, kind, each) for at, (kind, each) in enumerate(zip(kinds, answers, strict=True)))
    return PlayedRound(wall_s, tuple(outcomes))


def level(*rounds: PlayedRound, again: PlayedRound | None = None) -> PlayedLevel:
    return PlayedLevel("short-chat", 1, "server", rounds, again or rounds[0])


def saying(text: str) -> Answer:
    return replace(ANSWER, content=text)


def test_a_spread_is_the_smallest_the_middle_and_the_largest_of_what_is_there() -> None:
    assert spread([3, None, 1, 10, 2]) == Spread(1, 2.5, 10)
    assert spread([4]) == Spread(4, 4, 4)
    assert spread([None]) is None


def test_the_times_of_one_answer() -> None:
    assert ttft_s(ANSWER) == pytest.approx(0.5)
    assert tpot_s(ANSWER) == pytest.approx(0.6 / 6)
    assert gaps_s(ANSWER) == pytest.approx([0.1, 0.5])


@pytest.mark.parametrize("change", [{"num_output_tokens": 1}, {"arrivals_s": (1.5,)}])
def test_there_is_no_time_per_token_without_a_second_token_and_a_second_piece(change: dict[str, object]) -> None:
    assert tpot_s(replace(ANSWER, **change)) is None


def test_figures_of_a_round() -> None:
    slow = replace(ANSWER, started_s=0.0, ended_s=3.0, arrivals_s=(1.0, 1.2, 2.8), num_output_tokens=3)
    found = figures_of(played(ANSWER, slow))
    assert (found.num_answers, found.num_failed, found.num_output_tokens) == (2, 0, 10)
    assert found.num_prompt_tokens == 20
    assert found.num_cached_tokens is None
    assert found.ttft_s == pytest.approx((0.5 + 1.0) / 2)
    assert found.tpot_s == pytest.approx((0.1 + 0.9) / 2)
    assert found.gap_s == pytest.approx((0.2 + 0.5) / 2)  # of 0.1, 0.2, 0.5, 1.6
    assert found.max_gap_s == pytest.approx(1.6)
    assert found.end_to_end_s == pytest.approx((1.2 + 3.0) / 2)
    assert found.output_tokens_per_s == pytest.approx(10 / 4)


def test_a_faulty_answer_counts_as_failed_and_in_nothing_else() -> None:
    broken = replace(ANSWER, arrivals_s=(1.1, 9.0), num_output_tokens=1000, error="gone")
    found = figures_of(played(ANSWER, broken))
    assert found == replace(figures_of(played(ANSWER)), num_answers=2, num_failed=1)


def test_figures_of_a_round_where_all_failed_are_absent() -> None:
    found = figures_of(played(replace(ANSWER, error="gone")))
    assert (found.num_failed, found.ttft_s, found.max_gap_s, found.output_tokens_per_s) == (1, None, None, None)


def test_figures_of_a_kind_are_of_its_answers_only() -> None:
    long = replace(ANSWER, arrivals_s=(2.0, 2.1), num_prompt_tokens=2000)
    both = played(ANSWER, long, kinds="sl")
    assert figures_of(both, "l").ttft_s == pytest.approx(1.0)
    assert figures_of(both, "l").num_prompt_tokens == 2000
    assert figures_of(both, "s").ttft_s == pytest.approx(0.5)
    assert kinds_of(level(both)) == ("s", "l")
    assert kinds_of(level(played(ANSWER, ANSWER))) == ()


def test_ratios_are_theirs_over_ours_round_by_round() -> None:
    ours = level(played(ANSWER, wall_s=1.0), played(ANSWER, wall_s=4.0))
    theirs = level(played(ANSWER, wall_s=2.0), played(ANSWER, wall_s=2.0))
    assert ratio(ours, theirs, lambda figures: figures.output_tokens_per_s) == Spread(0.5, 1.25, 2.0)
    assert ratio(ours, theirs, lambda figures: None) is None


def test_ratios_of_a_kind_are_of_its_answers_only() -> None:
    later = replace(ANSWER, arrivals_s=(2.0, 2.1))
    ours, theirs = level(played(ANSWER, ANSWER, kinds="sl")), level(played(ANSWER, later, kinds="sl"))
    assert ratio(ours, theirs, lambda figures: figures.ttft_s, "s") == Spread(1, 1, 1)
    assert ratio(ours, theirs, lambda figures: figures.ttft_s, "l") == Spread(2, 2, 2)


def test_the_same_answers_are_found_the_same() -> None:
    assert sameness(played(saying("a"), saying("b")), played(saying("a"), saying("b"))) == Sameness(2, 2, None)


def test_the_first_pair_that_differs_is_told() -> None:
    first = played(saying("a"), saying("b"), saying("c"))
    second = played(saying("a"), saying("x"), saying("y"))
    assert sameness(first, second) == Sameness(3, 1, Difference(0, 1, 0, "b", "x"))


def test_thinking_that_became_content_is_a_difference() -> None:
    thought = replace(ANSWER, reasoning="a", content="b")
    assert sameness(played(saying("ab")), played(thought)).num_same == 0


def test_white_space_at_the_ends_counts_unless_it_is_to_be_ignored() -> None:
    first, second = played(saying(" a b\n")), played(saying("a b"))
    assert sameness(first, second).num_same == 0
    assert sameness(first, second, ignore_ends=True).num_same == 1
    assert sameness(first, played(saying("ab")), ignore_ends=True).num_same == 0


def test_answers_that_failed_or_never_came_are_not_compared() -> None:
    failed = replace(ANSWER, error="gone")
    assert sameness(played(saying("a"), failed), played(failed, failed)) == Sameness(0, 0, None)
    assert sameness(played(saying("a"), saying("b")), played(saying("a"))) == Sameness(1, 1, None)


def test_faults_are_listed_with_their_place_also_those_of_the_second_asking() -> None:
    failed = replace(ANSWER, error="gone")
    found = faults([level(played(ANSWER, failed), again=played(failed, ANSWER))])
    assert found == ["server, short-chat, 1 streams: gone"] * 2
