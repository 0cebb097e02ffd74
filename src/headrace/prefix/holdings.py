"""Pieces at nodes: the only place where a tree gains, splits or loses one."""

from __future__ import annotations

from headrace.prefix.node import Node
from headrace.prefix.pieces import Piece, Store


class Holdings:
    """Keeps bytes in step with pieces, and every leaf worth its place.

    A leaf is worth its place if it holds what a state can end in: a snapshot where the model needs them, else a span.
    """

    def __init__(self, store: Store, *, needs_snapshots: bool) -> None:
        self._store = store
        self._needs_snapshots = needs_snapshots
        self.num_bytes = 0
        """Of all pieces held."""

    def put_span(self, node: Node, span: Piece) -> None:
        """Take a span over for a node that has none."""
        node.span, node.span_bytes = span, span.num_bytes
        self.num_bytes += node.span_bytes

    def put_snapshot(self, node: Node, snapshot: Piece) -> None:
        """Take a snapshot over; if the node has one already that one stays and the new one is dropped."""
        if node.snapshot is not None:
            self._store.drop(snapshot)
            return
        node.snapshot, node.snapshot_bytes = snapshot, snapshot.num_bytes
        self.num_bytes += node.snapshot_bytes

    def drop_span(self, node: Node) -> None:
        """Drop a node's span, if it has one."""
        if node.span is not None:
            self._store.drop(node.span)
        self.num_bytes -= node.span_bytes
        node.span, node.span_bytes = None, 0

    def drop_snapshot(self, node: Node) -> None:
        """Drop a node's snapshot, if it has one."""
        if node.snapshot is not None:
            self._store.drop(node.snapshot)
        self.num_bytes -= node.snapshot_bytes
        node.snapshot, node.snapshot_bytes = None, 0

    def split(self, node: Node, num_tokens: int) -> Node:
        """Put a new node after the first `num_tokens` tokens of a node's edge; the new one is returned.

        The old one keeps the lower part, so that locks, which begin at the lower end, find both.
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
        """Take a node out if it is a leaf that isn't worth its place, then those above it likewise.

        Returns the node at which that ended. A locked leaf is always worth its place.
        """
        while node.parent is not None and not node.children and not self._is_worth(node):
            self.drop_span(node)
            parent, node.parent = node.parent, None
            del parent.children[node.edge[0]]
            node = parent
        return node

    def _is_worth(self, leaf: Node) -> bool:
        return (leaf.snapshot if self._needs_snapshots else leaf.span) is not None
