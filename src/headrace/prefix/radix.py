"""The radix tree of stored prefixes.

    tree = PrefixTree(has_spans=True, needs_snapshots=False)
    tree.match(namespace, key, limit) -> Match
    tree.use(match, counts=True)
    tree.lock(match), tree.unlock(match)
    tree.read(match) -> HeldPieces
    tree.insert(namespace, key, make_span=..., snapshots={length: piece})
    tree.evict(num_bytes) -> int
    tree.clear() -> int
    tree.summary() -> CacheStatus, tree.num_bytes

Edges are runs of tokens and own spans; a snapshot lies at a node. It belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from headrace.common_prefix import common_length
from headrace.prefix.eviction import Eviction
from headrace.prefix.key import Namespace
from headrace.prefix.node import HeldPieces, MakeSpan, Match, Mismatch, Node, NodeStorage, Piece, Span, descendants
from headrace.types.status import CacheStatus

NO_SNAPSHOTS: Mapping[int, Piece] = {}


class PrefixTree:
    """Finds the deepest stored state for a prompt.

    has_spans: the model has sliceable layers. needs_snapshots: it has windowed or opaque ones. With spans only, state
    exists at any length; otherwise only at snapshots.
    """

    def __init__(self, *, has_spans: bool, needs_snapshots: bool) -> None:
        """Raises ValueError for a model with neither kind of layer."""
        if not has_spans and not needs_snapshots:
            raise ValueError("a model without any state has nothing to be stored")
        self._has_spans = has_spans
        self._needs_snapshots = needs_snapshots
        self._storage = NodeStorage(needs_snapshots=needs_snapshots)
        self._roots: dict[Namespace, Node] = {}
        self._locked: set[Match] = set()
        self._clock = 0
        self._num_lookups = 0
        self._num_hits = 0
        self._num_lookup_tokens = 0
        self._num_hit_tokens = 0

    @property
    def num_bytes(self) -> int:
        return self._storage.num_bytes

    def match(self, namespace: Namespace, key: Sequence[int], limit: int, *, num_locked: int = 0) -> Match:
        """The deepest stored state for a prompt, at most `limit` tokens long: the prompt's length less 1, so that the
        logits of its last token are still computed.

        num_locked: length of a match that the caller has locked; its tokens are not compared again.
        Changes nothing: see `use`. Raises ValueError for a limit outside of the key.
        """
        key = tuple(key)
        if not 0 <= limit <= len(key):
            raise ValueError(f"the limit {limit} lies outside of the prompt's {len(key)} tokens")
        path, num_agreed, mismatch = self._follow(namespace, key, num_locked)
        node, num_tokens = self._deepest(path, min(limit, num_agreed))
        return Match(
            namespace=namespace,
            num_prompt_tokens=len(key),
            limit=limit,
            num_tokens=num_tokens,
            num_agreed_tokens=num_agreed,
            mismatch=mismatch,
            snapshot_lengths=tuple(
                one.end for one in path if one.snapshot is not None and num_tokens < one.end <= num_agreed
            ),
            node=node,
        )

    def _follow(self, namespace: Namespace, key: tuple[int, ...], num_locked: int) -> tuple[list[Node], int, Mismatch]:
        """The nodes on a key's path, the last perhaps only in part; how far it agrees, and why no further."""
        node = self._roots.get(namespace)
        if node is None:
            return [], 0, Mismatch.EMPTY
        path: list[Node] = []
        while node.end < len(key):
            child = node.children.get(key[node.end])
            if child is None:
                return path, node.end, _mismatch(key[node.end], node.children)
            path.append(child)
            num_agreed = _num_agreed(key, child, num_locked)
            if num_agreed < len(child.edge):
                place = node.end + num_agreed
                mismatch = (
                    Mismatch.PROMPT_ENDS if place == len(key) else _mismatch(key[place], child.edge[num_agreed:][:1])
                )
                return path, place, mismatch
            node = child
        return path, len(key), Mismatch.PROMPT_ENDS

    def _deepest(self, path: list[Node], limit: int) -> tuple[Node, int]:
        best, num_tokens = Node(), 0
        for node in path:
            if node.start >= limit:
                break
            if not self._needs_snapshots:
                best, num_tokens = node, min(node.end, limit)
            elif node.snapshot is not None and node.end <= limit:
                best, num_tokens = node, node.end
        return best, num_tokens

    def use(self, match: Match, *, counts: bool = True) -> None:
        """Mark what a restore from the match needs as used: the spans on the path and one snapshot.

        counts: as a lookup; the number of lookups is the clock of ageing.
        """
        if counts:
            self._clock += 1
            self._num_lookups += 1
            self._num_hits += match.num_tokens > 0
            self._num_lookup_tokens += match.num_prompt_tokens
            self._num_hit_tokens += match.num_tokens
        match.node.snapshot_last_used = self._clock
        for above in match.node.path_to_root():
            above.span_last_used = self._clock

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
        for node in match.node.path_to_root():
            node.num_locks += added

    def read(self, match: Match) -> HeldPieces:
        """The pieces of a match, valid until the tree changes: a lock keeps the bytes, but an insertion may split
        spans.

        Raises ValueError if they are gone.
        """
        self._check_held(match)
        spans: list[Span] = []
        if self._has_spans:
            for node in match.node.path_to_root():
                if node.span is not None and node.start < match.num_tokens:
                    spans.append(node.span)
        snapshot = match.node.snapshot if self._needs_snapshots and match.num_tokens else None
        return HeldPieces(match.num_tokens, tuple(reversed(spans)), snapshot)

    def _check_held(self, match: Match) -> None:
        """A node still in the tree has its spans, because pieces are removed from the bottom up."""
        if match.num_tokens == 0:
            return
        path = list(match.node.path_to_root())
        is_held = bool(path) and path[-1].parent is self._roots.get(match.namespace)
        if self._needs_snapshots:
            is_held &= match.node.snapshot is not None
        if not is_held:
            raise ValueError(f"the state of {match.num_tokens} tokens has been evicted since it was matched")

    def insert(
        self,
        namespace: Namespace,
        key: Sequence[int],
        *,
        make_span: MakeSpan | None = None,
        snapshots: Mapping[int, Piece] = NO_SNAPSHOTS,
        num_locked: int = 0,
    ) -> None:
        """Store what a sequence has computed; what is stored already stays and is not asked for again.

        key: of the computed tokens. num_locked: as for `match`.
        make_span: called for the spans that the tree lacks; required if the model has spans.
        snapshots: by length; the tree takes over those that it lacks. Where the model needs snapshots,
        nothing is stored beyond the last of them, because nothing could be restored there.

        If `make_span` or a split raises, the snapshots remain the caller's; spans made before stay if they are of use.
        Raises ValueError, and changes nothing, for arguments that don't fit the model or the key.
        """
        key = tuple(key)
        self._check_insertion(key, make_span, snapshots)
        end = max(snapshots, default=0) if self._needs_snapshots else len(key)
        if end == 0:
            return
        path: list[Node] = []
        try:
            self._make_path(path, self._roots.setdefault(namespace, Node()), key, sorted({*snapshots, end}), num_locked)
            for node in path:
                if make_span is not None and node.span is None:
                    self._storage.put_span(node, make_span(node.start, node.end))
            for node in path:
                node.span_last_used = self._clock
                if node.end in snapshots:
                    self._storage.put_snapshot(node, snapshots[node.end])
                    node.snapshot_last_used = self._clock
        finally:
            if path:
                self._storage.prune(path[-1])
            self._drop_empty_roots()

    def _check_insertion(
        self, key: tuple[int, ...], make_span: MakeSpan | None, snapshots: Mapping[int, Piece]
    ) -> None:
        if (make_span is not None) != self._has_spans:
            raise ValueError("make_span is given for a model with sliceable layers, and only then")
        if snapshots and not self._needs_snapshots:
            raise ValueError("a model with sliceable layers only has no use for snapshots")
        for length in snapshots:
            if not 0 < length <= len(key):
                raise ValueError(f"a snapshot at {length} lies outside of the {len(key)} tokens")

    def _make_path(self, path: list[Node], node: Node, key: tuple[int, ...], stops: list[int], num_locked: int) -> None:
        """Extend `path` by the nodes that spell the key up to the last stop, with a node ending at each stop.

        Without snapshots the last stop may lie inside an edge: any length in it will do.
        """
        for stop in stops:
            while node.end < stop:
                child = node.children.get(key[node.end])
                if child is None:
                    child = node.children[key[node.end]] = Node(key[node.end : stop], stop, node)
                num_agreed = min(_num_agreed(key, child, num_locked), stop - node.end)
                if num_agreed < len(child.edge):
                    ends_here = node.end + num_agreed == stop
                    if self._needs_snapshots or not ends_here:
                        child = self._storage.split(child, num_agreed)
                path.append(child)
                node = child

    def evict(self, num_bytes: int) -> int:
        """Free at least `num_bytes`, or everything unlocked. Returns the bytes freed.

        Visits every node, so repeated callers should ask for more at once.
        """
        roots = self._roots.values()
        eviction = Eviction(roots, self._storage, needs_snapshots=self._needs_snapshots, clock=self._clock)
        num_freed = eviction.free(num_bytes)
        self._drop_empty_roots()
        return num_freed

    def clear(self) -> int:
        """Drop everything unlocked. Returns the bytes freed."""
        before = self.num_bytes
        for node in [node for root in self._roots.values() for node in descendants(root)][::-1]:
            if not node.num_snapshot_locks:
                self._storage.drop_snapshot(node)
            if not node.num_locks:
                self._storage.drop_span(node)
            self._storage.prune(node)
        self._drop_empty_roots()
        return before - self.num_bytes

    def summary(self) -> CacheStatus:
        nodes = [node for root in self._roots.values() for node in descendants(root)]
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


def _num_agreed(key: tuple[int, ...], node: Node, num_locked: int) -> int:
    """How many numbers of a node's edge the key has there; the first `num_locked` of the key are on the node's path."""
    known = min(max(0, num_locked - node.start), len(node.edge))
    if known == 0:
        return common_length(key, node.edge, node.start)
    return known + common_length(key, node.edge[known:], node.start + known)


def _mismatch(wanted: int, stored: Iterable[int]) -> Mismatch:
    """Why a prompt with the key number `wanted` can't continue where one of `stored` would have to follow."""
    numbers = list(stored)
    if not numbers:
        return Mismatch.STORED_ENDS
    return Mismatch.MEDIA if wanted < 0 or max(numbers) < 0 else Mismatch.TOKEN
