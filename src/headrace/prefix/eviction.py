"""Which cached pieces to evict: old ones that save little work for their bytes.

The score of a piece is log2(FLOPs saved per byte) minus its age in half-lives; the lowest goes first. By age alone a
side conversation of 600 tokens would evict one of 100,000; by FLOPs alone nothing would ever age. Here a piece that
saves twice the work per byte may be one half-life older. Marconi (arXiv 2411.19379) combines recency and FLOP
efficiency similarly; the logarithm makes even the largest prompt age.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.isolation import isolated
from headrace.prefix.node import Node, NodeStorage, descendants

logger = logging.getLogger(__name__)

HALF_LIFE_LOOKUPS = 32
"""Age is counted in lookups (requests), so an idle server forgets nothing. Long enough for a conversation to survive
other clients and its own side requests between two turns."""
PASSED_HALF_LIVES = 4
"""A snapshot that its conversation has grown past, with no other branch there, is seldom restored: it counts as this
many half-lives older."""
ATTENTION_TOKENS = 16_384
"""Computing a token at this position takes twice the FLOPs of one at position 0.

A layer of width d takes about 24 d² FLOPs for a token's matmuls and 4 d for each earlier token, so this is 6 d, with
the d of models that fit a desktop (1,024 to 5,120). Only proportions matter: they make the end of a long prompt dearer.
"""
TRIM_TOKENS = 256
"""A span that is longer than needed is trimmed from its end in steps of this many tokens."""


@dataclass(frozen=True, slots=True, order=True)
class _Candidate:
    """A piece that may be evicted, in order of eviction; ties: the one found first."""

    score: float
    serial: int
    node: Node = field(compare=False)


class Eviction:
    """One round of eviction. Nothing else may change the tree meanwhile."""

    def __init__(self, roots: Iterable[Node], storage: NodeStorage, *, needs_snapshots: bool, clock: int) -> None:
        self._roots = list(roots)
        self._storage = storage
        self._needs_snapshots = needs_snapshots
        self._clock = clock
        self._heap: list[_Candidate] = []
        self._num_pushed = 0

    def free(self, num_bytes: int) -> int:
        """Drop pieces until `num_bytes` are free or all remaining ones are in use. Returns the bytes freed."""
        before = self._storage.num_bytes
        target = before - num_bytes
        for node in [node for root in self._roots for node in descendants(root)]:
            self._push(node)
        while self._heap and self._storage.num_bytes > target:
            self._drop_next(target)
        return before - self._storage.num_bytes

    def _push(self, node: Node) -> None:
        if self._is_evictable(node):
            self._num_pushed += 1
            heapq.heappush(self._heap, _Candidate(self._score(node), self._num_pushed, node))

    def _drop_next(self, target: int) -> None:
        """Drop the lowest candidate, or put it back if its score has risen since."""
        candidate = heapq.heappop(self._heap)
        node = candidate.node
        if not self._is_evictable(node):
            return
        if self._score(node) > candidate.score:
            self._push(node)
        elif self._needs_snapshots:
            self._push(self._drop_snapshot(node))
        else:
            self._push(self._drop_end(node, target))

    def _drop_snapshot(self, node: Node) -> Node:
        """Drop a snapshot, and the spans that only led to it. Returns the next snapshot above, now worth less."""
        self._storage.drop_snapshot(node)
        return _snapshot_above(self._storage.prune(node))

    def _drop_end(self, leaf: Node, target: int) -> Node:
        """Drop a leaf's span, or only as much of its end as needed. Returns the remaining leaf, or its parent."""
        excess = self._storage.num_bytes - target
        num_tokens = len(leaf.edge)
        num_kept = num_tokens - -(-excess * num_tokens // max(1, leaf.span_bytes))
        num_kept -= num_kept % TRIM_TOKENS
        if num_kept > 0:
            with isolated(_log_failure):  # there may be no memory for the copy: then all of it goes
                return self._storage.shorten(leaf, num_kept)
        self._storage.drop_span(leaf)
        return self._storage.prune(leaf)

    def _is_evictable(self, node: Node) -> bool:
        if node.parent is None:
            return False
        if self._needs_snapshots:
            return node.snapshot is not None and not node.num_snapshot_locks
        return node.span is not None and not node.children and not node.num_locks

    def _score(self, node: Node) -> float:
        used = node.snapshot_last_used if self._needs_snapshots else node.span_last_used
        half_lives = (self._clock - used) / HALF_LIFE_LOOKUPS
        if len(node.children) == 1:
            half_lives += PASSED_HALF_LIVES
        return math.log2(self._efficiency(node)) - half_lives

    def _efficiency(self, node: Node) -> float:
        """FLOPs to recompute per byte freed, in FLOPs of a token at position 0."""
        if not self._needs_snapshots:
            return _flops(node.start, node.end) / max(1, node.span_bytes)
        assert node.parent is not None
        return _flops(_snapshot_above(node.parent).end, node.end) / max(
            1, node.snapshot_bytes + _exclusive_span_bytes(node)
        )


def _log_failure(error: Exception) -> None:
    logger.warning("a cached prefix is dropped whole: the copy of its beginning failed", exc_info=error)


def _flops(start: int, end: int) -> float:
    """FLOPs of computing the tokens `start` to `end`, in those of a token at position 0."""
    return (end - start) * (1 + (start + end) / (2 * ATTENTION_TOKENS))


def _snapshot_above(node: Node) -> Node:
    """The nearest node with a snapshot, from this one up; the root if there is none."""
    while node.parent is not None and node.snapshot is None:
        node = node.parent
    return node


def _exclusive_span_bytes(node: Node) -> int:
    """Bytes of the spans that lead only to this node's snapshot."""
    if node.children:
        return 0
    num_bytes = 0
    for above in node.path_to_root():
        if above.num_locks or (above is not node and (len(above.children) > 1 or above.snapshot is not None)):
            break
        num_bytes += above.span_bytes
    return num_bytes
