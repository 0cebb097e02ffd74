"""No step waits for the device half-way, in the forms that it has on Metal. Not run on Metal."""

from __future__ import annotations

from collections.abc import Callable

import metal_forms
import pytest

from benchmarks.shapes import config_of, random_model
from headrace.backend import gated_delta
from headrace.backend.kernels import Kernels
from headrace.backend.operations import operations
from headrace.models.levels import choose_levels
from headrace.models.packed import PackedModel
from headrace.models.step import Row
from headrace.sampling.rows import SamplingRow
from headrace.sampling.sampler import sample
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool
from headrace.types.request import SamplingParams

NUM_LINEARS = {"tiny-qwen3": 2 * 7 + 1, "tiny-qwen3.5": 3 * 8 + 7 + 1}
"""Of attention four, of a delta net five, of an MLP three, and the head: products of a matrix and an activation."""

DRAWS = {
    "greedy": SamplingParams(temperature=0, top_p=1, top_k=0, min_p=0, seed=0),
    "top_p": SamplingParams(temperature=0.7, top_p=0.9, top_k=0, min_p=0, seed=0),
    "top_k": SamplingParams(temperature=0.7, top_p=0.9, top_k=20, min_p=0, seed=0),
    "min_p": SamplingParams(temperature=0.7, top_p=1, top_k=0, min_p=0.05, seed=0),
}


@pytest.mark.parametrize("shape", NUM_LINEARS)
@pytest.mark.parametrize("draw", DRAWS)
def test_what_is_drawn_is_one_graph_from_the_token_ids_on(
    shape: str, draw: str, faked_mac: Callable[[int], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Had anything been read on the way, what comes before it would be computed already, and missing."""
    faked_mac(16)
    monkeypatch.setattr(gated_delta, "gated_delta_kernel", metal_forms.delta_kernel)
    model = random_model(config_of(shape), dtype="bfloat16", bits=4)
    packed = PackedModel(model, choose_levels(model), Kernels("fast", "metal"))
    pool = StatePool(has_batches=packed.kernels.attends_in_batches)
    rows = [Row(SequenceState(pool), (row,)) for row in range(3)]
    for row in rows:
        row.state.begin(1)
    drawn = sample(packed.graph(rows, range(3)), [SamplingRow(DRAWS[draw], 0)] * 3)
    assert operations([drawn])["QuantizedMatmul"] == NUM_LINEARS[shape]
