"""What the tree finds, what it takes over, and what it refuses."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix.made_up import HERE, THERE, MadeUpPiece, MadeUpStore, Shelf, made_up_tokens

from headrace.prefix.key import MediaKey, cache_key
from headrace.prefix.node import Mismatch, Piece
from headrace.prefix.radix import PrefixTree

A, B, C = (made_up_tokens(seed, 1000) for seed in range(3))


def dense() -> Shelf:
    return Shelf(has_spans=True, needs_snapshots=False)


def hybrid() -> Shelf:
    return Shelf(has_spans=True, needs_snapshots=True)


def opaque() -> Shelf:
    return Shelf(has_spans=False, needs_snapshots=True)


def test_a_full_hit_leaves_the_last_token_to_compute() -> None:
    shelf = dense()
    shelf.put(A)
    assert shelf.length(A) == len(A) - 1


def test_a_snapshot_at_the_prompts_very_end_is_no_hit_for_the_same_prompt() -> None:
    shelf = hybrid()
    shelf.put(A, [500, 1000])
    match = shelf.find(A)
    assert match.num_tokens == 500
    assert match.snapshot_lengths == (1000,)
    assert match.branch_point == 999
    assert shelf.length(A + B) == 1000


def test_sliceable_layers_alone_hit_at_any_length() -> None:
    shelf = dense()
    shelf.put(A)
    assert shelf.length(A[:1]) == 0
    assert shelf.length(A[:300] + B) == 300
    assert shelf.length(A[:1] + B) == 1


@pytest.mark.parametrize("shelf", [hybrid(), opaque()])
def test_other_layers_hit_where_a_snapshot_is(shelf: Shelf) -> None:
    shelf.put(A, [200, 700])
    assert shelf.length(A[:700] + B) == 700
    assert shelf.length(A[:699] + B) == 200
    assert shelf.length(A[:199] + B) == 0


def test_two_namespaces_never_share() -> None:
    shelf = dense()
    shelf.put(A)
    assert shelf.length(A, THERE) == 0
    assert shelf.find(A, THERE).mismatch is Mismatch.EMPTY


def test_token_ids_with_the_same_low_byte_are_different() -> None:
    shelf = dense()
    shelf.put([65, 65, 65])
    assert shelf.length([321, 321, 321]) == 0


def test_a_later_part_is_no_hit_behind_another_beginning() -> None:
    for shelf in (dense(), hybrid(), opaque()):
        shelf.put(A + B, [1000, 2000])
        assert shelf.length(C + B) == 0
        assert shelf.length(B) == 0


def test_the_third_of_a_longer_b_and_a_again_finds_what_the_first_left() -> None:
    for shelf in (dense(), hybrid(), opaque()):
        shelf.put(A + B, [1000, 2000])
        shelf.put(A[:500] + C + B, [500, 2500])
        match = shelf.find(A + B + C)
        assert match.num_tokens == 2000
        shelf.check_held(shelf.tree.read(match), A + B + C)


def test_a_system_prompt_is_shared_and_two_images_are_not() -> None:
    text, placeholders = A[:300], (151_655,) * 64
    cat, dog = (
        cache_key(text + placeholders + B, [MediaKey(300, 364, sha256(name).digest())]) for name in (b"cat", b"dog")
    )
    shelf = dense()
    shelf.put(cat)
    match = shelf.find(dog)
    assert (match.num_tokens, match.mismatch) == (300, Mismatch.MEDIA)
    assert shelf.find(text + B).mismatch is Mismatch.MEDIA
    assert shelf.length(cat) == len(cat) - 1
    shelf.tree.clear()
    shelf.put(text + B)
    assert shelf.find(cat).mismatch is Mismatch.MEDIA


def test_a_junction_is_where_others_have_been_but_no_state_is() -> None:
    shelf = hybrid()
    shelf.put(A + B, [100, 2000])
    match = shelf.find(A + C)
    assert (match.num_tokens, match.num_agreed_tokens, match.branch_point) == (100, 1000, 1000)
    shelf.put(A + C, [1000, 2000])
    assert shelf.length(A + made_up_tokens(5, 10)) == 1000
    assert shelf.find(A + B + C).branch_point is None


def test_a_snapshot_behind_the_parting_is_none_of_the_prompts() -> None:
    shelf = opaque()
    shelf.put(A, [200, 1000])
    assert shelf.find(A[:600] + B).snapshot_lengths == ()


@pytest.mark.parametrize(
    ("prompt", "num_agreed", "mismatch"),
    [
        (A[:400], 400, Mismatch.PROMPT_ENDS),
        (A + C, 1000, Mismatch.STORED_ENDS),
        (A[:400] + C, 400, Mismatch.TOKEN),
        (C, 0, Mismatch.TOKEN),
    ],
)
def test_a_match_says_where_and_why_it_parts(prompt: tuple[int, ...], num_agreed: int, mismatch: Mismatch) -> None:
    shelf = dense()
    shelf.put(A)
    match = shelf.find(prompt)
    assert (match.num_agreed_tokens, match.mismatch) == (num_agreed, mismatch)


def test_parting_at_a_fork_is_told_as_another_token() -> None:
    shelf = dense()
    shelf.put(A + B)
    shelf.put(A + C)
    match = shelf.find(A + made_up_tokens(5, 10))
    assert (match.num_agreed_tokens, match.mismatch) == (1000, Mismatch.TOKEN)


def test_only_what_is_missing_is_cut() -> None:
    shelf = dense()
    shelf.put(A)
    shelf.put(A[:600] + B)
    assert shelf.store.num_cut_tokens == len(A) + len(B)
    shelf.put(A[:600] + B)
    num_nodes = shelf.tree.summary().num_nodes
    shelf.put(A[:300])
    assert shelf.store.num_cut_tokens == len(A) + len(B)
    assert shelf.tree.summary().num_nodes == num_nodes  # no span was split for it


def test_nothing_is_stored_beyond_the_last_snapshot() -> None:
    shelf = hybrid()
    shelf.put(A, [600])
    assert shelf.store.num_cut_tokens == 600
    shelf.put(B)
    assert shelf.tree.summary().num_tokens == 600


def test_a_snapshot_that_is_held_already_is_dropped() -> None:
    shelf = opaque()
    shelf.put(A, [1000])
    first = list(shelf.store.live)
    shelf.put(A, [1000])
    assert shelf.store.live == first


def test_an_insertion_that_fails_leaves_the_tree_as_it_was() -> None:
    shelf = hybrid()
    shelf.put(A, [1000])
    before = shelf.tree.num_bytes
    snapshot = shelf.store.snapshot(HERE, A[:500] + B)

    def make_span(start: int, end: int) -> Piece:
        raise MemoryError

    with pytest.raises(MemoryError):
        shelf.tree.insert(HERE, A[:500] + B, make_span=make_span, snapshots={1500: snapshot})
    assert snapshot in shelf.store.live  # still the caller's
    del snapshot
    assert shelf.tree.num_bytes == shelf.store.num_bytes
    assert shelf.tree.num_bytes - before == 3  # the span of A is in two parts now
    assert shelf.length(A + B) == 1000
    assert shelf.length(A[:500] + B) == 0


def test_spans_cut_before_a_failure_are_not_leaked() -> None:
    shelf = hybrid()

    def make_span(start: int, end: int) -> Piece:
        if start:
            raise MemoryError
        return shelf.store.span(HERE, A[:end], start)

    snapshots: dict[int, Piece] = {one: shelf.store.snapshot(HERE, A[:one]) for one in (500, 1000)}
    with pytest.raises(MemoryError):
        shelf.tree.insert(HERE, A, make_span=make_span, snapshots=snapshots)
    snapshots.clear()
    assert shelf.store.live == []
    assert shelf.tree.summary().num_nodes == 0


def test_a_split_that_fails_leaves_the_span_whole() -> None:
    class Failing(MadeUpStore):
        def part(self, piece: MadeUpPiece, start: int, end: int) -> MadeUpPiece:
            raise MemoryError

    shelf = Shelf(has_spans=True, needs_snapshots=False, store=Failing())
    shelf.put(A)
    with pytest.raises(MemoryError):
        shelf.put(A[:500] + B)
    assert shelf.length(A + B) == 1000
    assert shelf.tree.summary().num_nodes == 1


def test_what_is_locked_is_neither_evicted_nor_cleared() -> None:
    shelf = hybrid()
    shelf.put(A + B, [1000, 2000])
    shelf.put(A + C, [2000])
    match = shelf.find(A + B + C)
    shelf.tree.lock(match)
    shelf.tree.evict(10**9)
    assert shelf.tree.num_bytes == shelf.held_bytes([match]) > 0
    shelf.tree.clear()
    shelf.check_held(shelf.tree.read(match), A + B)
    assert shelf.length(A + C + B) == 0
    shelf.tree.unlock(match)
    shelf.tree.clear()
    assert shelf.store.live == []


def test_a_locked_span_may_be_split_and_is_read_in_its_parts() -> None:
    shelf = dense()
    shelf.put(A)
    match = shelf.find(A[:700])
    shelf.tree.lock(match)
    assert len(shelf.tree.read(match).spans) == 1
    shelf.put(A[:200] + B)
    held = shelf.tree.read(match)
    assert [(span.start, len(span.prefix)) for span in held.spans] == [(0, 200), (200, len(A))]
    shelf.check_held(held, A)
    del held
    shelf.tree.unlock(match)
    shelf.tree.clear()
    assert shelf.store.live == []


def test_two_locks_on_one_way_are_two() -> None:
    shelf = hybrid()
    shelf.put(A, [1000])
    matches = [shelf.find(A + B), shelf.find(A + C)]
    for match in matches:
        shelf.tree.lock(match)
    shelf.tree.unlock(matches[0])
    assert shelf.tree.evict(10**9) == 0
    shelf.tree.unlock(matches[1])
    assert shelf.tree.evict(10**9) > 0


def test_locks_are_taken_once_and_given_back_once() -> None:
    shelf = dense()
    shelf.put(A)
    match = shelf.find(A)
    with pytest.raises(ValueError, match="isn't locked"):
        shelf.tree.unlock(match)
    shelf.tree.lock(match)
    with pytest.raises(ValueError, match="locked already"):
        shelf.tree.lock(match)
    shelf.tree.unlock(match)
    with pytest.raises(ValueError, match="isn't locked"):
        shelf.tree.unlock(match)


@pytest.mark.parametrize("shelf", [dense(), hybrid(), opaque()])
def test_a_match_that_was_evicted_can_neither_be_locked_nor_read(shelf: Shelf) -> None:
    shelf.put(A, [500])
    match = shelf.find(A)
    shelf.tree.evict(10**9)
    for use in (shelf.tree.lock, shelf.tree.read):
        with pytest.raises(ValueError, match="has been evicted"):
            use(match)
    shelf.put(A, [500])
    with pytest.raises(ValueError, match="has been evicted"):
        shelf.tree.lock(match)


def test_a_match_whose_snapshot_alone_was_evicted_cannot_be_used() -> None:
    shelf = Shelf(has_spans=True, needs_snapshots=True, store=MadeUpStore(snapshot_bytes=10**6))
    shelf.put(A + B, [1000, 2000])
    match = shelf.find(A + C)
    assert shelf.tree.evict(1) == shelf.store.snapshot_bytes
    with pytest.raises(ValueError, match="has been evicted"):
        shelf.tree.lock(match)


def test_of_a_locked_span_that_is_split_behind_the_match_the_first_part_is_read() -> None:
    shelf = dense()
    shelf.put(A)
    match = shelf.find(A[:300])
    shelf.tree.lock(match)
    shelf.put(A[:700] + B)
    held = shelf.tree.read(match)
    assert [(span.start, len(span.prefix)) for span in held.spans] == [(0, 700)]
    shelf.check_held(held, A)


def test_no_match_can_be_locked_and_read_as_well() -> None:
    shelf = dense()
    match = shelf.find(A)
    shelf.tree.lock(match)
    assert shelf.tree.read(match).spans == ()
    shelf.tree.unlock(match)


def test_the_summary_counts_what_there_is_and_what_was_asked() -> None:
    shelf = hybrid()
    shelf.put(A + B, [1000, 2000])
    shelf.length(A + C)
    shelf.length(C)
    summary = shelf.tree.summary()
    assert summary.num_bytes == shelf.store.num_bytes == shelf.tree.num_bytes
    assert (summary.num_tokens, summary.num_nodes, summary.num_snapshots) == (2000, 2, 2)
    assert (summary.num_lookups, summary.num_hits) == (2, 1)
    assert (summary.num_lookup_tokens, summary.num_hit_tokens) == (3000, 1000)


def test_only_what_is_used_and_counts_is_counted() -> None:
    shelf = hybrid()
    shelf.put(A, [1000])
    match = shelf.tree.match(HERE, A + B, 1999)
    shelf.tree.use(match, counts=False)
    assert shelf.tree.summary().num_lookups == 0
    shelf.tree.use(match)
    summary = shelf.tree.summary()
    assert (summary.num_lookups, summary.num_hits, summary.num_lookup_tokens, summary.num_hit_tokens) == (
        1,
        1,
        2000,
        1000,
    )


def test_a_conversation_of_two_thousand_turns_is_found_and_forgotten() -> None:
    shelf = hybrid()
    turns = 2000
    key = made_up_tokens(1, turns * 5)
    shelf.put(key, range(5, turns * 5 + 1, 5))
    match = shelf.find(key + A)
    assert match.num_tokens == turns * 5
    assert len(shelf.tree.read(match).spans) == turns
    shelf.tree.evict(shelf.tree.num_bytes // 2)
    shelf.tree.evict(shelf.tree.num_bytes)
    assert shelf.store.live == []


def test_a_caller_may_give_the_key_as_a_list() -> None:
    shelf = dense()
    shelf.put(list(A))
    assert shelf.tree.match(HERE, list(A), 999).num_tokens == 999


def test_impossible_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing to be stored"):
        PrefixTree(has_spans=False, needs_snapshots=False)
    shelf = dense()
    make_span = shelf.store.cutter(HERE, A)
    snapshot = shelf.store.snapshot(HERE, A)
    for limit in (-1, 1001):
        with pytest.raises(ValueError, match="limit"):
            shelf.tree.match(HERE, A, limit)
    with pytest.raises(ValueError, match="make_span"):
        shelf.tree.insert(HERE, A)
    with pytest.raises(ValueError, match="make_span"):
        opaque().tree.insert(HERE, A, make_span=make_span, snapshots={1000: snapshot})
    with pytest.raises(ValueError, match="no use for snapshots"):
        shelf.tree.insert(HERE, A, make_span=make_span, snapshots={1000: snapshot})
    for length in (0, 1001):
        with pytest.raises(ValueError, match=f"snapshot at {length}"):
            opaque().tree.insert(HERE, A, snapshots={length: snapshot})


KEYS = st.lists(st.integers(0, 1), min_size=2, max_size=12).map(tuple)


@pytest.mark.parametrize("kind", [(True, False), (True, True), (False, True)])
def test_tokens_of_a_locked_match_need_no_comparison(kind: tuple[bool, bool]) -> None:
    @given(st.lists(KEYS, max_size=5), KEYS, st.lists(KEYS, max_size=5), st.booleans())
    @settings(max_examples=40)
    def same(before: list[tuple[int, ...]], key: tuple[int, ...], after: list[tuple[int, ...]], clears: bool) -> None:
        results = []
        for skips in (False, True):
            shelf = Shelf(*kind)
            for each in before:
                shelf.put(each, [len(each) // 2, len(each)])
            match = shelf.find(key)
            shelf.tree.lock(match)
            for each in after:
                shelf.put(each, [len(each)])
            shelf.tree.evict(200)
            if clears:
                shelf.tree.clear()
            num_locked = match.num_tokens if skips else 0
            again = shelf.tree.match(HERE, key, len(key), num_locked=num_locked)
            found = again.num_tokens, again.num_agreed_tokens, again.mismatch, again.snapshot_lengths
            pieces = {len(key): shelf.store.snapshot(HERE, key)} if shelf.needs_snapshots else {}
            make_span = shelf.store.cutter(HERE, key) if shelf.has_spans else None
            shelf.tree.insert(HERE, key, make_span=make_span, snapshots=pieces, num_locked=num_locked)
            shelf.tree.unlock(match)
            results.append((found, shelf.tree.summary(), shelf.length((*key, 5))))
        assert results[0] == results[1]

    same()


def test_a_locked_match_is_not_compared_again() -> None:
    """Told of a match that it doesn't have, the tree believes it: nothing was compared."""
    shelf = dense()
    shelf.put(A)
    other = (*B[:500], *A[500:])
    assert other[0] != A[0] and shelf.tree.match(HERE, other, 1000).num_agreed_tokens == 0
    like_a = (A[0], *B[1:500], *A[500:], 7)
    assert shelf.tree.match(HERE, like_a, 1000).num_agreed_tokens < 500
    assert shelf.tree.match(HERE, like_a, 1000, num_locked=500).num_agreed_tokens == 1000
