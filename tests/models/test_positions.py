"""Tokens at chosen positions are what the untouched model makes of them there."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache
from models import positioned, tiny
from models.mixed_steps import MixedSteps

from headrace.backend import blas
from headrace.backend.kernels import Kernels
from headrace.models.levels import choose_levels
from headrace.models.media import RowMedia
from headrace.models.packed import PackedModel
from headrace.models.positions import TokenPositions
from headrace.models.selfcheck import check
from headrace.models.step import Row
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool

TOLERANCE = 1e-4
FAST_TOLERANCE = 5e-4
"""Of fast numerics, in models of up to eight layers: what summation orders make."""
KEPT = (0, 1, 2, 5, 6, 13, 14, 15, 16, 30, 31, 47, 48, 49, 60, 61, 62)
"""With gaps shorter and longer than the windows of the tiny models, which are 8; the prompt is 63 tokens long."""
NUM_BEHIND = 14
"""Tokens behind the prompt: more than a window."""

FAMILIES = [
    "llama",
    "ministral3",
    "gemma3_text",
    "gpt_oss",
    "qwen3_5",
    "nemotron_h",
    "deepseek_v3",
    "falcon_h1",
]
REFUSED = {
    "gemma3n": "as a whole",
    "internlm3": "its rope rotates by the length of the sequence",
    "talkie": "rotates its queries and keys itself",
}
ALSO_REFUSED = {
    *("afm7", "baichuan_m1", "bailing_hybrid", "bailing_moe_linear", "deepseek_v41", "exaone", "glm_moe_dsa", "gpt2"),
    *("gpt_bigcode", "iquestloopcoder", "llama4", "longcat_flash", "longcat_flash_ngram", "minimax_m3_vl", "mistral4"),
    *("mistral3_mistral4", "nanbeige", "nanochat", "plamo", "rwkv7"),
}
"""As gemma3n and talkie are, seen in a run of `compare` over all families."""
OTHERS = sorted(set(tiny.FAMILIES) - set(FAMILIES) - set(REFUSED) - ALSO_REFUSED)


@pytest.fixture(autouse=True)
def stock_blas() -> None:
    blas.install("exact")


def positions(*kept: int) -> TokenPositions:
    return TokenPositions(np.array(kept, dtype=np.int32))


def tokens(vocab_size: int, num_tokens: int) -> list[int]:
    return np.random.default_rng(7).integers(0, vocab_size, num_tokens).tolist()


# The type


def test_positions_go_on_behind_the_last_kept_one() -> None:
    kept = positions(0, 7, 900)
    assert kept.at(0, 3).tolist() == [0, 7, 900]
    assert kept.at(1, 6).tolist() == [7, 900, 901, 902, 903]
    assert kept.at(5, 8).tolist() == [903, 904, 905]
    assert kept.at(2, 2).tolist() == []
    assert kept.at(9, 9).tolist() == []


@pytest.mark.parametrize("kept", [[], [3, 3], [4, 2], [-1, 2]])
def test_positions_have_to_rise(kept: list[int]) -> None:
    with pytest.raises(ValueError, match="rise"):
        positions(*kept)


# What layers see


class Recorder(nn.Module):
    """Stands for a rope and turns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def __call__(self, x: mx.array, offset: mx.array) -> mx.array:
        self.seen.append(offset.tolist())
        return x


def test_a_layer_sees_exactly_the_chosen_positions() -> None:
    model = tiny.build("llama")
    recorder = model.model.layers[1].self_attn.rope = Recorder()
    packed = PackedModel(model, choose_levels(model), Kernels("exact", "cpu"))
    chosen, pool = positions(0, 7, 900), StatePool()
    sparse, dense = SequenceState(pool), SequenceState(pool)
    for ids in ((1, 2), (3,), (4, 5)):
        for state in (sparse, dense):
            state.begin(len(ids))
        rows = [Row(sparse, ids, positions=chosen), Row(dense, ids)]
        mx.eval(packed.forward(rows, [0]), sparse.arrays(), dense.arrays())
        for state in (sparse, dense):
            state.rollback(0)
    queries = recorder.seen[::2]
    assert queries == [[0, 7, 0, 1], [900, 2], [901, 902, 3, 4]]
    assert recorder.seen[1::2] == queries


def test_a_row_has_positions_from_one_source() -> None:
    model = tiny.build("qwen3_5")
    packed = PackedModel(model, choose_levels(model), Kernels("exact", "cpu"))
    state = SequenceState(StatePool())
    state.begin(1)
    media = RowMedia(np.zeros((3, 1), dtype=np.int32))
    with pytest.raises(ValueError, match="not both"):
        packed.forward([Row(state, (1,), media, positions(5))], [0])


# Against the untouched model


