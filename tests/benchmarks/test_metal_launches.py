"""Launches of a decode step on Metal beside mlx-lm's, as graphs made on a CPU have them. Not run on Metal."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import metal_launches
import mlx.core as mx
import pytest

from benchmarks.host import metal_launches as launches_of

AIM = {1: 1.03, 8: 1.3, 32: 2.0}
"""Of mlx-lm's launches, by the number of rows."""

DECIDED, AHEAD = False, True
"""Whether a step is launched before the last one's tokens are read."""

REACHED = {
    ("qwen3-4b", 1, DECIDED): 692,
    ("qwen3-4b", 1, AHEAD): 692,
    ("qwen3-4b", 8, DECIDED): 1736,
    ("qwen3-4b", 8, AHEAD): 1736,
    ("qwen3-4b", 32, DECIDED): 5192,
    ("qwen3.5-4b", 1, DECIDED): 872,
    ("qwen3.5-4b", 1, AHEAD): 1352,
    ("qwen3.5-4b", 8, DECIDED): 1104,
    ("qwen3.5-4b", 8, AHEAD): 3888,
    ("qwen3.5-4b", 32, DECIDED): 1872,
    ("qwen3.5-35b-a3b", 1, DECIDED): 1728,
    ("qwen3.5-35b-a3b", 1, AHEAD): 2328,
    ("qwen3.5-35b-a3b", 8, DECIDED): 2018,
}
"""Launches so far. Where the aim is not reached, no more than these: lower them when steps need fewer."""


def test_each_part_of_a_concatenation_and_both_halves_of_a_pad_are_launched() -> None:
    a = mx.ones((4, 6))
    mx.eval(a)
    joined = mx.concatenate([a, a[:2], a.reshape(4, 6)])
    assert launches_of([joined]) == 3
    assert launches_of([mx.pad(mx.exp(joined), [(1, 0), (0, 0)])]) == 3 + 1 + 2


@pytest.fixture(autouse=True)
def as_on_metal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    metal_launches.count_fast_functions_once(monkeypatch)
    yield


@cache
def model_of(shape: str) -> Any:
    return metal_launches.model_of(shape)


def test_a_dense_model_launches_what_its_layers_name() -> None:
    attention = 1 + 3 + 2 + 2 + 2 + 1 + 1 + 1  # norm, q k v, their norms, ropes, writes, attention, product, sum
    mlp = 1 + 2 + 1 + 1 + 1  # norm, gate and up, activation, down, sum
    # the embedding's three parts and their product, the last norm, the head, the last token, the most likely id
    around = 3 + 1 + 1 + 1 + 1 + 1
    assert metal_launches.of_mlx_lm(model_of("qwen3-4b"), 1) == 36 * (attention + mlp) + around
    assert metal_launches.ours(model_of("qwen3-4b"), 1) == 36 * (attention + mlp) + around


@pytest.mark.parametrize(("shape", "num_rows", "is_ahead"), REACHED)
def test_a_step_launches_little_more_than_mlx_lm_does(shape: str, num_rows: int, is_ahead: bool) -> None:
    model = model_of(shape)
    aim = AIM[num_rows] * metal_launches.of_mlx_lm(model, num_rows)
    assert metal_launches.ours(model, num_rows, is_ahead=is_ahead) <= max(aim, REACHED[shape, num_rows, is_ahead])
