"""Levels are chosen by class; what is put on one model touches nothing else and comes off without a trace."""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from models import tiny

from headrace.backend import blas
from headrace.backend.kernels import Kernels
from headrace.models.levels import Level, choose_levels, mixers_of, windows_of
from headrace.models.packed import PackedModel
from headrace.models.patches import TappedNorm
from headrace.models.step import Row
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool

KERNELS = Kernels("exact", "cpu")
EVERY_LEVEL = [
    "llama",
    "ministral3",
    "gemma4_text",
    "qwen3_5",
    "qwen3_next",
    "lfm2",
    "deepseek_v3",
    "falcon_h1",
    "dbrx",
]


@pytest.fixture(autouse=True)
def stock_blas() -> None:
    blas.install("exact")


def install(model: Any) -> PackedModel:
    return PackedModel(model, choose_levels(model), KERNELS)


def names_and_levels(name: str) -> dict[str, Level]:
    return {one.__name__: level for one, level in choose_levels(tiny.build(name)).items()}


def snapshot(model: Any) -> dict[str, Any]:
    """Identities of all that a replacement could change: classes, forwards, globals of mlx-lm's and mlx's modules."""
    classes = {path: type(module) for path, module in model.named_modules()}
    forwards = {one: one.__dict__.get("__call__") for one in classes.values()}
    files = {one.__module__ for one in classes.values()} | {"mlx_lm.models.base", "mlx_lm.models.cache"}
    names = {file: dict(vars(sys.modules[file])) for file in files}
    return {"classes": classes, "forwards": forwards, "names": names}


def unchanged(before: dict[str, Any]) -> bool:
    forwards = all(one.__dict__.get("__call__") is call for one, call in before["forwards"].items())
    names = all(
        vars(sys.modules[file]).keys() == stored.keys()
        and all(vars(sys.modules[file])[name] is value for name, value in stored.items())
        for file, stored in before["names"].items()
    )
    return forwards and names


def run_a_step(packed: PackedModel, picks: list[int] | None = None) -> mx.array:
    pool = StatePool()
    rows = []
    for ids in (tiny.PROMPT[:5], tiny.PROMPT[5:8]):
        state = SequenceState(pool)
        state.begin(len(ids))
        rows.append(Row(state, ids))
    logits = packed.forward(rows, range(8) if picks is None else picks)
    mx.eval(logits)
    return logits


# What is chosen


@pytest.mark.parametrize(
    ("name", "levels"),
    [
        ("llama", {"Attention": Level.ADAPTER}),
        ("gpt_oss", {"AttentionBlock": Level.ADAPTER}),
        ("qwen3_next", {"Qwen3NextGatedDeltaNet": Level.PACKED, "Qwen3NextAttention": Level.ADAPTER}),
        ("qwen3_5", {"GatedDeltaNet": Level.PACKED, "Qwen3NextAttention": Level.ADAPTER}),
        ("lfm2", {"ShortConv": Level.ROWS, "Attention": Level.ADAPTER}),
        # latent attention computes with what its cache gives back
        ("deepseek_v3", {"DeepseekV3Attention": Level.ROWS}),
        ("kimi_linear", {"KimiDeltaAttention": Level.ROWS, "KimiMLAAttention": Level.ROWS}),
        # two mixers in each layer
        ("falcon_h1", {"FalconH1Mixer": Level.ROWS, "FalconH1Attention": Level.ADAPTER}),
        # soft-capped scores never meet the one known name
        ("gemma2", {"Attention": Level.ROWS}),
        ("mamba2", {"Mamba2Block": Level.ROWS}),
    ],
)
def test_each_class_gets_the_best_level_that_its_forward_allows(name: str, levels: dict[str, Level]) -> None:
    assert names_and_levels(name) == levels


def scaled_dot_product_attention(*arguments: Any, **options: Any) -> mx.array:
    """Stands for mlx-lm's function where the forwards below name it."""
    raise NotImplementedError


class Plain(nn.Module):
    def __call__(self, x: mx.array, mask: Any, cache: Any = None) -> mx.array:
        x = x + cache.offset
        keys, values = cache.update_and_fetch(x, x)
        return scaled_dot_product_attention(x, keys, values, cache=cache, scale=keys.shape[-1], mask=mask)


class ReadsKeys(nn.Module):
    def __call__(self, x: mx.array, mask: Any, cache: Any = None) -> mx.array:
        keys, values = cache.update_and_fetch(x, x)
        keys = keys.swapaxes(0, 1)
        return scaled_dot_product_attention(x, keys, values, cache=cache, scale=1.0, mask=mask)


