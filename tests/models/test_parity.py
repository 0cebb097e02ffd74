"""Packed steps give what the untouched model gives token by token.

Rows of different lengths travel in mixed steps with rejected windows. In exact numerics (stock BLAS, reference kernels)
results are bit-equal, except where mlx-lm's rotating buffers add up a window's keys in another order than theirs.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from models import tiny
from models.mixed_steps import MixedSteps

from headrace.backend import blas
from headrace.backend.kernels import Kernels
from headrace.models.levels import Level
from headrace.models.selfcheck import check

NUM_GREEDY = 64
TOLERANCE = 1e-4

ADAPTER_FAMILIES = [
    *(
        "llama",
        "smollm3",
        "mistral",
        "mistral3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "qwen3_vl",
        "glm4",
        "glm4_moe",
        "minimax",
    ),
    *("phi3", "seed_oss", "hunyuan_v1_dense", "ernie4_5"),
]
WINDOWED_FAMILIES = [
    "llama_sliding",
    "ministral3",
    "gemma3_text",
    "gemma3",
    "gemma4_text",
    "gemma4",
    "gemma4_k_eq_v",
    "gpt_oss",
    "olmo3",
]
GATED_DELTA_FAMILIES = ["qwen3_next", "qwen3_5", "qwen3_5_deep", "qwen3_5_moe"]
ROW_FAMILIES = [
    "nemotron_h",
    "granitemoehybrid",
    "lfm2",
    "lfm2_moe",
    "deepseek_v3",
    "deepseek_v32",
    "kimi_linear",
    "falcon_h1",
    "mamba2",
    "jamba",
]
WHOLE_FAMILIES = ["llama4", "gemma3n", "rwkv7"]

NAMED = ADAPTER_FAMILIES + WINDOWED_FAMILIES + GATED_DELTA_FAMILIES + ROW_FAMILIES + WHOLE_FAMILIES
OTHERS = sorted(set(tiny.FAMILIES) - set(NAMED))


@pytest.fixture
def stock_blas():
    blas.install("exact")


@pytest.fixture
def fast_blas():
    blas.install("fast")
    yield
    blas.uninstall()


def greedy(model, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], mx.array]:
    """A prompt with its greedy continuation by the untouched model, and the logits of all its tokens."""
    cache = make_prompt_cache(model)
    ids, logits = list(prompt), []
    for index in range(len(prompt) + num_tokens):
        logits.append(model(mx.array([[ids[index]]]), cache=cache)[0, -1])
        mx.eval(logits[-1])
        if index >= len(prompt) - 1:
            ids.append(int(mx.argmax(logits[-1])))
    return ids[: len(prompt) + num_tokens], mx.stack(logits)


def compare(name: str, numerics: str) -> tuple[float, bool, set[Level]]:
    """Largest difference of a logit, whether every argmax is equal, and the levels in use."""
    model = tiny.build(name)
    vocab_size = model(mx.array([[0]])).shape[-1]
    random = np.random.default_rng(3)
    prompts = [random.integers(0, vocab_size, length).tolist() for length in (12, 23, 31)]
    first, first_logits = greedy(model, prompts[0], NUM_GREEDY)
    expected = [first_logits, *(tiny.reference(model, prompt) for prompt in prompts[1:])]
    packed = check(model, Kernels(numerics, "cpu"), vocab_size, "float32").packed
    got = MixedSteps(packed, [first, *prompts[1:]], vocab_size).run()
    difference = max(float(mx.abs(a - b).max()) for a, b in zip(got, expected, strict=True))
    same_ids = all(bool(mx.array_equal(mx.argmax(a, -1), mx.argmax(b, -1))) for a, b in zip(got, expected, strict=True))
    return difference, same_ids, set(packed.levels.values())


@pytest.mark.parametrize(
    ("name", "levels"),
    [
        *((name, {Level.ADAPTER}) for name in ADAPTER_FAMILIES),
        *((name, {Level.ADAPTER, Level.PACKED}) for name in GATED_DELTA_FAMILIES),
        *((name, None) for name in ROW_FAMILIES),
        *((name, {Level.WHOLE}) for name in WHOLE_FAMILIES if name != "gemma3n"),
    ],
)
@pytest.mark.usefixtures("stock_blas")
def test_exact_numerics_are_bit_equal(name: str, levels: set[Level] | None) -> None:
    difference, same_ids, used = compare(name, "exact")
    assert difference == 0.0
    assert same_ids
    assert used == levels if levels is not None else Level.ROWS in used and Level.WHOLE not in used


@pytest.mark.parametrize("name", [*WINDOWED_FAMILIES, "gemma3n"])
@pytest.mark.usefixtures("stock_blas")
def test_sliding_windows_agree_past_the_wrap(name: str) -> None:
    difference, same_ids, _ = compare(name, "exact")
    assert difference <= TOLERANCE
    assert same_ids


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "qwen3_5",
        "qwen3_next",
        "qwen3_5_moe",
        "gemma3",
        "gpt_oss",
        "nemotron_h",
        "deepseek_v3",
        "deepseek_v32",
        "lfm2",
        "kimi_linear",
    ],
)
@pytest.mark.usefixtures("fast_blas")
def test_fast_numerics_give_the_same_ids(name: str) -> None:
    difference, same_ids, _ = compare(name, "fast")
    assert difference <= TOLERANCE
    assert same_ids


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.usefixtures("stock_blas")
def test_every_other_family_of_mlx_lm_is_served(name: str) -> None:
    difference, same_ids, _ = compare(name, "exact")
    assert difference <= TOLERANCE
    assert same_ids


@pytest.mark.parametrize("name", ["qwen3_5", "llama"])
def test_half_precision_agrees_to_its_own_rounding(name: str) -> None:
    """In bfloat16 the packed step may round otherwise than one token at a time, by no more than a few units in the last
    place of the largest logit."""
    model = tiny.build(name)
    model.set_dtype(mx.bfloat16, lambda dtype: dtype == mx.float32)
    vocab_size = model(mx.array([[0]])).shape[-1]
    prompt = np.random.default_rng(3).integers(0, vocab_size, 31).tolist()
    expected = tiny.reference(model, prompt).astype(mx.float32)
    packed = check(model, Kernels("exact", "cpu"), vocab_size, "bfloat16").packed
    assert Level.ROWS not in packed.levels.values()
    (got,) = MixedSteps(packed, [prompt], vocab_size).run()
    unit = 2.0**-8 * float(mx.abs(expected).max())
    assert float(mx.abs(got.astype(mx.float32) - expected).max()) <= unit
