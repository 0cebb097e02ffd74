"""A model that serves gives the untouched model's logits: the check finds what reading its source can't."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama
from mlx_lm.models.base import scaled_dot_product_attention
from models import tiny, tiny_fused
from models.mixed_steps import MixedSteps

from headrace.backend import blas
from headrace.backend.cuda import delta
from headrace.backend.cuda.shapes import MANY_TOKENS, Prepared
from headrace.backend.kernels import Kernels
from headrace.errors import ModelError
from headrace.models.levels import Level, choose_levels
from headrace.models.mixers.cuda_attention import CudaAttentionMixer
from headrace.models.packed import PackedModel
from headrace.models.selfcheck import LENGTH, TOLERANCE, WITHOUT_KERNELS, Checked, Margin, check, compare, run_reference
from headrace.models.step import Row

VOCAB_SIZE = 160
WHOLE_NOTE = "no packed form agrees with the untouched model: it runs a row at a time"
CUT_NOTE = "the model's own results depend on how its input is cut"


@pytest.fixture(autouse=True)
def stock_blas() -> None:
    blas.install("exact")


def heads(attention: Any, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values of a llama, `[1, num_heads, T, head_dim]`."""
    parts = ((attention.q_proj, attention.n_heads), (attention.k_proj, attention.n_kv_heads))
    split = (*parts, (attention.v_proj, attention.n_kv_heads))
    q, k, v = (layer(x).reshape(1, x.shape[1], count, -1).transpose(0, 2, 1, 3) for layer, count in split)
    return q, k, v


class CountsFromOneOffset(llama.Attention):
    """Right for a run of tokens that starts at `cache.offset`; packed, it is given all positions and counts again.

    By its source it fits the adapters, shapes and types fit, decoding one row is right: only results tell.
    """

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        q, k, v = heads(self, x)
        offset = cache.offset if cache is not None else 0
        q = self.rope(q, offset=offset)
        k = self.rope(k, offset=offset)
        position = (offset + mx.arange(x.shape[1]))[:, None]
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        q = q * (1 + 0.1 * position)
        y = scaled_dot_product_attention(q, k, v, cache=cache, scale=self.scale, mask=mask)
        return self.o_proj(y.transpose(0, 2, 1, 3).reshape(x.shape))


class KnowsItsNumberOfTokens(llama.Attention):
    """Depends on how many tokens come at once, alone or packed."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        y = llama.Attention.__call__(self, x, mask, cache)
        return y * (1 + 0.2 * x.shape[1])


class NotANumberForSeveral(llama.Attention):
    """NaN as soon as two tokens come at once."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        y = llama.Attention.__call__(self, x, mask, cache)
        return y + mx.log(mx.array(1.5 - x.shape[1])) * 0


class NeedsAnIntegerOffset(llama.Attention):
    """Python arithmetic with the offset: raises for an array of positions."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        q, k, v = heads(self, x)
        offset = cache.offset if cache is not None else 0
        start = list(range(offset, offset + 1))[0]
        q, k = self.rope(q, offset=start), self.rope(k, offset=start)
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        y = scaled_dot_product_attention(q, k, v, cache=cache, scale=self.scale, mask=mask)
        return self.o_proj(y.transpose(0, 2, 1, 3).reshape(x.shape))


class RunsOutOfPatience(llama.Attention):
    """Raises whenever several tokens come at once."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if x.shape[1] > 1:
            raise ValueError("one at a time")
        y: mx.array = llama.Attention.__call__(self, x, mask, cache)
        return y


def llama_with(attention: type[nn.Module], *layers: int) -> nn.Module:
    """A tiny llama whose attention has another class, in the layers of these numbers or in all."""
    model: Any = tiny.build("llama")
    for number, layer in enumerate(model.layers):
        if not layers or number in layers:
            layer.self_attn.__class__ = attention
    return model


def checked(model: nn.Module, numerics: str = "exact") -> Checked:
    return check(model, Kernels(numerics, "cpu"), VOCAB_SIZE, "float32")


def equals_untouched(result: Checked, untouched: nn.Module) -> bool:
    rows = [tiny.PROMPT, tiny.PROMPT[::-1]]
    got = MixedSteps(result.packed, rows, VOCAB_SIZE).run()
    pairs = zip(got, (tiny.reference(untouched, row) for row in rows), strict=True)
    return all(bool(mx.array_equal(one, other)) for one, other in pairs)


def test_a_fitting_model_keeps_its_levels_and_has_no_notes() -> None:
    result = checked(tiny.build("qwen3_5"))
    assert set(result.packed.levels.values()) == {Level.ADAPTER, Level.PACKED}
    assert result.lowered == ()
    assert result.margin is not None and result.margin.difference == 0.0
    assert equals_untouched(result, tiny.build("qwen3_5"))


