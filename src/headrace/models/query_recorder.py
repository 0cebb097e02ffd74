"""Records queries of a sequence's tokens while packed steps run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from headrace.backend.transfer import to_device
from headrace.state.layer import LayerKey


@dataclass(frozen=True, slots=True, eq=False)
class LayerQueries:
    """Queries of one attention layer and how scores are made of them.

    layer: the owner of the keys.
    queries: `[num_heads, n, head_dim]`, after rope.
    scale: a factor of the scores.
    sinks: `[num_heads]`, one more score in each head's softmax; None if there are none.
    """

    layer: LayerKey
    queries: mx.array
    scale: float
    sinks: mx.array | None


class QueryRecorder:
    """Records a sequence's queries in full-attention layers, in each step at its tokens whose logits are wanted.

    Layers with windows and mixers without keys record nothing. `arrays` must be evaluated with the step: later they
    would keep its keys and values from being written in place.
    """

    def __init__(self) -> None:
        self._steps: list[list[LayerQueries]] = []

    def begin(self) -> None:
        """A step begins, whose layers call `record` in order."""
        self._steps.append([])

    def record(
        self, layer: LayerKey, queries: mx.array, tokens: Sequence[int], scale: float, sinks: mx.array | None
    ) -> None:
        """Copy the queries of these packed tokens out of `[1, num_heads, T, head_dim]`."""
        copied = queries[0][:, to_device(tokens, mx.int32)]
        self._steps[-1].append(LayerQueries(layer, copied, scale, sinks))

    def arrays(self) -> list[mx.array]:
        """The last step's queries."""
        return [one.queries for one in self._steps[-1]] if self._steps else []

    def layers(self) -> list[LayerQueries]:
        """One entry per layer, with the queries of all steps concatenated."""
        return [
            replace(of_layer[0], queries=mx.concatenate([one.queries for one in of_layer], axis=1))
            for of_layer in zip(*self._steps, strict=True)
        ]
