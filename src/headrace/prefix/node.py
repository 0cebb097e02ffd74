"""The nodes of the prefix tree, the pieces of states that they hold, and the match of a prompt with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from headrace.prefix.key import Namespace


class Piece(Protocol):
    """An immutable stored part of a state, gone with its last reference. There are two kinds.

    A *span* holds the sliceable layers' state of consecutive tokens; a *snapshot* holds all windowed and opaque layers
    at exactly one length.
    """

    @property
    def num_bytes(self) -> int:
        """Bytes held by the piece; constant."""


class Span(Piece, Protocol):
    def part(self, start: int, end: int) -> Span:
        """A copy of the tokens `start` to `end`, at least one, of those that it has. May raise."""


MakeSpan = Callable[[int, int], Span]
"""Makes the span of a sequence's tokens `start` to `end`. May raise; must not call the tree."""


@dataclass(frozen=True, slots=True)
class HeldPieces:
    """The pieces from which a state of `num_tokens` tokens is restored.

    spans: consecutive, from token 0 on; the last may hold more tokens. None if the model has no sliceable layers.
    snapshot: at exactly num_tokens; None if the model needs none, and at length 0.
    """

    num_tokens: int
    spans: tuple[Span, ...]
    snapshot: Piece | None


@dataclass(slots=True, eq=False)
class Node:
    """The root has an empty edge; all others have at least one token.

    edge: the key of the tokens `start` to `end`.
    children: by the first number of their edge.
    span: of the edge's tokens; None if the model has none.
    snapshot: at `end`.
    span_last_used, snapshot_last_used: the tree's clock at their last use.
    num_locks: locked matches that end at this node or below.
    num_snapshot_locks: those that use the snapshot.
    """

    edge: tuple[int, ...] = ()
    end: int = 0
    parent: Node | None = None
    children: dict[int, Node] = field(default_factory=dict)
    span: Span | None = None
    span_bytes: int = 0
    span_last_used: int = 0
    snapshot: Piece | None = None
    snapshot_bytes: int = 0
    snapshot_last_used: int = 0
    num_locks: int = 0
    num_snapshot_locks: int = 0

    @property
    def start(self) -> int:
        return self.end - len(self.edge)

    def path_to_root(self) -> Iterator[Node]:
        """Without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


def descendants(root: Node) -> Iterator[Node]:
    """All nodes under a root, each before its children. The tree must not change meanwhile."""
    waiting = list(root.children.values())
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children.values()


class NodeStorage:
    """Keeps the byte count in step with the pieces, and removes useless leaves.

    A leaf is useful if state can end there: a snapshot where the model needs them, else a span.
    """

    def __init__(self, *, needs_snapshots: bool) -> None:
        self._needs_snapshots = needs_snapshots
        self.num_bytes = 0
        """Of all pieces held."""

    def put_span(self, node: Node, span: Span) -> None:
        node.span, node.span_bytes = span, span.num_bytes
        self.num_bytes += node.span_bytes

    def put_snapshot(self, node: Node, snapshot: Piece) -> None:
        """Store a node's snapshot, unless it has one already."""
        if node.snapshot is None:
            node.snapshot, node.snapshot_bytes = snapshot, snapshot.num_bytes
            self.num_bytes += node.snapshot_bytes

    def drop_span(self, node: Node) -> None:
        self.num_bytes -= node.span_bytes
        node.span, node.span_bytes = None, 0

    def drop_snapshot(self, node: Node) -> None:
        self.num_bytes -= node.snapshot_bytes
        node.snapshot, node.snapshot_bytes = None, 0

    def split(self, node: Node, num_tokens: int) -> Node:
        """Insert a new node after the first `num_tokens` tokens of a node's edge, and return it.

        The old node keeps the lower part, so locks, which start at the lower end, cover both.
        """
        assert node.parent is not None and 0 < num_tokens < len(node.edge)
        middle = node.start + num_tokens
        pieces = (
            (node.span.part(node.start, middle), node.span.part(middle, node.end)) if node.span is not None else None
        )
        upper = Node(node.edge[:num_tokens], middle, node.parent, num_locks=node.num_locks)
        upper.span_last_used = node.span_last_used
        node.parent.children[upper.edge[0]] = upper
        node.edge, node.parent = node.edge[num_tokens:], upper
        upper.children[node.edge[0]] = node
        if pieces is not None:
            self.num_bytes -= node.span_bytes
            self.put_span(upper, pieces[0])
            self.put_span(node, pieces[1])
        return upper

    def shorten(self, leaf: Node, num_tokens: int) -> Node:
        """Put a leaf with only the first `num_tokens` tokens of its edge in its place, and return it.

        Changes nothing if copying its span raises.
        """
        assert leaf.parent is not None and leaf.span is not None and not leaf.children and not leaf.num_locks
        end = leaf.start + num_tokens
        span = leaf.span.part(leaf.start, end)
        shorter = Node(leaf.edge[:num_tokens], end, leaf.parent, span_last_used=leaf.span_last_used)
        self.drop_span(leaf)
        leaf.parent.children[shorter.edge[0]], leaf.parent = shorter, None
        self.put_span(shorter, span)
        return shorter

    def prune(self, node: Node) -> Node:
        """Remove a useless leaf, then the nodes above it likewise. Returns the node where that stopped.

        A locked leaf always counts as useful.
        """
        while node.parent is not None and not node.children and not self._is_useful(node):
            self.drop_span(node)
            parent, node.parent = node.parent, None
            del parent.children[node.edge[0]]
            node = parent
        return node

    def _is_useful(self, leaf: Node) -> bool:
        return (leaf.snapshot if self._needs_snapshots else leaf.span) is not None


class Mismatch(StrEnum):
    """Why a prompt and the stored keys agree no further."""

    PROMPT_ENDS = "the prompt ends there"
    STORED_ENDS = "what is stored ends there"
    TOKEN = "another token follows in what is stored"
    MEDIA = "another media item, or none, follows in what is stored"
    EMPTY = "nothing is stored for this model, adapter and salt"


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """The longest stored prefix of a prompt. Numbers are lengths in tokens.

    num_tokens: the deepest stored state, at most `limit`.
    num_agreed_tokens: how far keys agree, regardless of limit and state.
    mismatch: why no further.
    snapshot_lengths: snapshots on the path beyond num_tokens, rising; the limit excludes them.
    num_prompt_tokens: of the prompt that was looked up.
    node: where the state ends; internal to the tree.
    """

    namespace: Namespace
    num_prompt_tokens: int
    limit: int
    num_tokens: int
    num_agreed_tokens: int
    mismatch: Mismatch
    snapshot_lengths: tuple[int, ...] = ()
    node: Node = field(repr=False, kw_only=True)

    @property
    def branch_point(self) -> int | None:
        """Where an earlier prompt branched off but no state is stored: a snapshot there will serve the next one.
        None if the usable state reaches as far."""
        reachable = min(self.num_agreed_tokens, self.limit)
        return reachable if reachable > self.num_tokens else None