def test_a_class_that_is_silently_wrong_when_packed_drops_to_rows() -> None:
    model = llama_with(CountsFromOneOffset)
    assert choose_levels(model) == {CountsFromOneOffset: Level.ADAPTER}
    result = checked(model)
    assert result.packed.levels == {CountsFromOneOffset: Level.ROWS}
    assert result.lowered == ("CountsFromOneOffset differs as adapter: row by row instead",)
    assert result.margin is not None and result.margin.difference == 0.0
    assert equals_untouched(result, llama_with(CountsFromOneOffset))


@pytest.mark.parametrize("layers", [(0,), (1,), (2,)])
def test_only_the_class_that_differs_drops(layers: tuple[int, ...]) -> None:
    result = checked(llama_with(CountsFromOneOffset, *layers))
    assert result.packed.levels == {CountsFromOneOffset: Level.ROWS, llama.Attention: Level.ADAPTER}
    assert len(result.lowered) == 1
    assert equals_untouched(result, llama_with(CountsFromOneOffset, *layers))


def test_two_classes_that_differ_drop_together() -> None:
    class Likewise(CountsFromOneOffset):
        pass

    model: Any = llama_with(CountsFromOneOffset, 0)
    model.layers[2].self_attn.__class__ = Likewise
    result = checked(model)
    assert result.packed.levels[CountsFromOneOffset] is result.packed.levels[Likewise] is Level.ROWS
    assert "Likewise differs as adapter: row by row instead" in result.lowered


def test_a_step_that_raises_drops_too(caplog: pytest.LogCaptureFixture) -> None:
    model = llama_with(NeedsAnIntegerOffset, 1)
    with caplog.at_level(logging.INFO):
        result = checked(model)
    assert result.packed.levels == {NeedsAnIntegerOffset: Level.ROWS, llama.Attention: Level.ADAPTER}
    assert result.lowered == ("NeedsAnIntegerOffset differs as adapter: row by row instead",)
    assert equals_untouched(result, llama_with(NeedsAnIntegerOffset, 1))
    lines = [line.partition(": a step raised ") for line in caplog.messages]
    assert [(before, after[:9]) for before, _, after in lines if after] == [
        ("chosen levels", "TypeError"),
        ("Attention differs as adapter: row by row instead", "TypeError"),
    ]


@pytest.mark.parametrize("attention", [KnowsItsNumberOfTokens, NotANumberForSeveral])
def test_a_model_that_differs_at_every_level_is_served_whole_and_it_is_said(attention: type[nn.Module]) -> None:
    model = llama_with(attention)
    result = checked(model, "fast")
    assert set(result.packed.levels.values()) == {Level.WHOLE}
    assert result.lowered == (WHOLE_NOTE, CUT_NOTE)
    assert result.margin is not None and not result.margin.within("float32")
    assert all(type(layer.self_attn) is attention for layer in model.layers)


@pytest.mark.parametrize("attention", [KnowsItsNumberOfTokens, NotANumberForSeveral, RunsOutOfPatience])
def test_in_exact_numerics_the_same_model_goes_token_by_token_and_agrees(attention: type[nn.Module]) -> None:
    result = checked(llama_with(attention))
    assert set(result.packed.levels.values()) == {Level.ROWS}
    assert equals_untouched(result, llama_with(attention))


def test_a_model_that_raises_at_every_level_is_an_error_and_left_untouched() -> None:
    model = llama_with(RunsOutOfPatience)
    with pytest.raises(ModelError, match=r"the model can't be run: .*ValueError: one at a time") as told:
        checked(model, "fast")
    cause: BaseException | None = told.value
    while cause is not None and not isinstance(cause, ValueError):
        cause = cause.__cause__
    assert cause is not None, "its traceback is not told"
    assert all(type(layer.self_attn) is RunsOutOfPatience for layer in model.layers)


def test_a_model_without_mixers_that_can_be_found_runs_whole() -> None:
    # its layers call an attention that sits in a container without a forward
    result = checked(tiny.build("exaone"))
    assert equals_untouched(result, tiny.build("exaone"))


def test_differences_are_measured_against_the_largest_logit() -> None:
    assert Margin(TOLERANCE["float32"] * 20, 20.0).within("float32")
    assert not Margin(TOLERANCE["float32"] * 20.1, 20.0).within("float32")
    # small logits don't make small differences worse
    assert Margin(TOLERANCE["float32"], 0.01).within("float32")
    assert TOLERANCE["float32"] < TOLERANCE["float16"] < TOLERANCE["bfloat16"]
    assert str(Margin(0.00123, 17.04)) == "largest difference 1.2e-03 at logits up to 17.0"


