"""Who gives path when bytes run short."""

from __future__ import annotations

import pytest
from prefix.made_up import SPAN_OVERHEAD_BYTES, MadeUpPiece, MadeUpStore, Shelf, made_up_tokens

from headrace.prefix.memory_usage import MemoryKind, MemoryUsage

SPAN_BYTES_PER_TOKEN = 20_000
SNAPSHOT_BYTES = 60_000_000
SORTS = {"sliceable": (True, False), "opaque": (False, True), "both": (True, True)}


def shelf_of(sort: str, store: MadeUpStore | None = None) -> Shelf:
    """A tree for pieces as large as those of a hybrid model of 35B parameters."""
    return Shelf(*SORTS[sort], store=store or MadeUpStore(SPAN_BYTES_PER_TOKEN, SNAPSHOT_BYTES))


def shrink_to(shelf: Shelf, budget_bytes: int) -> None:
    shelf.tree.evict(max(0, shelf.tree.num_bytes - budget_bytes))
    assert shelf.tree.num_bytes <= budget_bytes


@pytest.mark.parametrize("sort", sorted(SORTS))
def test_a_side_conversation_does_not_evict_a_long_one(sort: str) -> None:
    shelf = shelf_of(sort)
    long = made_up_tokens(1, 100_000)
    shelf.put(long, range(5_000, 100_001, 5_000))
    budget_bytes = shelf.tree.num_bytes + 1000
    for turn in range(20):
        side = made_up_tokens(2 + turn, 600)
        shelf.length(side)
        shelf.put(side, [600])
        shrink_to(shelf, budget_bytes)
    assert shelf.length(long + made_up_tokens(1000, 300)) == 100_000


@pytest.mark.parametrize("sort", sorted(SORTS))
def test_even_a_long_conversation_goes_when_it_is_old_enough(sort: str) -> None:
    shelf = shelf_of(sort)
    long = made_up_tokens(1, 20_000)
    shelf.put(long, [20_000])
    budget_bytes = shelf.tree.num_bytes
    for number in range(300):
        other = made_up_tokens(2 + number % 50, 4_000) + (number,)
        shelf.length(other)
        shelf.put(other, [4_000])
        shrink_to(shelf, budget_bytes)
    assert shelf.length(long) == 0


@pytest.mark.parametrize("sort", sorted(SORTS))
def test_sixty_distinct_prompts_stay_within_a_small_budget(sort: str) -> None:
    weights_bytes = 10**9
    one_prompt_bytes = 4_000 * SPAN_BYTES_PER_TOKEN + SNAPSHOT_BYTES + 3
    usage = MemoryUsage(weights_bytes + 8 * one_prompt_bytes)
    usage.set_usage(MemoryKind.WEIGHTS, weights_bytes)
    shelf = shelf_of(sort)

    def evict(num_bytes: int) -> int:
        num_freed = shelf.tree.evict(num_bytes)
        usage.set_usage(MemoryKind.RECORDS, shelf.store.num_bytes)
        return num_freed

    for number in range(60):
        prompt = made_up_tokens(number, 4_000)
        assert shelf.length(prompt) == 0
        usage.reclaim(one_prompt_bytes, evict)
        assert usage.free_bytes() >= one_prompt_bytes
        shelf.put(prompt, [3_999])
        usage.set_usage(MemoryKind.RECORDS, shelf.store.num_bytes)
        assert usage.free_bytes() >= 0
        assert usage.used(MemoryKind.RECORDS) == shelf.tree.num_bytes
        assert shelf.length(prompt) == 3_999
    assert shelf.tree.summary().num_nodes >= 7


def test_a_span_loses_only_as_much_of_its_end_as_it_must() -> None:
    shelf = shelf_of("sliceable")
    key = made_up_tokens(1, 10_000)
    shelf.put(key)
    assert shelf.tree.evict(1_000 * SPAN_BYTES_PER_TOKEN) >= 1_000 * SPAN_BYTES_PER_TOKEN
    assert shelf.length(key) == 35 * 256  # the last step under 9,000
    assert shelf.store.parts == [(0, 35 * 256)]


def test_a_span_whose_beginning_can_not_be_copied_goes_whole() -> None:
    class Full(MadeUpStore):
        def part(self, piece: MadeUpPiece, start: int, end: int) -> MadeUpPiece:
            raise MemoryError

    shelf = shelf_of("sliceable", Full(SPAN_BYTES_PER_TOKEN))
    key, other = made_up_tokens(1, 10_000), made_up_tokens(2, 20_000)
    shelf.put(key)
    shelf.put(other)
    num_bytes = shelf.tree.num_bytes
    num_freed = shelf.tree.evict(1_000 * SPAN_BYTES_PER_TOKEN)
    assert num_freed == num_bytes - shelf.tree.num_bytes == 10_000 * SPAN_BYTES_PER_TOKEN + SPAN_OVERHEAD_BYTES
    assert (shelf.length(key), shelf.length(other)) == (0, 19_999)


