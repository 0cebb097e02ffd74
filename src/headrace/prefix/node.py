"""A node of the prefix tree, with the edge that leads to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.prefix.pieces import Piece


@dataclass(slots=True, eq=False)
class Node:
    """The root has an empty edge; all others have at least one token.

    edge: the key of the tokens `start` to `end`.
    children: by the first number of their edge.
    span: of the edge's tokens; None if the model has none.
    snapshot: at `end`.
    span_used, snapshot_used: the tree's clock at their last use.
    num_locks: locked matches that end at this node or below.
    num_snapshot_locks: those that use the snapshot.
    """

    edge: tuple[int, ...] = ()
    end: int = 0
    parent: Node | None = None
    children: dict[int, Node] = field(default_factory=dict)
    span: Piece | None = None
    span_bytes: int = 0
    span_used: int = 0
    snapshot: Piece | None = None
    snapshot_bytes: int = 0
    snapshot_used: int = 0
    num_locks: int = 0
    num_snapshot_locks: int = 0

    @property
    def start(self) -> int:
        """Length at which the edge begins."""
        return self.end - len(self.edge)

    def path_to_root(self) -> Iterator[Node]:
        """This node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


def below(root: Node) -> Iterator[Node]:
    """All nodes under a root, each before its children. The tree must not change meanwhile."""
    waiting = list(root.children.values())
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children.values()
