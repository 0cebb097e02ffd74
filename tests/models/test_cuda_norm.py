"""Norms that make the residual sums before them give what sums and norms give, and keep nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from models import tiny, tiny_fused

from headrace.backend import blas
from headrace.models.levels import choose_levels
from headrace.models.mixers import cuda_layers
from headrace.models.mixers.cuda_layers import FusedAddNorm
from headrace.models.packed import PackedModel
from headrace.models.patches import Restore, override_forward
from headrace.models.step import Row
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool

pytestmark = pytest.mark.gpu

IDS = (3, 1, 4, 1, 5)
TOLERANCE = 3e-4 if tiny_fused.DTYPE == "float32" else 0.5


@pytest.fixture(autouse=True)
def fast_blas() -> Iterator[None]:
    blas.install("fast")
    yield
    blas.uninstall()


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[mx.array]:
    """What norms make from here on."""
    made: list[mx.array] = []
    plain = cuda_layers.sum_norm

    def noted(*arguments: Any) -> tuple[mx.array, mx.array]:
        found = plain(*arguments)
        made.append(found[0])
        return found

    monkeypatch.setattr(cuda_layers, "sum_norm", noted)
    return made


def made_norm(dtype: mx.Dtype = mx.float32) -> FusedAddNorm:
    norm = nn.RMSNorm(6, eps=1e-3)
    norm.weight = mx.arange(1, 7).astype(dtype)
    return FusedAddNorm(norm)


X, Y = mx.random.normal((1, 3, 6), key=mx.random.key(0)), mx.random.normal((1, 3, 6), key=mx.random.key(1))


def test_the_norm_of_a_sum_is_made_with_it(sums: list[mx.array]) -> None:
    norm = made_norm()
    h = norm.sum(X, Y)
    assert mx.array_equal(h, X + Y) and h is sums[0]
    normed = norm(h)
    assert mx.allclose(normed, norm.norm(X + Y), atol=1e-5)
    assert len(sums) == 1


def test_what_else_has_become_of_a_sum_is_normed_itself() -> None:
    norm = made_norm()
    other = norm.sum(X, Y) + 1
    assert mx.array_equal(norm(other), norm.norm(X + Y + 1))


def test_nothing_is_kept_of_what_was_asked_for_or_was_not() -> None:
    norm = made_norm()
    for asked in (norm.sum(X, Y), X):
        norm.sum(X, Y)
        norm(asked)
        assert norm._made == ()
    assert not set(norm.parameters()) - {"norm"}


def test_sums_of_other_types_are_left_to_the_library(sums: list[mx.array]) -> None:
    norm, x = made_norm(), X.astype(mx.bfloat16)
    assert norm.sum(x, x).dtype == mx.bfloat16
    assert norm.sum(x, Y).dtype == mx.float32
    assert norm.sum(Y, x).dtype == mx.float32
    assert not sums


def test_a_traced_sum_leaves_no_tracer_behind() -> None:
    norm = made_norm()
    step = mx.compile(lambda x, y: norm(norm.sum(x, y)))
    for x, y in ((X, Y), (Y, Y)):
        assert mx.allclose(step(x, y), norm.norm(x + y), atol=1e-5)
    assert norm._made == ()


def logits_of(packed: PackedModel) -> mx.array:
    state = SequenceState(StatePool())
    state.begin(len(IDS))
    return packed.forward([Row(state, IDS)], range(len(IDS)))


def packed_model(model: Any) -> PackedModel:
    return PackedModel(model, choose_levels(model), tiny_fused.KERNELS)


@pytest.mark.parametrize(("name", "each"), [("qwen3", 2), ("qwen3_5", 2), ("qwen3_5_moe", 1), ("gemma", 0)])
def test_every_sum_that_no_product_makes_is_made_by_the_norm_behind_it(
    name: str, each: int, sums: list[mx.array], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Across layers, too; experts add what they get, and other layers do it themselves."""
    model: Any = tiny_fused.build(tiny_fused.widen(name, monkeypatch))
    packed = packed_model(model)
    mx.eval(logits_of(packed))
    assert len(sums) == each * len(model.layers)
    norms = [module for _, module in model.named_modules() if isinstance(module, FusedAddNorm)]
    assert all(norm._made == () for norm in norms)
    packed.restore()
    assert not any(isinstance(module, FusedAddNorm) for _, module in model.named_modules())


def test_products_that_add_the_residual_leave_the_norm_behind_them_alone(
    sums: list[mx.array], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of quantised weights behind attention do; the MLP's have too few inputs for the kernel."""
    model: Any = tiny_fused.build(tiny_fused.widen("qwen3", monkeypatch))
    nn.quantize(model, 32, 4, class_predicate=lambda _, module: isinstance(module, nn.Linear))
    mx.eval(logits_of(packed_model(model)))
    assert len(sums) == len(model.layers)


def add_behind(layer: Any) -> Restore:
    """Let something be added to a layer's output, as parts of pictures are."""
    original = type(layer)

    def forward(module: Any, *given: Any, **named: Any) -> mx.array:
        output: mx.array = original.__call__(module, *given, **named)
        return output + mx.sin(mx.arange(output.shape[-1])).astype(output.dtype)

    return override_forward(layer, forward)


def test_what_comes_between_layers_is_normed(monkeypatch: pytest.MonkeyPatch) -> None:
    name = tiny_fused.widen("qwen3", monkeypatch)
    untouched: Any = tiny_fused.build(name)
    add_behind(untouched.layers[0])
    expected = tiny.reference(untouched, IDS)

    def off(*, adds: bool) -> float:
        model: Any = tiny_fused.build(name)
        packed = packed_model(model)
        if adds:  # before a step is compiled, which knows its layers
            add_behind(model.layers[0])
        return float(mx.abs(logits_of(packed) - expected).max())

    assert off(adds=True) < off(adds=False) / 4


@pytest.mark.parametrize("name", ["input_layernorm", "post_attention_layernorm"])
def test_norms_of_another_kind_stay_as_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(nn.RMSNorm):
        def __call__(self, x: mx.array) -> mx.array:
            return 2 * nn.RMSNorm.__call__(self, x)

    model: Any = tiny_fused.build(tiny_fused.widen("qwen3", monkeypatch))
    for layer in model.layers:
        layer[name].__class__ = Doubled
    expected = tiny.reference(model, IDS)
    packed = packed_model(model)
    assert all(type(layer[name]) is Doubled for layer in model.layers)
    assert mx.abs(logits_of(packed) - expected).max() < TOLERANCE
