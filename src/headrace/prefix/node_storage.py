"""Stores the pieces of nodes: the only place where a tree gains, splits or loses one."""

from __future__ import annotations

from headrace.prefix.node import Node
from headrace.prefix.pieces import Piece, Store


class NodeStorage:
    """Keeps the byte count in step with the pieces, and drops useless leaves.

    A leaf is useful if state can end there: a snapshot where the model needs them, else a span.
    """

    def __init__(self, store: Store, *, needs_snapshots: bool) -> None:
        self._store = store
        self._needs_snapshots = needs_snapshots
        self.num_bytes = 0
        """Of all pieces held."""

    def put_span(self, node: Node, span: Piece) -> None:
        """Store the span of a node that has none."""
        node.span, node.span_bytes = span, span.num_bytes
        self.num_bytes += node.span_bytes

    def put_snapshot(self, node: Node, snapshot: Piece) -> None:
        """Store a node's snapshot; if it has one already, drop the new one."""
        if node.snapshot is not None:
            self._store.drop(snapshot)
            return
        node.snapshot, node.snapshot_bytes = snapshot, snapshot.num_bytes
        self.num_bytes += node.snapshot_bytes

    def drop_span(self, node: Node) -> None:
        if node.span is not None:
            self._store.drop(node.span)
        self.num_bytes -= node.span_bytes
        node.span, node.span_bytes = None, 0

    def drop_snapshot(self, node: Node) -> None:
        if node.snapshot is not None:
            self._store.drop(node.snapshot)
        self.num_bytes -= node.snapshot_bytes
        node.snapshot, node.snapshot_bytes = None, 0

    def split(self, node: Node, num_tokens: int) -> Node:
        """Insert a new node after the first `num_tokens` tokens of a node's edge, and return it.

        The old node keeps the lower part, so locks, which start at the lower end, cover both.
        """
        assert node.parent is not None and 0 < num_tokens < len(node.edge)
        pieces = self._store.split(node.span, num_tokens) if node.span is not None else None
        upper = Node(node.edge[:num_tokens], node.start + num_tokens, node.parent, num_locks=node.num_locks)
        upper.span_used = node.span_used
        node.parent.children[upper.edge[0]] = upper
        node.edge, node.parent = node.edge[num_tokens:], upper
        upper.children[node.edge[0]] = node
        if pieces is not None:
            self.num_bytes -= node.span_bytes
            self.put_span(upper, pieces[0])
            self.put_span(node, pieces[1])
        return upper

    def prune(self, node: Node) -> Node:
        """Remove a useless leaf, then the nodes above it likewise. Returns the node where that stopped.

        A locked leaf always counts as useful.
        """
        while node.parent is not None and not node.children and not self._is_worth(node):
            self.drop_span(node)
            parent, node.parent = node.parent, None
            del parent.children[node.edge[0]]
            node = parent
        return node

    def _is_worth(self, leaf: Node) -> bool:
        return (leaf.snapshot if self._needs_snapshots else leaf.span) is not None
