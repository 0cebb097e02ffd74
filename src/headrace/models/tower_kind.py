"""What is needed to load and run a kind of vision tower."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from headrace.models.chunked import Stages
from headrace.models.vision_attention import PatchAttention

Forward = Callable[[mx.array, tuple[int, int, int]], Stages[tuple[mx.array, list[mx.array]]]]
"""Patches `[patches, values]` of one input and its grid to rows `[placeholders, hidden]`, and additions to the
outputs of the text model's first layers there."""


@dataclass(frozen=True, slots=True)
class TowerKind:
    """One kind of tower.

    own_name: the tower module's name for a weight of the checkpoint; None if it is not the tower's.
    build: the module described by config.json, with arbitrary weights.
    forward: the module's computation, in slices; it may change the module.
    dtype: of its activations.
    needs_axes: whether the text model must have positions in time, row and column.
    """

    own_name: Callable[[str], str | None]
    build: Callable[[Mapping[str, Any]], Any]
    forward: Callable[[Any, PatchAttention], Forward]
    dtype: Callable[[Any], mx.Dtype]
    num_layers: Callable[[Any], int]
    needs_axes: bool
