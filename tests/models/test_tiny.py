"""The tiny models are fit to test with: their logits have margins, remember, and survive a round trip to disk."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from models.tiny import FAMILIES, PROMPT, build, parameters, reference, save
from models.tiny_parts import VOCAB_SIZE, WINDOW

every_family = pytest.mark.parametrize("name", FAMILIES)

OTHER_START = (PROMPT[0] + 1, *PROMPT[1:])


@cache
def logits_of(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Logits after PROMPT and after the same tokens behind another first one."""
    model = build(name)
    return np.array(reference(model, PROMPT)), np.array(reference(model, OTHER_START))


def margins(logits: np.ndarray) -> np.ndarray:
    """How far the best logit of each row is above the second best."""
    ordered = np.sort(logits, axis=-1)
    best: np.ndarray = ordered[..., -1] - ordered[..., -2]
    return best


def test_the_prompt_is_longer_than_the_windows() -> None:
    assert len(PROMPT) >= 2 * WINDOW
    assert max(PROMPT) < VOCAB_SIZE


@every_family
def test_logits_spread_over_a_few_units_without_near_ties(name: str) -> None:
    for logits in logits_of(name):
        assert logits.shape == (len(PROMPT), VOCAB_SIZE)
        assert logits.dtype == np.float32
        assert np.isfinite(logits).all()
        spread = logits.std(axis=-1)
        assert spread.min() > 0.8
        assert spread.max() < 5.0
        assert np.abs(logits).max() < 25.0
        assert margins(logits).min() > 1e-3


@every_family
def test_every_position_and_the_first_token_matter(name: str) -> None:
    logits, others = logits_of(name)
    assert np.abs(np.diff(logits, axis=0)).max(axis=-1).min() > 1.0
    assert len(np.unique(logits.argmax(axis=-1))) >= len(PROMPT) // 3
    changed = np.abs(logits - others).max(axis=-1)
    assert changed[0] > 1.0
    assert changed[-1] > 0.02


@every_family
def test_a_saved_checkpoint_loads_to_equal_weights_and_logits(name: str, tmp_path: Path) -> None:
    model = build(name)
    loaded, config = load_model(save(name, tmp_path / name))
    assert config["model_type"] == FAMILIES[name]["model_type"]
    ours, theirs = parameters(model), parameters(loaded)
    assert ours.keys() == theirs.keys()
    for path, weight in ours.items():
        assert weight.dtype == mx.float32, path
        assert mx.array_equal(weight, theirs[path]).item(), path
    start = PROMPT[:4]
    assert mx.array_equal(reference(model, start), reference(loaded, start)).item()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "glm4", "phi3", "seed_oss"])
def test_token_by_token_agrees_with_one_forward_over_the_whole_prompt(name: str) -> None:
    at_once = build(name)(mx.array([PROMPT]))[0]
    assert mx.allclose(reference(build(name), PROMPT), at_once, rtol=0.0, atol=1e-4).item()


def test_a_seed_decides_all_weights() -> None:
    one, same, other = (parameters(build("qwen3", seed)) for seed in (0, 0, 1))
    for path, weight in one.items():
        assert mx.array_equal(weight, same[path]).item()
        assert not mx.array_equal(weight, other[path]).item()


@every_family
def test_no_weight_is_left_constant(name: str) -> None:
    for path, weight in parameters(build(name)).items():
        assert weight.size == 1 or np.var(np.array(weight)) > 0.0, path


@pytest.mark.slow
@every_family
def test_greedy_decoding_of_64_tokens_meets_no_near_tie(name: str) -> None:
    model = build(name)
    prompt_cache = make_prompt_cache(model)
    token_ids, smallest = list(PROMPT), float("inf")
    for index in range(len(PROMPT) + 64):
        row = model(mx.array([[token_ids[index]]]), cache=prompt_cache)[0, -1]
        smallest = min(smallest, float(margins(np.array(row))))
        if index + 1 == len(token_ids):
            token_ids.append(int(np.argmax(np.array(row))))
    assert smallest > 1e-3
    assert len(set(token_ids[len(PROMPT) :])) > 3