def compare(name: str, numerics: str, device: str = "cpu") -> float:
    """Largest difference of a logit, of a row at chosen positions and one without gaps in mixed, rejected steps."""
    model = tiny.build(name)
    vocab_size = model(mx.array([[0]])).shape[-1]
    chosen, whole = positions(*KEPT), positions(*range(len(KEPT)))
    ids = tokens(vocab_size, len(KEPT) + NUM_BEHIND)
    places = [int(place) for place in chosen.at(0, len(ids))]
    expected = [positioned.reference(model, ids, places), tiny.reference(model, ids[:20])]
    packed = check(model, Kernels(numerics, device), vocab_size, "float32").packed
    assert packed.positions_refusal is None
    got = MixedSteps(packed, [ids, ids[:20]], vocab_size, positions=[chosen, whole]).run()
    return max(float(mx.abs(a - b).max()) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_chosen_positions_give_what_the_untouched_model_gives_there(name: str) -> None:
    """And positions without gaps give what none do, which is the whole prompt kept."""
    assert compare(name, "exact") <= TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_that_is_kept_whole_gives_the_very_logits_of_one_without_positions(name: str) -> None:
    model = tiny.build(name)
    packed = PackedModel(model, choose_levels(model), Kernels("exact", "cpu"))
    ids, got = tokens(150, 40), []
    for chosen in (None, positions(*range(32))):
        state = SequenceState(StatePool())
        parts = []
        for lo, hi in ((0, 20), (20, 32), (32, 40)):
            state.begin(hi - lo)
            parts.append(packed.forward([Row(state, ids[lo:hi], positions=chosen)], range(hi - lo)))
            mx.eval(parts[-1], state.arrays())
            state.rollback(0)
        got.append(mx.concatenate(parts))
    assert mx.array_equal(*got)


@pytest.mark.skipif(mx.cuda.is_available(), reason="on CUDA these layers take half precision only")
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "gpt_oss", "ministral3"])
def test_chosen_positions_reach_layers_that_are_kernels_for_cuda(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiny.FAMILIES, name, tiny.with_wide_heads(name))
    assert compare(name, "fast", "cuda") <= FAST_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_so_does_every_other_family_of_mlx_lm(name: str) -> None:
    assert compare(name, "fast") <= FAST_TOLERANCE


def test_positions_matter() -> None:
    """What the comparisons above would show of a token that stood elsewhere."""
    model = tiny.build("llama")
    ids = tokens(tiny.FAMILIES["llama"]["vocab_size"], 8)
    places = positioned.reference(model, ids, [0, 1, 2, 5, 6, 13, 14, 15])
    assert float(mx.abs(places - tiny.reference(model, ids))[-1].max()) > 100 * FAST_TOLERANCE


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_a_model_that_counts_its_tokens_itself_is_refused_with_the_reason(name: str, reason: str) -> None:
    model = tiny.build(name)
    vocab_size = model(mx.array([[0]])).shape[-1]
    refusal = check(model, Kernels("exact", "cpu"), vocab_size, "float32").packed.positions_refusal
    assert refusal is not None
    assert reason in refusal


class ThinnedCache(KVCache):
    """A whole prompt, of which only the tokens at some positions are to be seen, in windows of the layer's own."""

    def __init__(self, kept: Sequence[int], window: int | None) -> None:
        super().__init__()
        self.kept, self.window = set(kept), window

    def make_mask(self, num_tokens: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        window = window_size or self.window or num_tokens
        return mx.array(
            [
                [key <= query < key + window and (key in self.kept or key == query) for key in range(num_tokens)]
                for query in range(num_tokens)
            ]
        )


@pytest.mark.parametrize("name", ["llama", "glm4", "gemma3_text", "gpt_oss"])
def test_kept_tokens_are_the_whole_prompt_with_the_others_masked(name: str) -> None:
    """Where all mixers are attention, leaving tokens out is hiding their keys."""
    model = tiny.build(name)
    vocab_size = model(mx.array([[0]])).shape[-1]
    prompt = tokens(vocab_size, KEPT[-1] + 1)
    windows = [getattr(cache, "max_size", None) for cache in make_prompt_cache(model)]
    caches = [ThinnedCache(KEPT, window) for window in windows]
    expected = model(mx.array([prompt]), cache=caches)[0][mx.array(KEPT)]
    mx.eval(expected)
    packed = check(model, Kernels("fast", "cpu"), vocab_size, "float32").packed
    state = SequenceState(StatePool())
    kept = [prompt[place] for place in KEPT]
    parts = []
    for lo, hi in ((0, 6), (6, len(kept))):
        state.begin(hi - lo)
        parts.append(packed.forward([Row(state, kept[lo:hi], positions=positions(*KEPT))], range(hi - lo)))
        mx.eval(parts[-1], state.arrays())
        state.rollback(0)
    assert float(mx.abs(mx.concatenate(parts) - expected).max()) <= TOLERANCE
