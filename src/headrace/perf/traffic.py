"""Bytes that a step has to move at least, and how fast this device moves bytes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from headrace.backend.device import device_kind
from headrace.state.sequence import StateCost

_COPIED_BYTES = {"cpu": 2**26, "cuda": 2**30, "metal": 2**29}
_NUM_COPIES = 10


def copy_bytes_per_s() -> float:
    """Bytes read and written per second by the quickest of some passes that read a large array and write one."""
    array = mx.ones(_COPIED_BYTES[device_kind()] // 4, dtype=mx.float32)
    mx.eval(array)
    times = []
    for _ in range(_NUM_COPIES + 2):
        started = time.perf_counter()
        # a pass over memory like a copy, which MLX would otherwise leave out
        mx.eval(-array)
        times.append(time.perf_counter() - started)
    mx.clear_cache()
    return 2 * array.nbytes / min(times)


def weight_bytes(model: Any, config: Mapping[str, Any], num_rows: int) -> int:
    """Bytes of weights that a step of `num_rows` tokens reads.

    Of experts as many as that many tokens call on average if the router treats all alike, which random weights nearly
    do. Of a table of embeddings that is not the output matrix as well, a row per token.
    """
    share = 1.0
    if num_experts := config.get("num_experts"):
        share = 1 - (1 - config["num_experts_per_tok"] / num_experts) ** num_rows
    total = 0.0
    for path, array in dict(tree_flatten(model.parameters())).items():
        if ".switch_mlp." in path:
            total += array.nbytes * share
        elif "embed_tokens" in path and not config["tie_word_embeddings"]:
            total += array.nbytes / array.shape[0] * num_rows
        else:
            total += array.nbytes
    return round(total)


def state_bytes(cost: StateCost, num_rows: int, context: int) -> int:
    """Bytes of states that a step moves: keys and values are read, what has no token axis is read and written."""
    per_row = cost.record_bytes(context) + sum(layer.fixed for layer in cost.layers)
    return num_rows * per_row