def test_a_match_of_what_a_span_has_lost_is_noticed() -> None:
    shelf = shelf_of("sliceable")
    key = made_up_tokens(1, 10_000)
    shelf.put(key)
    match = shelf.find(key)
    shelf.tree.evict(1)
    with pytest.raises(ValueError, match="has been evicted"):
        shelf.tree.lock(match)


def test_a_snapshot_goes_and_the_span_that_leads_on_stays() -> None:
    shelf = shelf_of("both")
    key = made_up_tokens(1, 3_000)
    shelf.put(key, [1_000, 3_000])
    assert shelf.tree.evict(1) == SNAPSHOT_BYTES
    assert shelf.length(key + (7,)) == 3_000
    assert shelf.length(key[:1_000] + (7,)) == 0


def test_the_tip_of_a_conversation_outlives_what_it_has_passed() -> None:
    shelf = shelf_of("both")
    key = made_up_tokens(1, 5_000)
    for end in range(500, 5_001, 500):
        shelf.length(key[:end])
        shelf.put(key[:end], [end])
    shelf.tree.evict(9 * SNAPSHOT_BYTES)
    assert shelf.length(key + (7,)) == 5_000


def test_a_shared_beginning_outlives_the_prompts_that_branch_off_there() -> None:
    for sort in SORTS:
        shelf = shelf_of(sort)
        system = made_up_tokens(1, 2_000)
        for number in range(10):
            prompt = system + made_up_tokens(2 + number, 300)
            shelf.length(prompt)
            shelf.put(prompt, [2_000, 2_300])
        shelf.tree.evict(shelf.tree.num_bytes // 2)
        assert shelf.length(system + (7,)) == 2_000


def test_of_like_prompts_the_one_used_least_lately_goes() -> None:
    for sort in SORTS:
        shelf = shelf_of(sort)
        keys = [made_up_tokens(number, 1_000) for number in range(3)]
        for key in keys:
            shelf.length(key)
            shelf.put(key, [1_000])
        shelf.length(keys[0] + (7,))
        shelf.tree.evict(shelf.tree.num_bytes // 3 - 1)
        assert [shelf.length(key + (7,)) > 0 for key in keys] == [True, False, True]


def test_a_span_that_lost_its_end_is_as_young_as_before() -> None:
    shelf = shelf_of("sliceable")
    for number in range(100):
        shelf.length(made_up_tokens(number, 10))
    long, short = made_up_tokens(1, 20_480), made_up_tokens(2, 100)
    shelf.length(long)
    shelf.put(long)
    shelf.tree.evict(1)
    shelf.put(short)
    shelf.tree.evict(1)
    assert (shelf.length(long), shelf.length(short)) == (20_480 - 256, 0)


def test_a_snapshot_is_worth_more_once_the_one_above_it_has_gone() -> None:
    shelf = shelf_of("opaque")
    two, one = made_up_tokens(1, 500), made_up_tokens(2, 350)
    shelf.put(two, [300, 500])  # worth 300, much less for being passed, and 200
    shelf.put(one, [350])
    shelf.tree.evict(2 * SNAPSHOT_BYTES)
    assert (shelf.length(two + (7,)), shelf.length(one + (7,))) == (500, 0)


def test_a_beginning_is_worth_less_once_it_is_shared_no_more() -> None:
    shelf = shelf_of("opaque")
    system = made_up_tokens(1, 200)
    first, second = system + made_up_tokens(2, 10), system + made_up_tokens(3, 20)
    shelf.put(first, [200, 210])
    shelf.put(second, [200, 220])
    shelf.tree.evict(2 * SNAPSHOT_BYTES)
    assert shelf.length(system + (7,)) == 0
    assert (shelf.length(first + (7,)), shelf.length(second + (7,))) == (0, 220)


def test_spans_that_lead_nowhere_else_count_with_their_snapshot() -> None:
    shelf = shelf_of("both")
    system, alone = made_up_tokens(1, 10_000), made_up_tokens(2, 30_000)
    shelf.put(alone, [30_000])
    for number in (3, 4):
        prompt = system + made_up_tokens(number, 500)
        shelf.put(prompt, [10_000, 10_500])
        shelf.tree.lock(shelf.find(prompt + (7,)))
    # 57,000 units of work in 660 MB against 13,000 in the 60 MB that the system prompt's snapshot takes alone
    shelf.tree.evict(1)
    assert (shelf.length(system + (7,)), shelf.length(alone + (7,))) == (10_000, 0)


def test_nothing_more_is_evicted_than_was_asked_for() -> None:
    shelf = shelf_of("opaque")
    for number in range(10):
        shelf.put(made_up_tokens(number, 100), [100])
    assert shelf.tree.evict(3 * SNAPSHOT_BYTES) == 3 * SNAPSHOT_BYTES
    assert shelf.tree.evict(0) == 0


def test_a_piece_without_bytes_can_be_evicted_too() -> None:
    shelf = Shelf(False, True, store=MadeUpStore(snapshot_bytes=0))
    shelf.put((1, 2), [2])
    assert shelf.tree.evict(1) == 0
    assert shelf.store.live == []
