"""Launches of a decode step on Metal beside mlx-lm's, as graphs made on a CPU have them. Not run on Metal."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import metal_launches
import mlx.core as mx
import pytest

from headrace.backend.operations import metal_launches as launches_of

AIM = 1.03
"""Of mlx-lm's launches, for any number of rows."""

SHAPES = ("qwen3-4b", "qwen3.5-4b", "qwen3.5-35b-a3b")

AIM_OF_DRAFTS = 1.2
"""Of the launches without drafts, where each row replays tokens of its last window."""


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


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", [1, 8, 32])
def test_a_step_launches_little_more_than_mlx_lm_does(shape: str, num_rows: int) -> None:
    model = model_of(shape)
    most = AIM * metal_launches.of_mlx_lm(model, num_rows)
    assert metal_launches.ours(model, num_rows) <= most
    assert metal_launches.ours(model, num_rows, is_ahead=True) <= most


@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("kept", [(3,), (2,), (1,), (1, 2, 3)])
def test_drafts_add_little_whatever_the_rows_keep_of_them(num_rows: int, kept: tuple[int, ...]) -> None:
    """kept: of the three tokens of a window by each row, in turn."""
    model = model_of("qwen3.5-4b")
    found = metal_launches.ours_with_drafts(model, num_rows, lambda row: kept[row % len(kept)])
    assert found <= AIM_OF_DRAFTS * metal_launches.ours(model, num_rows)
