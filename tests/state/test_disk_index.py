"""The longest state on disk, against a search through everything that was saved."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.prefix.key import Namespace
from headrace.state import disk_index
from headrace.state.disk_index import MARK_BYTES, Digests, DiskIndex

DIGESTS = Digests(b"k" * 32, "weights")
ROOT = DIGESTS.root(Namespace("weights"))
KEYS = st.lists(st.integers(0, 1), max_size=14).map(tuple)


@pytest.fixture(autouse=True, scope="module")
def short_blocks() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_index, "BLOCK_TOKENS", 3)
        yield


def save(index: DiskIndex, key: tuple[int, ...], ends: list[int], root: bytes = ROOT) -> None:
    missing, known = index.missing(root, key, ends, ())
    assert not {file.name for file in missing} & set(known)
    for file in missing:
        index.add(file.entry(DIGESTS))


def common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return length


@given(st.lists(KEYS, max_size=5), KEYS, st.integers(0, 14))
def test_spans_are_found_as_far_as_any_saved_key_agrees(saved: list[tuple[int, ...]], key: tuple, limit: int) -> None:
    index = DiskIndex(DIGESTS, has_spans=True, needs_snapshots=False)
    for one in saved:
        save(index, one, [len(one)])
    limit = min(limit, len(key))
    expected = max((min(common(one, key), limit) for one in saved), default=0)
    match = index.match(ROOT, key, limit)
    assert (match.num_tokens if match else 0) == expected
    if match:
        # file by file they spell the key without a hole
        assert [entry.start for entry in match.entries] == [3 * number for number in range(len(match.entries))]
        for entry in match.entries:
            own = DIGESTS.marks(entry.before, key[entry.start : min(entry.end, expected)])
            assert entry.marks.startswith(own) and len(own) == MARK_BYTES * (min(entry.end, expected) - entry.start)


@pytest.mark.parametrize("has_spans", [True, False])
@given(saved=st.lists(st.tuples(KEYS, st.integers(1, 14)), max_size=5), key=KEYS, limit=st.integers(0, 14))
def test_snapshots_are_found_at_their_very_lengths(
    has_spans: bool, saved: list[tuple[tuple, int]], key: tuple, limit: int
) -> None:
    index = DiskIndex(DIGESTS, has_spans=has_spans, needs_snapshots=True)
    states = {one[:end] for one, end in saved if one[:end]}
    for one, end in saved:
        save(index, one, [min(end, len(one))] if one else [])
    limit = min(limit, len(key))
    expected = max((len(state) for state in states if len(state) <= limit and key[: len(state)] == state), default=0)
    match = index.match(ROOT, key, limit)
    assert (match.num_tokens if match else 0) == expected
    if match:
        assert match.entries[-1].is_tail
        assert match.entries[-1].end == expected


def test_what_lies_behind_a_lost_block_is_of_no_use_until_it_is_back() -> None:
    index = DiskIndex(DIGESTS, has_spans=True, needs_snapshots=True)
    key = tuple(range(11))
    save(index, key, [4, 11])
    whole = index.match(ROOT, key, 11)
    assert whole is not None
    assert [(entry.start, entry.end) for entry in whole.entries] == [(0, 3), (3, 6), (6, 9), (9, 11)]
    assert [entry.start for entry in whole.needed_beyond(6)] == [6, 9]
    assert [entry.start for entry in whole.needed_beyond(7)] == [6, 9]
    index.discard([whole.entries[1].name])
    left = index.match(ROOT, key, 11)
    assert left is not None
    assert left.num_tokens == 4
    save(index, key, [11])
    assert index.match(ROOT, key, 11) == whole
    assert sorted(index.clear()) == sorted({*(entry.name for entry in whole.entries), left.entries[-1].name})
    assert index.match(ROOT, key, 11) is None


def test_namespaces_never_meet() -> None:
    spaces = [Namespace("a"), Namespace("b"), Namespace("a", "b"), Namespace("a", "", "b"), Namespace("ab")]
    assert len({DIGESTS.root(space) for space in spaces}) == len(spaces)
    index = DiskIndex(DIGESTS, has_spans=True, needs_snapshots=False)
    save(index, (1, 2, 3, 4), [4], DIGESTS.root(Namespace("a")))
    assert index.match(DIGESTS.root(Namespace("a", salt="s")), (1, 2, 3, 4), 4) is None


def test_digests_are_of_whole_numbers_in_their_order() -> None:
    media = -1 - 2**127
    chains = [(65,), (321,), (6, 5), (5, 6), (65 + 2**64,), (media,), (media - 1,), ()]
    assert len({DIGESTS.after(ROOT, chain) for chain in chains}) == len(chains)
    assert DIGESTS.after(DIGESTS.after(ROOT, (1,)), (2,)) != DIGESTS.after(DIGESTS.after(ROOT, (2,)), (2,))