class ReadsState(nn.Module):
    def __call__(self, x: mx.array, mask: Any, cache: Any = None) -> mx.array:
        keys, values = cache.update_and_fetch(x, x)
        if cache.keys is not None:
            x = x + 1
        return scaled_dot_product_attention(x, keys, values, cache=cache, scale=1.0, mask=mask)


class ReadsByIndex(nn.Module):
    def __call__(self, x: mx.array, mask: Any, cache: Any = None) -> mx.array:
        keys, values = cache.update_and_fetch(x, cache[0])
        return scaled_dot_product_attention(x, keys, values, cache=cache, scale=1.0, mask=mask)


class AttendsByItself(nn.Module):
    def __call__(self, x: mx.array, mask: Any, cache: Any = None) -> mx.array:
        keys, values = cache.update_and_fetch(x, x)
        return mx.softmax(x @ keys) @ values


class AttendsOnly(nn.Module):
    def __call__(self, x: mx.array, mask: Any, cache: Any = None) -> mx.array:
        return scaled_dot_product_attention(x, x, x, cache=cache, scale=1.0, mask=mask)


class HandsOn(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(4)
        self.inner = inner

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        h: mx.array = self.inner(self.norm(x), mask, cache=cache)
        return x + h


class LooksInsideAndHandsOn(HandsOn):
    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        h: mx.array = self.inner(self.norm(x), mask, cache)
        return x + h if cache is None else x + h * cache.offset


class HandsCacheToItsSuperclass(Plain):
    def __call__(self, x: mx.array, mask: Any, cache: Any = None) -> mx.array:
        return super().__call__(x, mask, cache) * 2


class IgnoresCache(nn.Module):
    def __call__(self, x: mx.array, cache: Any = None) -> mx.array:
        return x


class Layers(nn.Module):
    """A model as far as `mixers_of` looks: a list of layers."""

    def __init__(self, *mixers: nn.Module) -> None:
        super().__init__()
        self.layers = [HandsOn(mixer) for mixer in mixers]


@pytest.mark.parametrize(
    ("mixer_class", "level"),
    [
        (Plain, Level.ADAPTER),
        (ReadsKeys, Level.ROWS),
        (ReadsState, Level.ROWS),
        (ReadsByIndex, Level.ROWS),
        (AttendsByItself, Level.ROWS),
        (AttendsOnly, Level.ROWS),
        (HandsCacheToItsSuperclass, Level.ROWS),
        (IgnoresCache, Level.ROWS),
    ],
)
def test_an_adapter_needs_the_plain_protocol_and_nothing_else(mixer_class: type[nn.Module], level: Level) -> None:
    assert choose_levels(Layers(mixer_class())) == {mixer_class: level}


def test_classes_that_only_hand_the_cache_on_are_walked_through() -> None:
    deep = Plain()
    model = Layers(HandsOn(HandsOn(deep)), LooksInsideAndHandsOn(Plain()))
    first, second = mixers_of(model)
    assert first.module is deep and first.name == "inner" and first.parent is model.layers[0].inner.inner
    assert type(second.module) is LooksInsideAndHandsOn


def test_mlx_lms_own_wrapper_around_attention_is_walked_through() -> None:
    model = tiny.build("dbrx")
    places = mixers_of(model)
    assert [place.module for place in places] == [layer.norm_attn_norm.attn for layer in model.layers]
    assert {type(place.parent).__name__ for place in places} == {"NormAttnNorm"}


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("llama", (None, None, None)),
        ("gpt_oss", (8, None, 8, None)),
        # layers that share keys have no own cache
        ("gemma4_text", (8, 8, None, 8)),
        ("falcon_h1", ((None, None),) * 3),
    ],
)
def test_windows_are_read_off_the_caches_that_the_model_makes(name: str, windows: tuple[Any, ...]) -> None:
    assert windows_of(tiny.build(name)) == windows


# What is put in, and taken off again


@pytest.mark.parametrize("name", EVERY_LEVEL)
def test_classes_modules_and_other_models_stay_untouched(name: str) -> None:
    model, other = tiny.build(name), tiny.build(name)
    before, expected = snapshot(model), tiny.reference(other, tiny.PROMPT)
    packed = install(model)
    run_a_step(packed)
    assert unchanged(before)
    assert {path: type(module) for path, module in other.named_modules()} == before["classes"]
    assert mx.array_equal(tiny.reference(other, tiny.PROMPT), expected)
    # and a second installation does not see the first
    assert mx.array_equal(run_a_step(install(other)), run_a_step(packed))