def test_a_model_that_differs_by_the_cut_may_differ_by_twice_that_up_to_four_tolerances() -> None:
    most = 20 * TOLERANCE["bfloat16"]
    assert Margin(1.9 * most, 20.0, noise=most).within("bfloat16")
    assert not Margin(2.1 * most, 20.0, noise=most).within("bfloat16")
    assert not Margin(4.1 * most, 20.0, noise=10 * most).within("bfloat16")
    # little noise narrows nothing
    assert Margin(most, 20.0, noise=0.1 * most).within("bfloat16")


@pytest.mark.parametrize("difference", [float("nan"), float("inf")])
@pytest.mark.parametrize("scale", [1.0, float("inf"), float("nan")])
def test_what_is_no_number_is_never_within(difference: float, scale: float) -> None:
    assert not Margin(difference, scale).within("float32")


def test_the_reference_is_the_untouched_model_token_by_token() -> None:
    model = tiny.build("qwen3")
    reference = run_reference(model, VOCAB_SIZE)
    assert len(reference.rows) == len(reference.logits) == 2
    assert reference.rows[0] != reference.rows[1]
    for row, logits in zip(reference.rows, reference.logits, strict=True):
        assert len(row) == LENGTH
        assert mx.array_equal(logits, tiny.reference(model, row))


@tiny_fused.only_operations
@pytest.mark.parametrize("part", ["_attend", "_chunk"])
def test_kernels_that_differ_are_not_used_and_that_is_told(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is those for a few tokens or what stands beside them in longer chunks."""
    model = tiny.build(tiny_fused.widen("qwen3", monkeypatch))
    assert not check(model, tiny_fused.KERNELS, VOCAB_SIZE, "float32").lowered
    right = getattr(CudaAttentionMixer, part)
    monkeypatch.setattr(CudaAttentionMixer, part, lambda *args: 1.1 * right(*args))
    model = tiny.build("qwen3_wide")
    result = check(model, tiny_fused.KERNELS, VOCAB_SIZE, "float32")
    assert result.lowered == (WITHOUT_KERNELS,)
    assert not result.packed.kernels.fuses_layers
    assert set(result.packed.levels.values()) == {Level.ADAPTER}


@tiny_fused.only_operations
@pytest.mark.parametrize("is_wrong_for_many", [True, False])
def test_what_kernels_do_with_many_tokens_and_with_few_is_checked(
    is_wrong_for_many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = delta.scan_chunks

    def wrong(plan: mx.array, stops: mx.array, tokens: Prepared, *others: Any, **options: Any) -> Any:
        y, states = right(plan, stops, tokens, *others, **options)
        return (-y if (len(y) >= MANY_TOKENS) == is_wrong_for_many else y), states

    model = tiny.build(tiny_fused.widen("qwen3_5", monkeypatch))
    assert not check(model, tiny_fused.KERNELS, VOCAB_SIZE, "float32").lowered
    monkeypatch.setattr(delta, "scan_chunks", wrong)
    model = tiny.build("qwen3_5_wide")
    assert WITHOUT_KERNELS in check(model, tiny_fused.KERNELS, VOCAB_SIZE, "float32").lowered


@tiny_fused.only_operations
@pytest.mark.parametrize(
    ("family", "off", "passes"),
    [
        ("qwen3", range(60, 61), False),
        ("qwen3_moe", range(5, 130, 10), True),
        ("qwen3_moe", [7, *range(5, 130, 10)], False),
        # parts of tiles
        ("qwen3_moe", range(2), False),
        ("qwen3_moe", range(-2, 0), False),
    ],
)
def test_a_tenth_of_a_chunks_tokens_may_go_to_other_experts(
    family: str, off: Sequence[int], passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.build(tiny_fused.widen(family, monkeypatch))
    reference = run_reference(model, VOCAB_SIZE, has_chunks=True)
    packed = PackedModel(model, choose_levels(model), tiny_fused.KERNELS)
    forward = packed.forward

    def reroute(rows: Sequence[Row], picks: Sequence[int]) -> mx.array:
        logits = forward(rows, picks)
        if len(picks) > MANY_TOKENS:
            logits[mx.array(list(off))] += 9.0
        return logits

    monkeypatch.setattr(packed, "forward", reroute)
    assert compare(packed, reference).within("float32") is passes


@tiny_fused.only_operations
def test_nan_fails_also_with_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build(tiny_fused.widen("qwen3_moe", monkeypatch))
    reference = run_reference(model, VOCAB_SIZE, has_chunks=True)
    packed = PackedModel(model, choose_levels(model), tiny_fused.KERNELS)
    forward = packed.forward

    def fail(rows: Sequence[Row], picks: Sequence[int]) -> mx.array:
        return mx.where((mx.arange(len(picks)) < len(picks) - 1)[:, None], forward(rows, picks), mx.nan)

    monkeypatch.setattr(packed, "forward", fail)
    assert not compare(packed, reference).within("float32")
