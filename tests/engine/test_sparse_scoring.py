"""Importance is the formula of SpecPrefill, by a draft's queries and keys, within bounded memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import base
from mlx_lm.models.cache import make_prompt_cache
from models import tiny

from headrace.backend import blas
from headrace.backend.kernels import Kernels
from headrace.engine.sparse import scoring
from headrace.engine.sparse.scoring import importance, num_scoring_layers
from headrace.models.levels import choose_levels
from headrace.models.mixers.cuda_attention import CudaAttentionMixer
from headrace.models.packed import PackedModel
from headrace.models.selfcheck import check
from headrace.models.step import QueryRecorder, Row
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool

NUM_LOOKAHEAD = 8
POOL = 13
SCORING = {"glm4": 3, "gemma3_text": 2, "gpt_oss": 2, "qwen3_5": 1, "nemotron_h": 2}
OTHERS = {
    "llama": 3,
    "qwen3": 3,
    "minimax": 3,
    "phi3": 3,
    "smollm3": 4,
    "gemma4_text": 2,
    "qwen3_next": 1,
    "granitemoehybrid": 2,
    "falcon_h1": 3,
    "lfm2": 2,
}
"""Families with norms of queries and keys, partial, scaled or no rope, gates, sinks, windows, shared keys and recurrent
layers, and how many of their layers attend to all tokens."""


@pytest.fixture(autouse=True)
def stock_blas() -> None:
    blas.install("exact")


@dataclass
class Call:
    """What a layer has attended with: queries `[num_heads, n, head_dim]`, keys `[num_kv_heads, M, head_dim]`."""

    queries: np.ndarray
    keys: np.ndarray
    scale: float
    sinks: np.ndarray | None


def calls_of(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Filled with what the layers of an untouched model attend with; the files of mlx-lm that it needs are imported."""
    seen: list[Call] = []

    def attention(
        queries: mx.array, keys: mx.array, values: mx.array, cache: Any, scale: float, mask: Any, sinks: Any = None
    ) -> mx.array:
        arrays = [np.array(array[0], dtype=np.float64) for array in (queries, keys)]
        seen.append(Call(*arrays, scale, None if sinks is None else np.array(sinks, dtype=np.float64)))
        return base_attention(queries, keys, values, cache, scale, mask, sinks)

    base_attention = base.scaled_dot_product_attention
    for file in {type(module).__module__ for _, module in model.named_modules()}:
        if getattr(sys.modules[file], "scaled_dot_product_attention", None) is base_attention:
            monkeypatch.setattr(sys.modules[file], "scaled_dot_product_attention", attention)
    return seen


def softmax(scores: np.ndarray, sink: float | None) -> np.ndarray:
    every = scores if sink is None else np.append(scores, sink)
    weights = np.exp(every - every.max())
    return (weights / weights.sum())[: len(scores)]


def smooth(weights: np.ndarray) -> np.ndarray:
    reach = POOL // 2
    return np.array([weights[max(0, at - reach) : at + reach + 1].mean() for at in range(len(weights))])


