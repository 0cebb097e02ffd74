"""The radix tree of stored prefixes.

    tree = PrefixTree(store, has_spans=True, needs_snapshots=False)
    tree.match(namespace, key, limit) -> Match
    tree.use(match, counts=True)
    tree.lock(match), tree.unlock(match)
    tree.read(match) -> HeldPieces
    tree.insert(namespace, key, cut=..., snapshots={length: piece})
    tree.evict(num_bytes) -> int
    tree.clear() -> int
    tree.summary() -> CacheStatus, tree.num_bytes

Edges are runs of tokens and own spans; a snapshot lies at a node. It belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from headrace.prefix.eviction import Eviction
from headrace.prefix.holdings import Holdings
from headrace.prefix.key import Namespace, common_length
from headrace.prefix.match import Match, Parting
from headrace.prefix.node import Node, below
from headrace.prefix.pieces import CutSpan, HeldPieces, Piece, SpanPart, Store
from headrace.types.status import CacheStatus

NO_SNAPSHOTS: Mapping[int, Piece] = {}


class PrefixTree:
    """Finds the deepest state held for a prompt.

    has_spans: the model has sliceable layers. needs_snapshots: it has windowed or opaque ones. With spans only, state
    is held at any length; otherwise where a snapshot is.
    """

    def __init__(self, store: Store, *, has_spans: bool, needs_snapshots: bool) -> None:
        """Raises ValueError for a model with neither sort of layers."""
        if not has_spans and not needs_snapshots:
            raise ValueError("a model without any state has nothing to be stored")
        self._has_spans = has_spans
        self._needs_snapshots = needs_snapshots
        self._holdings = Holdings(store, needs_snapshots=needs_snapshots)
        self._roots: dict[Namespace, Node] = {}
        self._locked: set[Match] = set()
        self._clock = 0
        self._num_lookups = 0
        self._num_hits = 0
        self._num_lookup_tokens = 0
        self._num_hit_tokens = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces held."""
        return self._holdings.num_bytes

    def match(self, namespace: Namespace, key: Sequence[int], limit: int) -> Match:
        """The deepest state held for a prompt, at most `limit` tokens long: the prompt's length less 1, so that the
        logits of its last token are still computed.

        Changes nothing, however often it is asked: see `use`. Raises ValueError for a limit outside of the key.
        """
        key = tuple(key)
        if not 0 <= limit <= len(key):
            raise ValueError(f"the limit {limit} lies outside of the prompt's {len(key)} tokens")
        way, num_agreed, parting = self._follow(namespace, key)
        node, num_tokens = self._deepest(way, min(limit, num_agreed))
        return Match(
            namespace=namespace,
            num_prompt_tokens=len(key),
            limit=limit,
            num_tokens=num_tokens,
            num_agreed_tokens=num_agreed,
            parting=parting,
            snapshot_lengths=tuple(
                one.end for one in way if one.snapshot is not None and num_tokens < one.end <= num_agreed
            ),
            node=node,
        )

    def _follow(self, namespace: Namespace, key: tuple[int, ...]) -> tuple[list[Node], int, Parting]:
        """The nodes that a key passes, the last perhaps only in part; how far it agrees, and why no further."""
        node = self._roots.get(namespace)
        if node is None:
            return [], 0, Parting.EMPTY
        way: list[Node] = []
        while node.end < len(key):
            child = node.children.get(key[node.end])
            if child is None:
                return way, node.end, _parting(key[node.end], node.children)
            way.append(child)
            num_agreed = common_length(key, child.edge, node.end)
            if num_agreed < len(child.edge):
                place = node.end + num_agreed
                parting = Parting.WHOLE if place == len(key) else _parting(key[place], child.edge[num_agreed:][:1])
                return way, place, parting
            node = child
        return way, len(key), Parting.WHOLE

    def _deepest(self, way: list[Node], limit: int) -> tuple[Node, int]:
        """The deepest length on the way with state, and the node it is at or in."""
        best, num_tokens = Node(), 0
        for node in way:
            if node.start >= limit:
                break
            if not self._needs_snapshots:
                best, num_tokens = node, min(node.end, limit)
            elif node.snapshot is not None and node.end <= limit:
                best, num_tokens = node, node.end
        return best, num_tokens

    def use(self, match: Match, *, counts: bool = True) -> None:
        """A prompt goes on from a match: what a restore needs is young again, the spans on the way and one snapshot.

        counts: as a lookup, by whose number all else grows older.
        """
        if counts:
            self._clock += 1
            self._num_lookups += 1
            self._num_hits += match.num_tokens > 0
            self._num_lookup_tokens += match.num_prompt_tokens
            self._num_hit_tokens += match.num_tokens
        match.node.snapshot_used = self._clock
        for above in match.node.way_up():
            above.span_used = self._clock

    def lock(self, match: Match) -> None:
        """Keep a match's pieces until `unlock`: neither evicted nor cleared.

        Raises ValueError if they are gone already, or if the match is locked.
        """
        self._check_held(match)
        if match in self._locked:
            raise ValueError("the match is locked already")
        self._locked.add(match)
        self._count_lock(match, 1)

    def unlock(self, match: Match) -> None:
        """Let a match's pieces be evicted again. Raises ValueError if it isn't locked."""
        if match not in self._locked:
            raise ValueError("the match isn't locked")
        self._locked.remove(match)
        self._count_lock(match, -1)

    def _count_lock(self, match: Match, added: int) -> None:
        if self._needs_snapshots and match.num_tokens:
            match.node.num_snapshot_locks += added
        for node in match.node.way_up():
            node.num_locks += added

    def read(self, match: Match) -> HeldPieces:
        """The pieces of a match. Good until the tree changes: a lock keeps the bytes, but an insertion may split spans.

        Raises ValueError if they are gone.
        """
        self._check_held(match)
        spans: list[SpanPart] = []
        if self._has_spans:
            for node in match.node.way_up():
                if node.span is not None and node.start < match.num_tokens:
                    spans.append(SpanPart(node.span, node.start, min(node.end, match.num_tokens)))
        snapshot = match.node.snapshot if self._needs_snapshots and match.num_tokens else None
        return HeldPieces(match.num_tokens, tuple(reversed(spans)), snapshot)

    def _check_held(self, match: Match) -> None:
        """A node that is still in the tree has its spans, for none goes before those below it have gone."""
        if match.num_tokens == 0:
            return
        way = list(match.node.way_up())
        is_held = bool(way) and way[-1].parent is self._roots.get(match.namespace)
        if self._needs_snapshots:
            is_held &= match.node.snapshot is not None
        if not is_held:
            raise ValueError(f"the state of {match.num_tokens} tokens has been evicted since it was matched")

    def insert(
        self,
        namespace: Namespace,
        key: Sequence[int],
        *,
        cut: CutSpan | None = None,
        snapshots: Mapping[int, Piece] = NO_SNAPSHOTS,
    ) -> None:
        """Store what a sequence has computed; what is held already stays and isn't asked for again.

        key: of the computed tokens. cut: asked for the spans that the tree lacks; must be given if the model has spans.
        snapshots: by length, taken over; one that is held already is dropped. Where the model needs
        snapshots, nothing is stored beyond the last of them: nothing could be restored there.

        If `cut` or the store raises, the snapshots remain the caller's; spans made before stay where they are of use.
        Raises ValueError, and nothing is done, for arguments that don't fit the model or the key.
        """
        key = tuple(key)
        self._check_insertion(key, cut, snapshots)
        end = max(snapshots, default=0) if self._needs_snapshots else len(key)
        if end == 0:
            return
        way: list[Node] = []
        try:
            self._make_way(way, self._roots.setdefault(namespace, Node()), key, sorted({*snapshots, end}))
            for node in way:
                if cut is not None and node.span is None:
                    self._holdings.put_span(node, cut(node.start, node.end))
            for node in way:
                node.span_used = self._clock
                if node.end in snapshots:
                    self._holdings.put_snapshot(node, snapshots[node.end])
                    node.snapshot_used = self._clock
        finally:
            if way:
                self._holdings.prune(way[-1])
            self._drop_empty_roots()

    def _check_insertion(self, key: tuple[int, ...], cut: CutSpan | None, snapshots: Mapping[int, Piece]) -> None:
        if (cut is not None) != self._has_spans:
            raise ValueError("cut makes spans: it is given for a model with sliceable layers, and only then")
        if snapshots and not self._needs_snapshots:
            raise ValueError("a model with sliceable layers only has no use for snapshots")
        for length in snapshots:
            if not 0 < length <= len(key):
                raise ValueError(f"a snapshot at {length} lies outside of the {len(key)} tokens")

    def _make_way(self, way: list[Node], node: Node, key: tuple[int, ...], stops: list[int]) -> None:
        """Fill `way` with the nodes from a root that spell the key up to the last stop, one ending at each stop.

        The last stop may lie inside an edge instead where no snapshots are needed: then any length in it will do.
        """
        for stop in stops:
            while node.end < stop:
                child = node.children.get(key[node.end])
                if child is None:
                    child = node.children[key[node.end]] = Node(key[node.end : stop], stop, node)
                num_agreed = min(common_length(key, child.edge, node.end), stop - node.end)
                if num_agreed < len(child.edge):
                    ends_here = node.end + num_agreed == stop
                    if self._needs_snapshots or not ends_here:
                        child = self._holdings.split(child, num_agreed)
                way.append(child)
                node = child

    def evict(self, num_bytes: int) -> int:
        """Free at least `num_bytes`, or all that isn't locked; returns the bytes freed.

        Looks at every node, so that a caller who needs a little again and again had better ask for more at once.
        """
        roots = self._roots.values()
        eviction = Eviction(roots, self._holdings, needs_snapshots=self._needs_snapshots, clock=self._clock)
        num_freed = eviction.free(num_bytes)
        self._drop_empty_roots()
        return num_freed

    def clear(self) -> int:
        """Drop all that isn't locked; returns the bytes freed."""
        before = self.num_bytes
        for node in [node for root in self._roots.values() for node in below(root)][::-1]:
            if not node.num_snapshot_locks:
                self._holdings.drop_snapshot(node)
            if not node.num_locks:
                self._holdings.drop_span(node)
            self._holdings.prune(node)
        self._drop_empty_roots()
        return before - self.num_bytes

    def summary(self) -> CacheStatus:
        """What is held now, and what became of the lookups that were counted."""
        nodes = [node for root in self._roots.values() for node in below(root)]
        return CacheStatus(
            num_bytes=self.num_bytes,
            num_tokens=sum(len(node.edge) for node in nodes),
            num_nodes=len(nodes),
            num_snapshots=sum(node.snapshot is not None for node in nodes),
            num_lookups=self._num_lookups,
            num_hits=self._num_hits,
            num_lookup_tokens=self._num_lookup_tokens,
            num_hit_tokens=self._num_hit_tokens,
        )

    def _drop_empty_roots(self) -> None:
        for namespace in [namespace for namespace, root in self._roots.items() if not root.children]:
            del self._roots[namespace]


def _parting(wanted: int, stored: Iterable[int]) -> Parting:
    """Why a prompt with the key number `wanted` can't go on where one of `stored` would have to follow."""
    numbers = list(stored)
    if not numbers:
        return Parting.END
    return Parting.MEDIA if wanted < 0 or max(numbers) < 0 else Parting.TOKEN
