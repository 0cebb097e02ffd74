"""What can't ever run is refused with the numbers; what fits later waits; a queue has an end."""

from __future__ import annotations

import pytest
from scheduler.made_up import AMPLE, answer, lengths, request

from headrace.errors import ContextTooLong, InvalidRequest, Overloaded
from headrace.scheduler.admission import RESERVED_OUTPUT_TOKENS, Admission, MemoryBudget
from headrace.scheduler.live_request import LiveRequest
from headrace.scheduler.scheduler import Scheduler
from headrace.scheduler.waiting import FairShares
from headrace.types.request import GenerationRequest


def per_token(budget_bytes: int) -> MemoryBudget:
    """Ten bytes a token and a hundred for a sequence."""
    return MemoryBudget(budget_bytes, lambda num_tokens: 100 + 10 * num_tokens)


def test_what_can_not_fit_the_context_is_refused_with_the_numbers() -> None:
    admission = Admission(1, 10, AMPLE, FairShares())
    admission.check(request("fits", 6, max_tokens=4))
    with pytest.raises(ContextTooLong, match=r"7 prompt tokens and 4 output tokens make 11.* 10$"):
        admission.check(request("too long", 7, max_tokens=4))


@pytest.mark.parametrize(
    ("bad", "param", "message"),
    [
        (request("a", 0), "prompt", "no tokens"),
        (request("a", 1, max_tokens=-1), "max_tokens", "not -1"),
        (request("a", 1, n=0), "n", "from 1 to 4, .* not 0"),
        (request("a", 1, n=5), "n", "from 1 to 4, .* not 5"),
    ],
)
def test_an_impossible_request_is_refused_by_name(bad: GenerationRequest, param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        Admission(4, 10, AMPLE, FairShares()).check(bad)
    assert caught.value.param == param


def test_what_can_not_fit_the_memory_even_alone_is_refused_with_the_numbers() -> None:
    admission = Admission(4, 10_000, per_token(1000), FairShares())  # 90 tokens of one sequence
    admission.check(request("fits", 80, max_tokens=10))
    with pytest.raises(ContextTooLong, match=r"81 prompt tokens and 10 output tokens make 91.*1010 bytes.*1000") as one:
        admission.check(request("too long", 81, max_tokens=10))
    assert one.value.param == "max_tokens"
    with pytest.raises(InvalidRequest, match=r"2 choices need 1100 bytes.* 1000 bytes") as two:
        admission.check(request("two", 35, max_tokens=10, n=2))
    assert two.value.param == "n"
    assert not isinstance(two.value, ContextTooLong)


def test_an_answer_longer_than_the_reserve_counts_whole_only_once_among_the_choices() -> None:
    # two choices: one grown to its end, 100 + 10 * 1010, beside one with its first 512 tokens, 100 + 10 * 522
    needed = 10_200 + 5320
    Admission(4, 10_000, per_token(needed), FairShares()).check(request("a", 10, max_tokens=1000, n=2))
    with pytest.raises(InvalidRequest, match=f"2 choices need {needed} bytes"):
        Admission(4, 10_000, per_token(needed - 1), FairShares()).check(request("a", 10, max_tokens=1000, n=2))


def test_bytes_for_the_prompt_and_the_first_of_the_output_are_reserved() -> None:
    admission = Admission(4, 10_000, per_token(100_000), FairShares())
    assert admission.admit(LiveRequest(request("short", 10, max_tokens=5), 0.0)) == ()
    assert admission.reserved_bytes == 100 + 10 * 15
    assert admission.admit(LiveRequest(request("long", 10, max_tokens=5000), 0.0)) == ()
    assert admission.reserved_bytes == 250 + 100 + 10 * (10 + RESERVED_OUTPUT_TOKENS)
    assert admission.admit(LiveRequest(request("two", 10, max_tokens=5, n=2), 0.0)) == ()
    assert admission.reserved_bytes == 250 + 5320 + 2 * 250


def test_a_request_without_bytes_waits_for_those_before_it() -> None:
    scheduler = Scheduler(4, 64, 1000, memory=per_token(1000))
    scheduler.add(request("a", 40, max_tokens=2), 0.0)
    scheduler.add(request("b", 40, max_tokens=2), 0.0)
    assert lengths(scheduler.schedule()) == {"a": 40}
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.reserved_bytes) == (1, 1, 520)


def test_who_is_next_is_not_overtaken_by_one_that_would_fit() -> None:
    scheduler = Scheduler(4, 64, 1000, memory=per_token(1000))
    for name, prompt in (("a", 40), ("large", 60), ("small", 1)):
        scheduler.add(request(name, prompt, max_tokens=2), 0.0)
    plan = scheduler.schedule()
    assert lengths(plan) == {"a": 40}
    scheduler.update(answer(plan), 0.0, 0.0)
    scheduler.update(answer(scheduler.schedule()), 0.0, 0.0)
    assert lengths(scheduler.schedule()) == {"small": 1, "large": 60}


