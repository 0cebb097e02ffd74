"""Both sides' steps run on the same model, and leave it as it was."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from benchmarks.figures import Figure
from benchmarks.model import ModelPlan, measure
from benchmarks.shapes import config_of, random_model
from benchmarks.steps import Forwards, PeerSteps
from headrace.backend.kernels import Kernels
from headrace.models.levels import choose_levels
from headrace.models.packed import PackedModel

QUICK = {"dtype": "float32", "prefill": (24,), "decode": ((1, 16), (3, 16)), "num_repeats": 2, "num_steps": 2}


@pytest.mark.parametrize("shape", [pytest.param("tiny-qwen3.5-moe", marks=pytest.mark.slow), "tiny-qwen3"])
def test_each_figure_is_told_as_soon_as_it_is_there(shape: str) -> None:
    told: list[Figure] = []
    plan = ModelPlan(shape, **QUICK)  # type: ignore[arg-type]
    figures = measure(plan, told.append, lambda words: None)
    assert told == figures
    measures = ["prefill 24", "decode 1@16", "decode 3@16"]
    assert [(each.side, each.measure) for each in figures] == [
        (side, name) for side in ("headrace", "mlx-lm") for name in measures
    ]
    for each in figures:
        assert len(each.times_s) == 2
        assert each.peak_bytes > 0
        assert (each.num_bytes is None) == each.is_prefill
        assert (each.host is None) == each.is_prefill
    ours, theirs = figures[2], figures[5]
    assert ours.num_bytes == theirs.num_bytes
    assert len(ours.forward_s) == len(ours.build_s) == 2
    assert all(built < whole for built, whole in zip(ours.build_s, ours.forward_s, strict=True))
    assert (theirs.note, figures[4].note) == ("BatchGenerator", "generate_step")
    one, three = figures[1].host, ours.host
    assert one is not None and three is not None
    assert one.seconds > 0
    assert three.num_calls > one.num_calls > 100
    assert three.num_objects > one.num_objects > 10


def test_rows_decode_their_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[list[int]] = []
    forward = PackedModel.forward

    def noted(self: PackedModel, rows: Any, picks: Any, ids: Any = None) -> mx.array:
        fed.append([token for row in rows for token in row.token_ids])
        return forward(self, rows, picks, ids)

    monkeypatch.setattr(PackedModel, "forward", noted)
    plan = ModelPlan("tiny-qwen3", **{**QUICK, "prefill": (), "decode": ((8, 4),)}, sides=("headrace",))  # type: ignore[arg-type]
    measure(plan, lambda figure: None, lambda words: None)
    steps = [each for each in fed if len(each) == 8]
    assert len(steps) > 2 * QUICK["num_steps"]  # type: ignore[operator]
    assert all(len(set(each)) > 5 for each in steps)  # eight of 512, drawn, then each row's likeliest


def test_a_peer_that_is_slow_computes_a_part_and_says_so() -> None:
    model = random_model(config_of("tiny-qwen3"), dtype="float32")
    steps = PeerSteps(model, 512, longest_prefill=10)
    short, long = steps.prefill(8, 1), steps.prefill(100, 1)
    assert (short.num_tokens, short.note) == (8, "generate_step")
    assert (long.measure, long.num_tokens, long.note) == ("prefill 100", 10, "generate_step, 10 tokens only")


def test_made_up_caches_hold_what_a_prompt_of_that_length_would() -> None:
    model = random_model(config_of("tiny-qwen3.5"), dtype="float32")
    rows = PeerSteps(model, 512).caches(2, 40)
    prompt = mx.array(np.random.default_rng(0).integers(0, 512, (1, 40)))
    real = model.make_cache()
    mx.eval(model(prompt, cache=real))
    for row in rows:
        for made, computed in zip(row, real, strict=True):
            if hasattr(made, "offset"):
                assert made.offset == computed.offset == 40
                assert made.keys.shape == computed.keys[:, :, :40].shape
            else:
                assert [part.shape for part in made.cache] == [part.shape for part in computed.cache]


def test_our_forwards_count_what_they_compute() -> None:
    model = random_model(config_of("tiny-qwen3"), dtype="float32")
    packed = PackedModel(model, choose_levels(model), Kernels("fast", "cpu"))
    forwards = Forwards(packed, range(10), (1, 2), num_steps=4, chunk_tokens=4)
    before = len(forwards.build_s)
    assert forwards.count()["Softmax"] == 2 * 2  # layers, rows
    forwards.step()
    assert len(forwards.build_s) == before + 2
