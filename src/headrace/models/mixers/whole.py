"""The last resort: the untouched model, a row at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from headrace.models.step import PackedStep
from headrace.state.layer import LayerKey
from headrace.state.module import Feed, ModuleState, token_by_token

WHOLE_MODEL: LayerKey = ()
"""The key of the one state per sequence at this level: all caches of the model."""


def run_rows(model: nn.Module, make_caches: Callable[[], list[Any]], step: PackedStep, inputs: mx.array) -> mx.array:
    """Logits `[T, vocab]` of packed ids `[1, T]`, or other inputs of the model, each row by a separate forward."""

    def feed_all(caches: Any, row: mx.array) -> mx.array:
        logits: mx.array = model(row, cache=caches)
        return logits

    feed: Feed = partial(token_by_token, feed_all) if step.kernels.goes_token_by_token else feed_all
    outputs = []
    for span in step.spans:
        state = span.state.layer(WHOLE_MODEL, lambda: ModuleState(make_caches()))
        row = inputs[:, span.lo : span.hi]
        outputs.append(state.run(feed, row, span.num_certain, span.start, span.state.snapshot_points)[0])
    return mx.concatenate(outputs)