ONE_GROWN_AND_ONE_YOUNG = MemoryBudget(601 + 1 + RESERVED_OUTPUT_TOKENS, lambda num_tokens: num_tokens)
"""Bytes for one sequence of 1 + 600 tokens beside another with its prompt token and the first of its output."""


@pytest.mark.parametrize("spare", [0, 10])
def test_a_sequence_that_outgrows_its_bytes_gets_more_while_there_are_some_and_else_makes_room(spare: int) -> None:
    memory = MemoryBudget(ONE_GROWN_AND_ONE_YOUNG.budget_bytes + spare, ONE_GROWN_AND_ONE_YOUNG.cost)
    scheduler = Scheduler(2, 64, 10_000, memory=memory)
    scheduler.add(request("old", 1, max_tokens=600), 0.0)
    scheduler.add(request("young", 1, max_tokens=600), 0.0)
    scheduler.update(answer(scheduler.schedule()), 0.0, 0.0)
    for step in range(RESERVED_OUTPUT_TOKENS + spare):
        # the old one is given all of its end at once, which is 88 more; the young one what it needs
        num_extended = max(0, step - RESERVED_OUTPUT_TOKENS)
        assert scheduler.reserved_bytes == 2 * 513 + (88 + num_extended if num_extended else 0)
        plan = scheduler.schedule()
        assert lengths(plan) == {"old": 1, "young": 1}
        scheduler.update(answer(plan), 0.0, 0.0)
    assert scheduler.num_preemptions == 0
    for _ in range(600 - RESERVED_OUTPUT_TOKENS - 1 - spare):
        plan = scheduler.schedule()
        assert lengths(plan) == {"old": 1}
        assert scheduler.reserved_bytes == memory.budget_bytes
        scheduler.update(answer(plan), 0.0, 0.0)
        assert scheduler.num_preemptions == 1
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 1)
    assert lengths(scheduler.schedule()) == {"young": 1}


def test_nobody_starts_while_somebody_lacks_bytes() -> None:
    # sequences take powers of two, so that the young one's next step is larger than a newcomer
    memory = MemoryBudget(2048 + 1024 + 700, lambda num_tokens: 1 << (num_tokens - 1).bit_length())
    scheduler = Scheduler(3, 128, 10_000, memory=memory)
    scheduler.add(request("old", 100, max_tokens=1000), 0.0)
    scheduler.add(request("young", 100, max_tokens=990), 0.0)
    while scheduler.num_preemptions == 0:
        scheduler.update(answer(scheduler.schedule()), 0.0, 0.0)
    scheduler.add(request("new", 1, max_tokens=500), 0.0)
    while "old" in {status.request_id for status in scheduler.status(0.0)}:
        plan = scheduler.schedule()
        assert lengths(plan) == {"old": 1}
        scheduler.update(answer(plan), 0.0, 0.0)
    scheduler.schedule()
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_preemptions) == (2, 0, 1)


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    scheduler = Scheduler(1, 64, 1000, memory=AMPLE, max_queue=1)
    scheduler.add(request("a", 64, max_tokens=11), 0.0)
    scheduler.add(request("b", 64, max_tokens=11), 0.0)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)  # the first could start at once
    with pytest.raises(Overloaded, match="1 requests are waiting") as caught:
        scheduler.add(request("c", 1), 0.0)
    assert caught.value.retry_after_s == 1.0  # nothing was measured yet
    scheduler.update(answer(scheduler.schedule()), 128.0, 128.0)  # 2 s for each of 64 prompt tokens
    for _ in range(2):
        scheduler.update(answer(scheduler.schedule()), 3.0, 131.0)
    with pytest.raises(Overloaded) as caught:
        scheduler.add(request("c", 1), 0.0)
    # left: 8 tokens of a, 64 and 11 of b; the refused one's own work does not count
    assert caught.value.retry_after_s == pytest.approx((64 * 2 + (8 + 11) * 3) / 2)
    assert scheduler.abort("b")
    scheduler.add(request("c", 1), 0.0)


def test_no_queue_at_all_still_lets_start_what_can() -> None:
    scheduler = Scheduler(2, 64, 1000, memory=AMPLE, max_queue=0)
    scheduler.add(request("a", 1), 0.0)
    scheduler.add(request("b", 1), 0.0)
    with pytest.raises(Overloaded):
        scheduler.add(request("c", 1), 0.0)
    assert [status.request_id for status in scheduler.status(0.0)] == ["a", "b"]
    assert lengths(scheduler.schedule()) == {"a": 1, "b": 1}


def test_the_capacity_is_that_of_sequences_of_the_longest_context() -> None:
    # one sequence of 90 tokens takes all 1,000 bytes; a budget of 2,500 bytes holds two and a half of them
    assert Admission(4, 90, per_token(1000), FairShares()).capacity_tokens == 90
    assert Admission(4, 90, per_token(2500), FairShares()).capacity_tokens == 225
