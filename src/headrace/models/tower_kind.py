"""What there is to know of a kind of vision tower to load and run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from headrace.models.pieces import Stages
from headrace.models.vision_attention import PatchAttention

Forward = Callable[[mx.array, tuple[int, int, int]], Stages[tuple[mx.array, list[mx.array]]]]
"""Patches `[patches, values]` of one input and its grid to rows `[placeholders, hidden]`, and what is added to the
outputs of the text model's first layers there."""


@dataclass(frozen=True, slots=True)
class TowerKind:
    """One kind of tower.

    own_name: what the tower's module calls a weight of the checkpoint; None for one that is not its own.
    build: the module that a checkpoint's config.json describes, its weights without meaning.
    forward: what the module computes, in pieces; it may change the module. dtype: of its activations.
    needs_axes: whether the text model has to give positions in time, row and column.
    """

    own_name: Callable[[str], str | None]
    build: Callable[[Mapping[str, Any]], Any]
    forward: Callable[[Any, PatchAttention], Forward]
    dtype: Callable[[Any], mx.Dtype]
    num_layers: Callable[[Any], int]
    needs_axes: bool
