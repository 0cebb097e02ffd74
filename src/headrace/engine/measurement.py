"""The configured model as mlx-lm alone runs it, and how many operations a step of each has: for `doctor --report`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from headrace.backend import blas, device
from headrace.backend.kernels import Kernels
from headrace.backend.operations import metal_launches
from headrace.config import Config
from headrace.engine.model_files import model_files
from headrace.models.packed import PackedModel
from headrace.models.selfcheck import check
from headrace.models.step import Row
from headrace.models.weights import load_weights, set_precision
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool

Prompts = Sequence[Sequence[int]]
Event = tuple[float, int, int]
"""When tokens came, for which row, and how many."""

LONGEST_S = 30.0
"""A batch that takes longer is measured until then."""

_CONTEXT = 16
"""Tokens before the step whose operations are counted."""


def rates(started: float, events: Sequence[Event], num_prompt_tokens: int) -> dict[str, float]:
    """Prompt tokens per second until all rows have their first token, and output tokens per second after that.

    num_prompt_tokens: of all rows, which start together.
    """
    begun: dict[int, float] = {}
    for now, row, _ in events:
        begun.setdefault(row, now)
    first, last = max(begun.values()), max(now for now, _, _ in events)
    num_tokens = sum(number for now, _, number in events if now > first)
    return {
        "prompt_tokens_per_s": round(num_prompt_tokens / (first - started), 2),
        "tokens_per_s": round(num_tokens / (last - first), 2) if last > first else 0.0,
    }


def measure_mlx_lm(config: Config, batches: Sequence[Prompts], max_tokens: int) -> dict[str, Any]:
    """Rates of each batch after one that isn't timed, operations of steps, and the self-check's result.

    On this thread; nothing is left in memory. Raises ModelError.
    """
    blas.install(config.models.numerics)
    here, files = device.current(), model_files(config)
    model = load_weights(files).model
    precision = set_precision(model, config.models.dtype, here.kind, here.memory_bytes)
    logits = model(mx.array([[0]]))
    _generate(model, batches[0], 2)
    found: dict[str, Any] = {
        "weights": precision,
        "rates": {str(len(batch)): _generate(model, batch, max_tokens) for batch in batches},
        "operations_of_a_step": {"mlx-lm, 1 row": _operations(model)},
    }
    activations = device.dtype_name(logits.dtype)
    checked = check(model, Kernels(config.models.numerics, here.kind), logits.shape[-1], activations)
    found["operations_of_a_step"] |= {
        f"headrace, {name}": _packed_operations(checked.packed, num_rows)
        for num_rows, name in ((1, "1 row"), (8, "8 rows"))
    }
    found["layers"] = [*checked.packed.layer_lines, *checked.lowered]
    found["self_check"] = str(checked.margin)
    found["activations"] = activations
    found["peak_bytes"] = mx.get_peak_memory()
    return found


def _generate(model: Any, batch: Prompts, max_tokens: int) -> dict[str, float]:
    """By the generator that mlx-lm's server uses, which also wires what Metal allows."""
    generator = BatchGenerator(model, max_tokens=max_tokens)
    events: list[Event] = []
    started = time.perf_counter()
    generator.insert([list(prompt) for prompt in batch])
    while responses := generator.next_generated():
        now = time.perf_counter()
        events += [(now, each.uid, 1) for each in responses]
        if now - started > LONGEST_S:
            break
    generator.close()
    return rates(started, events, sum(map(len, batch)))


def _operations(model: Any) -> int:
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([list(range(_CONTEXT))]), cache=cache))
    for _ in range(2):
        logits = model(mx.array([[1]]), cache=cache)
        leaves: Any = tree_flatten([one.state for one in cache])
        graph = [mx.argmax(logits[:, -1], axis=-1), *(leaf for _, leaf in leaves if isinstance(leaf, mx.array))]
        number = metal_launches(graph)
        mx.eval(graph)
    return number


def _packed_operations(packed: PackedModel, num_rows: int) -> int:
    pool, number = StatePool(has_batches=packed.kernels.attends_in_batches), 0
    states = [SequenceState(pool, 2 * _CONTEXT) for _ in range(num_rows)]
    for tokens in (range(_CONTEXT), (1,), (1,)):
        rows = [Row(state, tuple(tokens)) for state in states]
        for state in states:
            state.begin(len(tokens))
        picks = [end - 1 for end in accumulate(len(tokens) for _ in rows)]
        graph = [mx.argmax(packed.graph(rows, picks), axis=-1), *packed.unevaluated(rows)]
        number = metal_launches(graph)
        mx.eval(graph)
        for state in states:
            state.commit(len(tokens))
    return number
