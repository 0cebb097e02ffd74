"""How many operations a decode step's graph has, layer by layer: a ceiling.

On a CPU norms, ropes and attention are made of plain operations, on a GPU each is one. What is counted here is what the
layers are written in: one more there is one more everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from benchmarks.shapes import config_of, random_model
from benchmarks.steps import Forwards
from headrace.backend.cuda import kernel
from headrace.backend.cuda.kernel import CudaKernel
from headrace.backend.kernels import Kernels
from headrace.backend.operations import num_launches, operations
from headrace.models.levels import choose_levels
from headrace.models.packed import PackedModel
from headrace.sampling.rows import SamplingRow
from headrace.sampling.sampler import sample
from headrace.types.request import SamplingParams


def test_operations_are_counted_once_and_views_apart() -> None:
    a = mx.ones((4, 6))
    mx.eval(a)
    product = a @ a.T
    found = operations([product + product, mx.exp(product)])
    assert found == {"Transpose": 1, "Matmul": 1, "Add": 1, "Exp": 1}
    assert num_launches(found) == 3


def test_a_compiled_function_counts_as_often_as_it_is_called() -> None:
    compiled = mx.compile(lambda x: mx.exp(x) - mx.sin(x))
    x = mx.ones(4)
    mx.eval(x)
    assert num_launches(operations([compiled(compiled(compiled(x)))])) == 3


NORM = 7
"""Square, sum, mean, epsilon, root, and two products."""
ROPE = 17
"""Angles: two ranges, a cast, a product, an exponential, two more products, a cosine, a sine; then four products, a
difference, two sums, and the channels joined."""
MLP = 3 + 1
"""Matrices, and the activation with its product."""
RESIDUALS = 2

CONVOLUTION = 1 + 4 + 3 + 1 + 1
"""Context and tokens joined, four taps, their sum, the activation, the next context."""
SCAN = 1 + 1 + 2 + 3
"""Key and query joined, both read from the state, their product with each other, and the update."""
GATED_DELTA = 5 * NORM + MLP + RESIDUALS + 5 + 1 + 1 + CONVOLUTION + SCAN + 1
"""Five matrices, decay, beta and the gate, for any number of rows. Norms: of the layer two, and of q, k, output."""

OWN_OF_A_ROW = 2 + 1 + 2 + 1
"""Keys and values written, queries scaled, two products, softmax."""


def attention(num_rows: int) -> int:
    """Launches of a layer: four norms, four matrices, the output's gate; rows are joined behind what is each one's."""
    return 4 * NORM + MLP + RESIDUALS + 4 + 2 * ROPE + 2 + num_rows * OWN_OF_A_ROW + (num_rows > 1)


VIEWS_OF_GATED_DELTA = 104
VIEWS_OF_ATTENTION = {1: 81, 8: 151}
"""Reshapes, broadcasts, slices: they launch nothing, but the host makes them."""


def step_operations(interval: int, num_layers: int, num_rows: int) -> Counter[str]:
    config = {**config_of("tiny-qwen3.5"), "full_attention_interval": interval, "num_hidden_layers": num_layers}
    model = random_model(config, dtype="float32")
    packed = PackedModel(model, choose_levels(model), Kernels("fast", "cpu"))
    return Forwards(packed, range(16), range(num_rows), num_steps=4, chunk_tokens=16).count()


def of_layers(num_rows: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Launches and views of a layer with a gated delta net and of one with attention: two equations, two unknowns.

    What a step has besides its layers, and what all layers share, is in both models of a pair.
    """

    def counted(interval: int) -> tuple[int, int]:
        twice, once = (step_operations(interval, layers * interval, num_rows) for layers in (2, 1))
        launches = num_launches(twice) - num_launches(once)
        return launches, twice.total() - once.total() - launches

    of_four, of_two = counted(4), counted(2)
    gated, attention = [], []
    for four, two in zip(of_four, of_two, strict=True):
        assert (four - two) % 2 == 0
        gated.append((four - two) // 2)
        attention.append(two - (four - two) // 2)
    return tuple(gated), tuple(attention)  # type: ignore[return-value]


@pytest.mark.parametrize("num_rows", [1, 8])
def test_a_layer_has_no_more_operations_than_it_had(num_rows: int) -> None:
    of_gated_delta, of_attention = of_layers(num_rows)
    assert of_gated_delta[0] <= GATED_DELTA == 66
    assert of_attention[0] <= attention(num_rows) == {1: 80, 8: 123}[num_rows]
    assert of_gated_delta[1] <= VIEWS_OF_GATED_DELTA
    assert of_attention[1] <= VIEWS_OF_ATTENTION[num_rows]


def stand_in(
    kernel: CudaKernel,
    inputs: Sequence[mx.array],
    template: Any,
    blocks: Any,
    threads: int,
    outputs: Sequence[tuple[Any, mx.Dtype]],
) -> list[mx.array]:
    """In a graph a kernel is one operation that waits for its inputs; so is this, which computes nothing."""
    made = [mx.zeros(shape, dtype) for shape, dtype in outputs]
    mx.eval(made)
    return mx.depends(made, list(inputs))


def placed(scalars: Sequence[int], output_dtypes: Sequence[mx.Dtype], **others: Any) -> list[mx.array]:
    """What `to_device` launches, which has no inputs to wait for."""
    return [mx.array(scalars).view(output_dtypes[0])]


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with CUDA, but that nothing is computed."""
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(CudaKernel, "__call__", stand_in)
    monkeypatch.setattr(kernel, "largest_block", lambda: 99 * 1024)
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", placed)


KERNELS, NORMS = {None: 7, 4: 5}, {None: 0, 4: 2}
"""Of a layer, by the bits of its weights. Kernels: the mixer's, products before and behind it, the MLP's two, of which
one ends with its activation, and two norms with the residual sums before them. Products of quantised weights make the
sums, and leave the norms to the library."""
COMPILED_NORM = 4
"""A cast, a square, a sum, and the rest as one."""


def step_of_kernels(num_layers: int, num_rows: int, bits: int | None) -> Counter[str]:
    heads = {"head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
    model = random_model({**config_of("tiny-qwen3.5", num_layers), **heads}, bits=bits)
    packed = PackedModel(model, choose_levels(model), Kernels("fast", "cuda"))
    return Forwards(packed, range(16), range(num_rows), num_steps=4, chunk_tokens=16).count()


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("num_rows", [1, 8])
def test_a_layer_of_kernels_is_seven_launches_or_five_and_two_norms(num_rows: int, bits: int | None) -> None:
    four, eight = (step_of_kernels(num_layers, num_rows, bits) for num_layers in (4, 8))
    found = eight - four
    assert found["Depends"] == 4 * KERNELS[bits]
    others = num_launches(found) - found["Depends"]
    assert others <= 4 * NORMS[bits] * COMPILED_NORM


AROUND_LAYERS = 1 + COMPILED_NORM + 1 + 1
"""Embeddings, the last norm, the output matrix and the most likely ids: what is picked, all rows, costs nothing."""


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("num_rows", [1, 8])
def test_a_step_of_kernels_has_little_but_its_layers(num_rows: int) -> None:
    four, eight = (step_of_kernels(num_layers, num_rows, None) for num_layers in (4, 8))
    assert num_launches(four) - (num_launches(eight) - num_launches(four)) <= AROUND_LAYERS


@pytest.mark.usefixtures("stand_ins")
def test_a_greedy_draw_is_one_launch() -> None:
    row = SamplingRow(SamplingParams(temperature=0, top_p=1, top_k=0, min_p=0, seed=0), 0)
    logits = mx.ones((3, 100), mx.bfloat16)
    mx.eval(logits)
    assert num_launches(operations([sample(logits, [row] * 3)])) == 1
