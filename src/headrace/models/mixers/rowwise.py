"""Any module with any mlx-lm cache, row by row inside the packed step; last resort: the untouched model as a whole.

The module gets one row at a time, with that row's own cache; everything around it stays packed. For latent attention,
Mamba, short convolutions and whatever else does not fit the adapters.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask, create_ssm_mask
from mlx_lm.models.cache import ArraysCache, RotatingKVCache

from headrace.models.lora import BASE, Loras
from headrace.models.patches import RowRope
from headrace.models.positions import TokenPositions
from headrace.models.step import PackedStep, Row
from headrace.state.layer import LayerKey
from headrace.state.module import Feed, ModuleState, token_by_token

FreshCache = Callable[[LayerKey], Any]
"""A new, empty mlx-lm cache for a layer."""


class RowwiseMixer(nn.Module):
    """Replaces a module with a `cache` parameter. ropes: those inside of it."""

    def __init__(self, inner: nn.Module, fresh_cache: FreshCache, ropes: Sequence[RowRope]) -> None:
        super().__init__()
        self.inner = inner
        self._fresh_cache = fresh_cache
        self._ropes = tuple(ropes)
        self._signature = inspect.signature(type(inner).__call__)

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        """Called like the module itself: its first argument is `[1, T, hidden]`, its `cache` is our view."""
        bound = self._signature.bind(self.inner, *args, **kwargs)
        arguments = dict(list(bound.arguments.items())[1:])
        view = arguments.pop("cache")
        arguments.pop("mask", None)
        inputs_name = next(iter(arguments))
        inputs = arguments.pop(inputs_name)
        outputs = []
        for row in view.step.rows:
            feed: Feed = partial(self._feed, inputs_name, arguments, row.positions)
            if view.step.kernels.goes_token_by_token:
                feed = partial(token_by_token, feed)
            state = row.state.layer(view.layer, lambda: ModuleState(self._fresh_cache(view.layer)))
            outputs.append(_run(view.step, row, state, feed, inputs))
        return mx.concatenate(outputs, axis=1)

    def _feed(
        self,
        inputs_name: str,
        arguments: dict[str, Any],
        positions: TokenPositions | None,
        cache: Any,
        inputs: mx.array,
    ) -> mx.array:
        if "mask" in self._signature.parameters:
            arguments = dict(arguments, mask=_mask(cache, inputs))
        for rope in self._ropes:
            rope.positions = positions
        output: mx.array = self.inner(**{inputs_name: inputs}, cache=cache, **arguments)
        return output


def _run(step: PackedStep, row: Row, state: ModuleState, feed: Feed, inputs: mx.array) -> mx.array:
    """Run a row's part of the inputs `[1, T, ...]` with its adapter, which a later replay uses, too."""
    own_inputs = inputs[:, row.lo : row.hi]
    if step.loras is None:
        return state.run(feed, own_inputs, row.num_certain, row.start, row.state.snapshot_points)
    with step.loras.row(row.adapter):
        own = feed if row.adapter == BASE else partial(_feed_with, step.loras, row.adapter, feed)
        return state.run(own, own_inputs, row.num_certain, row.start, row.state.snapshot_points)


def _feed_with(loras: Loras, adapter: int, feed: Feed, cache: Any, inputs: mx.array) -> mx.array:
    with loras.row(adapter):
        return feed(cache, inputs)


def _mask(cache: Any, inputs: mx.array) -> Any:
    """The mask that a model makes for a cache of this kind; as an array, which every module understands."""
    if isinstance(cache, ArraysCache):
        return create_ssm_mask(inputs, cache)
    window = cache.max_size if isinstance(cache, RotatingKVCache) else None
    return create_attention_mask(inputs, cache, window_size=window, return_array=True)


def fresh_caches(make: Callable[[], list[Any]]) -> FreshCache:
    """Empty caches by layer key, copied from one call of the model's own `make_cache`."""
    prototypes = make()

    def fresh(key: LayerKey) -> Any:
        cache: Any = prototypes
        for index in key:
            cache = cache[index]
        return copy.deepcopy(cache)

    return fresh


WHOLE_MODEL: LayerKey = ()
"""The key of the one state per sequence at this level: all caches of the model."""


def run_rows(model: nn.Module, make_caches: Callable[[], list[Any]], step: PackedStep, inputs: mx.array) -> mx.array:
    """Logits `[T, vocab]` of packed ids `[1, T]`, or other inputs of the model, each row by a separate forward."""

    def feed_all(caches: Any, row: mx.array) -> mx.array:
        logits: mx.array = model(row, cache=caches)
        return logits

    feed: Feed = partial(token_by_token, feed_all) if step.kernels.goes_token_by_token else feed_all
    outputs = []
    for row in step.rows:
        state = row.state.layer(WHOLE_MODEL, lambda: ModuleState(make_caches()))
        outputs.append(_run(step, row, state, feed, inputs)[0])
    return mx.concatenate(outputs)