def written_out(steps: Sequence[Sequence[Call]], num_prompt: int) -> np.ndarray:
    """The formula in float64; steps: of each token that asks, every layer's call."""
    asked = []
    for layers in steps:
        heads = []
        for call in layers:
            group = len(call.queries) // len(call.keys)
            for head, query in enumerate(call.queries[:, -1]):
                sink = None if call.sinks is None else call.sinks[head]
                heads.append(smooth(softmax(call.keys[head // group][:num_prompt] @ query * call.scale, sink)))
        asked.append(np.max(heads, axis=0))
    return np.mean(asked, axis=0)


def expected(model: nn.Module, prompt: Sequence[int], calls: list[Call]) -> tuple[list[int], np.ndarray]:
    """The greedy look-ahead of the untouched model, and the importance of the prompt's tokens."""
    cache = make_prompt_cache(model)
    steps: list[list[Call]] = []
    ids = list(prompt)
    fed = 0
    for _ in range(NUM_LOOKAHEAD):
        for token in ids[fed:]:
            calls.clear()
            logits = model(mx.array([[token]]), cache=cache)[0, -1]
            mx.eval(logits)
        fed = len(ids)
        # layers with a window have fewer keys than that, also where they read those of another layer
        steps.append([call for call in calls if call.keys.shape[1] == fed])
        ids.append(int(mx.argmax(logits)))
    return ids, written_out(steps, len(prompt))


def scored(packed: PackedModel, ids: Sequence[int], num_prompt: int) -> np.ndarray:
    """By packed steps: the prompt in two chunks and in company, then token by token, watched."""
    pool = StatePool()
    state, other, recorder = SequenceState(pool), SequenceState(pool), QueryRecorder()
    cuts = [0, num_prompt // 3, *range(num_prompt, num_prompt + NUM_LOOKAHEAD)]
    for lo, hi in zip(cuts, cuts[1:], strict=False):
        state.begin(hi - lo)
        other.begin(2)
        rows = [Row(other, ids[:2]), Row(state, ids[lo:hi], recorder=recorder)]
        picks = [1, 1 + hi - lo] if hi >= num_prompt else [1]
        logits = packed.forward(rows, picks)
        mx.eval(logits, state.arrays(), other.arrays(), recorder.arrays())
        state.rollback(0)
        other.rollback(0)
    return importance(state, recorder, num_prompt)


@pytest.mark.parametrize("name", [*SCORING, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_importance_is_what_the_formula_says_of_the_untouched_models_attention(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.build(name)
    vocab_size = model(mx.array([[0]])).shape[-1]
    prompt = np.random.default_rng(11).integers(0, vocab_size, 50).tolist()
    ids, wanted = expected(model, prompt, calls_of(model, monkeypatch))
    monkeypatch.undo()
    packed = check(model, Kernels("exact", "cpu"), vocab_size, "float32").packed
    got = scored(packed, ids, len(prompt))
    assert got.shape == (50,)
    assert got.dtype == np.float32
    assert np.abs(got - wanted).max() <= 1e-4 * wanted.max()
    assert num_scoring_layers(packed) == {**SCORING, **OTHERS}[name]


@pytest.mark.skipif(mx.cuda.is_available(), reason="on CUDA these layers take half precision only")
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_layers_that_are_kernels_for_cuda_tell_what_others_tell(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiny.FAMILIES, name, tiny.with_wide_heads(name))
    ids = np.random.default_rng(11).integers(0, 150, 58).tolist()
    found = []
    for kernels in (Kernels("exact", "cpu"), Kernels("fast", "cuda")):
        model = tiny.build(name)
        found.append(scored(PackedModel(model, choose_levels(model), kernels), ids, 50))
    assert any(isinstance(module, CudaAttentionMixer) for _, module in model.named_modules())
    assert np.abs(found[1] - found[0]).max() <= 1e-4 * found[0].max()


@pytest.mark.parametrize("name", ["mamba2", "deepseek_v3"])
def test_a_model_without_layers_to_score_with_has_none(name: str) -> None:
    model = tiny.build(name)
    vocab_size = model(mx.array([[0]])).shape[-1]
    assert num_scoring_layers(check(model, Kernels("exact", "cpu"), vocab_size, "float32").packed) == 0


@dataclass
class Drawn:
    """Layers of random keys in a state, and queries that ask for them."""

    state: SequenceState
    recorder: QueryRecorder
    keys: list[mx.array]
    queries: list[mx.array]


def draw(num_tokens: int, num_layers: int, num_heads: int, num_kv_heads: int, sinks: bool = False) -> Drawn:
    head_dim, num_asking = 8, 8
    state, recorder = SequenceState(StatePool(), num_tokens), QueryRecorder()
    state.begin(num_tokens)
    recorder.begin()
    drawn = Drawn(state, recorder, [], [])
    for layer in range(num_layers):
        key = mx.random.key(layer)
        drawn.keys.append(mx.random.normal((1, num_kv_heads, num_tokens, head_dim), key=key))
        drawn.queries.append(mx.random.normal((1, num_heads, num_asking, head_dim), key=mx.random.split(key)[0]))
        state.full_attention((layer,)).write(0, drawn.keys[-1], drawn.keys[-1])
        of_heads = mx.random.normal((num_heads,), key=key) + 2 if sinks else None
        recorder.record((layer,), drawn.queries[-1], range(num_asking), 0.3, of_heads)
    mx.eval(state.arrays(), recorder.arrays(), drawn.keys, drawn.queries)
    state.rollback(0)
    return drawn


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(scoring, "BLOCK_BYTES", 2000)
    yield


@pytest.mark.parametrize("num_tokens", [1, 2, 6, 7, 13, 40])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.usefixtures("small_blocks")
def test_heads_and_keys_may_come_in_blocks_of_any_size(num_tokens: int, sinks: bool) -> None:
    drawn = draw(num_tokens, 2, 6, 2, sinks)
    layers = drawn.recorder.layers()
    steps = [
        [
            Call(
                np.array(of_layer.queries, dtype=np.float64)[:, asking : asking + 1],
                np.array(keys[0], dtype=np.float64),
                of_layer.scale,
                None if of_layer.sinks is None else np.array(of_layer.sinks, dtype=np.float64),
            )
            for of_layer, keys in zip(layers, drawn.keys, strict=True)
        ]
        for asking in range(8)
    ]
    assert np.abs(importance(drawn.state, drawn.recorder, num_tokens) - written_out(steps, num_tokens)).max() < 1e-6


def test_scores_of_a_very_long_prompt_take_a_quarter_of_a_gigabyte_at_most() -> None:
    """Layers times heads times tokens that ask times tokens would be 268 MB here, and three times that on the way."""
    num_tokens = 131_072
    drawn = draw(num_tokens, 2, 32, 2)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    got = importance(drawn.state, drawn.recorder, num_tokens)
    assert got.shape == (num_tokens,)
    assert mx.get_peak_memory() - before < 256 * 1024**2


def test_what_no_layer_has_told_is_an_error() -> None:
    state = SequenceState(StatePool())
    with pytest.raises(ValueError, match="no layer"):
        importance(state, QueryRecorder(), 5)
