"""For any course of events the tree tells exactly what its pieces allow, and loses none of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from prefix.made_up import HERE, THERE, Shelf

from headrace.prefix.key import Namespace
from headrace.prefix.node import Match

MODELS = {"sliceable": (True, False), "opaque": (False, True), "both": (True, True)}
BLOCK = 130
"""Tokens of a block: two are longer than the step by which spans are trimmed."""


@dataclass(frozen=True)
class Insert:
    """snapshots: lengths as shares of the key's."""

    namespace: Namespace
    key: tuple[int, ...]
    snapshots: tuple[float, ...]


@dataclass(frozen=True)
class Look:
    """Match a prompt, and keep the match locked or not."""

    namespace: Namespace
    key: tuple[int, ...]
    keeps: bool


@dataclass(frozen=True)
class Unlock:
    """Of the locked matches the one with this number, counted round."""

    number: int


@dataclass(frozen=True)
class Evict:
    num_bytes: int


@dataclass(frozen=True)
class Clear:
    pass


Operation = Insert | Look | Unlock | Evict | Clear


NAMESPACES = st.sampled_from([HERE, HERE, HERE, THERE])
SNAPSHOTS = st.lists(st.sampled_from([0.2, 0.4, 0.5, 0.8, 1.0]), max_size=3, unique=True).map(tuple)


