"""`python -m benchmarks.rank`: one of the processes that `benchmarks.ranks` measures. Its plan comes on standard input.

Prints a line of JSON for each thing that is known. All ranks make the same steps with the same numbers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np

from benchmarks.figures import Figure
from benchmarks.model import ModelPlan, figures_of
from benchmarks.processes import read_given, say
from benchmarks.shapes import config_of, planned_model, random_model
from benchmarks.steps import OurSteps
from headrace.backend.device import device_kind
from headrace.backend.kernels import Kernels
from headrace.engine.prepare import PREFILL_CHUNK
from headrace.models.levels import choose_levels
from headrace.models.packed import PackedModel
from headrace.models.sharding import shard
from headrace.models.source import ModelFiles
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool

SAMPLE_TOKENS = 64
"""Of a prompt whose likeliest tokens are compared."""


def main() -> None:
    given, group = read_given()
    found = given["plan"]
    plan = ModelPlan(**{**found, "decode": tuple(tuple(each) for each in found["decode"])})
    started = time.perf_counter()
    config = config_of(plan.shape, plan.num_layers)
    model = _model(plan, config, group)
    packed = PackedModel(model, choose_levels(model), Kernels("fast", device_kind()))
    say(weights_bytes=mx.get_active_memory(), layers=packed.layer_lines, seconds=time.perf_counter() - started)
    say(likeliest=_likeliest(packed, config["vocab_size"]))
    peak_bytes = 0
    for figure in _figures(packed, plan, config["vocab_size"]):
        peak_bytes = max(peak_bytes, figure.peak_bytes)
        _say_figure(figure)
    say(peak_bytes=peak_bytes)
    packed.restore()
    if group is not None:
        with _no_sums():
            # anew, so that steps are compiled without them
            packed = PackedModel(model, choose_levels(model), Kernels("fast", device_kind()))
            for figure in _figures(packed, plan, config["vocab_size"]):
                _say_figure(figure, without_sums=True)


def _model(plan: ModelPlan, config: dict[str, Any], group: mx.distributed.Group | None) -> Any:
    """With the same weights on every number of ranks."""
    mx.random.seed(0)
    if group is None:
        return random_model(config, dtype=plan.dtype, bits=plan.bits)
    model = planned_model(config, dtype=plan.dtype, bits=plan.bits)
    shard(model, ModelFiles(plan.shape, Path(), config, config, {}), group)
    return model


def _likeliest(packed: PackedModel, vocab_size: int) -> Any:
    """The likeliest token after each of a prompt's, its logit, and how far the next one's is below it."""
    prompt = np.random.default_rng(1).integers(0, vocab_size, SAMPLE_TOKENS).tolist()
    state = SequenceState(StatePool(has_batches=packed.kernels.attends_in_batches), SAMPLE_TOKENS)
    logits = np.array(packed.compute(state, prompt))
    state.release()
    second, first = np.sort(logits, axis=-1)[:, -2:].T
    return np.stack([logits.argmax(axis=-1), first, first - second], axis=-1).tolist()


def _figures(packed: PackedModel, plan: ModelPlan, vocab_size: int) -> Iterator[Figure]:
    steps = OurSteps(packed, vocab_size, PREFILL_CHUNK[device_kind()], runs_ahead=packed.launches_ahead)
    return (figure for figure, *_ in figures_of(steps, plan))


@contextmanager
def _no_sums() -> Iterator[None]:
    """The ranks don't wait for each other, so that the difference is what their sums take. The numbers are wrong."""
    with patch.object(mx.distributed, "all_sum", lambda x, group: x):
        yield


def _say_figure(figure: Figure, *, without_sums: bool = False) -> None:
    say(
        measure=figure.measure,
        times_s=figure.times_s,
        num_tokens=figure.num_tokens,
        num_launches=figure.num_launches,
        host_s=None if figure.host is None else figure.host.seconds,
        without_sums=without_sums,
    )


if __name__ == "__main__":
    main()