@pytest.mark.parametrize("name", EVERY_LEVEL)
def test_undo_gives_the_untouched_model_back(name: str) -> None:
    model = tiny.build(name)
    before, weights = snapshot(model), tiny.parameters(model)
    modules = dict(model.named_modules())
    expected = tiny.reference(model, tiny.PROMPT)
    packed = install(model)
    run_a_step(packed)
    assert {path: type(module) for path, module in model.named_modules()} != before["classes"]
    packed.restore()
    after = dict(model.named_modules())
    assert after.keys() == modules.keys()
    assert all(after[path] is module and type(module) is before["classes"][path] for path, module in modules.items())
    assert tiny.parameters(model).keys() == weights.keys()
    assert all(one is weights[path] for path, one in tiny.parameters(model).items())
    assert mx.array_equal(tiny.reference(model, tiny.PROMPT), expected)
    assert unchanged(before)


@pytest.mark.parametrize("name", ["llama", "ministral3", "gemma4_text", "gpt_oss", "minimax"])
def test_adapters_leave_the_parameter_tree_alone_but_for_the_final_norms_wrapper(name: str) -> None:
    model = tiny.build(name)
    before = tiny.parameters(model)
    install(model)
    after = tiny.parameters(model)
    moved = {path for path in before if path not in after}
    assert len(moved) == 1
    assert {path.replace(".norm.norm.", ".norm.") for path in after} == before.keys()
    assert all(after[path] is before[path] for path in before.keys() - moved)


@pytest.mark.parametrize("name", [name for name in EVERY_LEVEL if name != "dbrx"])
def test_only_the_picked_rows_reach_the_head(name: str) -> None:
    model = tiny.build(name)
    packed = install(model)
    every = run_a_step(packed)
    assert every.shape[0] == 8
    seen: list[int] = []
    head = next(module for path, module in model.named_modules() if path.endswith(("lm_head", "embed_tokens", "wte")))
    spy_on(head, seen)
    assert mx.array_equal(run_a_step(packed, [2, 7]), every[[2, 7]])
    assert seen[-1] == 2


def spy_on(head: nn.Module, seen: list[int]) -> None:
    """Note how many tokens a head, or an embedding that serves as one, is given."""
    kind: Any = type(head)

    def noted(method: Any) -> Any:
        def call(self: nn.Module, x: mx.array) -> mx.array:
            seen.append(x.shape[1])
            result: mx.array = method(self, x)
            return result

        return call

    method = "as_linear" if hasattr(kind, "as_linear") else "__call__"
    head.__class__ = type(kind.__name__, (kind,), {method: noted(getattr(kind, method))})


def test_a_final_norm_without_weights_is_found_although_it_is_false_as_a_value() -> None:
    model: Any = tiny.build("llama")
    model.model.norm = nn.LayerNorm(64, affine=False)
    assert not model.model.norm
    expected = tiny.reference(model, tiny.PROMPT[:5])
    packed = install(model)
    assert isinstance(model.model.norm, TappedNorm)
    assert mx.array_equal(run_a_step(packed, [4]), expected[4:])


def test_a_model_without_a_known_final_norm_still_gives_the_picked_rows() -> None:
    # dbrx keeps its layers under another name
    model = tiny.build("dbrx")
    packed = install(model)
    assert not any(isinstance(module, TappedNorm) for _, module in model.named_modules())
    expected = tiny.reference(tiny.build("dbrx"), tiny.PROMPT[:5])
    assert mx.array_equal(run_a_step(packed, [0, 4]), expected[[0, 4]])


def test_at_the_last_level_nothing_is_put_in() -> None:
    model = tiny.build("llama")
    before = snapshot(model)
    packed = PackedModel(model, {nn.Module: Level.WHOLE}, KERNELS)
    assert {path: type(module) for path, module in model.named_modules()} == before["classes"]
    expected = tiny.reference(model, tiny.PROMPT[:5])
    assert mx.array_equal(run_a_step(packed, [1, 4]), expected[[1, 4]])
    assert len(tree_flatten(model.parameters())) == len(tiny.parameters(model))


@pytest.mark.cpu_forms("where steps overlap")
@pytest.mark.parametrize(
    ("name", "device", "launches_ahead"),
    [("qwen3_5", "metal", True), ("gpt_oss", "cuda", True), ("qwen3_5", "cpu", False), ("lfm2", "metal", False)],
)
def test_steps_are_launched_ahead_on_gpus_where_no_module_keeps_its_own_cache(
    name: str, device: str, launches_ahead: bool
) -> None:
    model = tiny.build(name)
    packed = PackedModel(model, choose_levels(model), Kernels("fast", device))
    assert packed.launches_ahead is launches_ahead