@st.composite
def keys(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    """A few blocks out of two, the last one perhaps cut: prompts that often begin alike."""
    blocks = draw(st.lists(st.integers(0, 1), min_size=1, max_size=6))
    key = [block * 1000 + place for block in blocks for place in range(size)]
    return tuple(key[: len(key) - draw(st.integers(0, size - 1))])


@st.composite
def courses(draw: st.DrawFn, *, loses: bool) -> list[Operation]:
    """Operations on prompts made of blocks of one size. loses: whether they evict and clear."""
    size = draw(st.sampled_from([1, 3, BLOCK]))
    some_keys = keys(size)
    looks = st.builds(Look, NAMESPACES, some_keys, st.booleans())
    inserts = st.builds(Insert, NAMESPACES, some_keys, SNAPSHOTS)
    losses = [
        st.builds(Unlock, st.integers(0, 9)),
        st.builds(Evict, st.sampled_from([1, 60, 400, 2000, 20_000])),
        st.builds(Clear),
    ]
    operations = st.one_of(inserts, inserts, looks, looks, *(losses if loses else []))
    return draw(st.lists(operations, min_size=5, max_size=25))


@dataclass
class Course:
    """Carries out operations on a tree and checks it after each one."""

    shelf: Shelf
    locked: list[tuple[Match, Look]] = field(default_factory=list)
    inserted: list[tuple[Namespace, tuple[int, ...], set[int]]] = field(default_factory=list)
    has_lost: bool = False
    """Whether something was evicted or cleared."""

    def step(self, operation: Operation) -> None:
        match operation:
            case Insert():
                self._insert(operation)
            case Look():
                self._look(operation)
            case Unlock(number) if self.locked:
                self.shelf.tree.unlock(self.locked.pop(number % len(self.locked))[0])
            case Evict(num_bytes):
                self._evict(num_bytes)
            case Clear():
                before = self.shelf.tree.num_bytes
                assert self.shelf.tree.clear() == before - self.shelf.tree.num_bytes
                assert self.shelf.tree.num_bytes == self._locked_bytes()
                self.has_lost = True
            case Unlock():
                pass
        self._check()

    def _insert(self, insert: Insert) -> None:
        key = insert.key
        lengths = {length for share in insert.snapshots if (length := int(share * len(key)))}
        before = {one: self.shelf.best_length(*one) for one in self._probes()}
        self.shelf.put(key, sorted(lengths), insert.namespace)
        for probe, length in before.items():
            assert self.shelf.best_length(*probe) >= length, "an insertion took something away"
        self.inserted.append((insert.namespace, key, lengths))

    def _probes(self) -> list[tuple[tuple[int, ...], int, Namespace]]:
        return [(key, len(key), namespace) for namespace, key, _ in self.inserted[-5:]]

    def _look(self, look: Look) -> None:
        limit = len(look.key) - 1
        match = self.shelf.tree.match(look.namespace, look.key, limit)
        assert match.num_tokens == self.shelf.best_length(look.key, limit, look.namespace) <= limit
        assert match.num_tokens <= match.num_agreed_tokens <= len(look.key)
        self.shelf.check_held(self.shelf.tree.read(match), look.key, look.namespace)
        if not self.has_lost:
            assert match.num_tokens == self._ever_inserted(look, limit)
        self.shelf.tree.use(match)
        if look.keeps:
            self.shelf.tree.lock(match)
            self.locked.append((match, look))

    def _ever_inserted(self, look: Look, limit: int) -> int:
        """The deepest usable length if nothing is ever lost."""
        best = 0
        for namespace, key, lengths in self.inserted:
            if namespace != look.namespace:
                continue
            pairs = zip(key, look.key, strict=False)
            agreed = next((place for place, (one, two) in enumerate(pairs) if one != two), min(len(key), len(look.key)))
            for length in lengths if self.shelf.needs_snapshots else {min(agreed, limit)}:
                if length <= min(agreed, limit):
                    best = max(best, length)
        return best

    def _evict(self, num_bytes: int) -> None:
        before = self.shelf.store.num_bytes
        freed = self.shelf.tree.evict(num_bytes)
        assert freed == before - self.shelf.store.num_bytes
        assert freed >= num_bytes or self.shelf.tree.num_bytes == self._locked_bytes()
        self.has_lost = True

    def _locked_bytes(self) -> int:
        return self.shelf.held_bytes(match for match, _ in self.locked)

    def _check(self) -> None:
        summary = self.shelf.tree.summary()
        assert self.shelf.tree.num_bytes == self.shelf.store.num_bytes
        spans = [piece for piece in self.shelf.store.live if not piece.is_snapshot]
        assert summary.num_snapshots == len(self.shelf.store.live) - len(spans)
        assert summary.num_nodes <= 2 * len(self.shelf.store.live) + len(self.inserted)
        for match, look in self.locked:
            self.shelf.check_held(self.shelf.tree.read(match), look.key, look.namespace)

    def finish(self) -> None:
        """Nothing stays once nothing is in use."""
        for match, _ in self.locked:
            self.shelf.tree.unlock(match)
        self.shelf.tree.evict(self.shelf.tree.num_bytes)
        assert self.shelf.store.live == []
        summary = self.shelf.tree.summary()
        assert (summary.num_nodes, self.shelf.tree.num_bytes) == (0, 0)


@settings(max_examples=500)
@given(st.sampled_from(sorted(MODELS)), courses(loses=True))
def test_a_match_is_the_best_that_the_live_pieces_allow(model: str, operations: list[Operation]) -> None:
    course = Course(Shelf(*MODELS[model]))
    for operation in operations:
        course.step(operation)
    course.finish()


@settings(max_examples=150)
@given(st.sampled_from(sorted(MODELS)), courses(loses=False))
def test_nothing_is_lost_while_nothing_is_evicted(model: str, operations: list[Operation]) -> None:
    course = Course(Shelf(*MODELS[model]))
    for operation in operations:
        course.step(operation)
    assert not course.has_lost
    course.finish()


@settings(max_examples=100)
@given(st.sampled_from(sorted(MODELS)), courses(loses=False), st.sampled_from([1, 100, 3000]))
def test_evicting_bit_by_bit_ends_with_nothing(model: str, operations: list[Operation], step: int) -> None:
    course = Course(Shelf(*MODELS[model]))
    for operation in operations:
        course.step(operation)
    while course.locked:
        course.step(Unlock(0))
    while course.shelf.tree.num_bytes:
        assert course.shelf.tree.evict(step) >= step or course.shelf.tree.num_bytes == 0
    course.finish()
