"""What is learned before the first request: what steps with drafts take, and whether their windows compute the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import pytest
from models import tiny_head
from models.tiny_parts import VOCAB_SIZE

from headrace.backend import device
from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.drafting import ProfileRun
from headrace.engine.engine import Engine
from headrace.engine.head_check import load_head_check
from headrace.errors import ConfigError
from headrace.models.mtp_head import MtpHead
from headrace.models.packed import PackedModel
from headrace.models.step import Row
from headrace.speculate.drafter import DraftRow
from headrace.speculate.drafts import DraftBatch
from headrace.speculate.head import HeadDrafter
from headrace.speculate.step_times import StepTimes
from headrace.types.model import TokenIds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    head = tiny_head.prefixed(tiny_head.draw("qwen3_5"))
    return tiny_head.save_with_head("qwen3_5", tmp_path_factory.mktemp("tiny"), head)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[PackedModel, MtpHead]:
    config = Config(str(folder), ModelConfig(numerics="exact", self_check=False))
    check = load_head_check(config, (), TokenIds(10**6))
    return check.trunk, check.head


class Clock:
    """Advances by the same time at each reading."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds = 0.0, seconds

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


class NotedTimes(StepTimes):
    """Notes the ratios that it is given, by drafts and passes of the head."""

    def __init__(self) -> None:
        super().__init__(1)
        self.noted: dict[tuple[int, int], list[float]] = {}

    def observe_ratio(self, num_drafts: int, num_passes: int, ratio: float) -> None:
        self.noted.setdefault((num_drafts, num_passes), []).append(ratio)


def test_in_exact_numerics_windows_compute_what_single_tokens_do(loaded: tuple[PackedModel, MtpHead]) -> None:
    margin = ProfileRun(loaded[0], VOCAB_SIZE, Clock(0.0)).compare_windows()
    assert margin.longest == 8
    assert margin.difference == 0.0
    assert 0 < margin.lead < 1


@pytest.mark.parametrize("spoiled", [2, 5, 8])
def test_a_window_that_computes_otherwise_is_noticed(
    spoiled: int, loaded: tuple[PackedModel, MtpHead], monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = 0.0
    original = PackedModel.forward

    def forward(self: PackedModel, rows: Sequence[Row], picks: Sequence[int], ids: mx.array | None = None) -> mx.array:
        nonlocal largest
        logits = original(self, rows, picks, ids)
        num_tokens = len(rows[0].token_ids)
        if num_tokens == 1:
            largest = max(largest, mx.abs(logits).max().item())
        return logits + 0.25 if num_tokens == spoiled else logits

    monkeypatch.setattr(PackedModel, "forward", forward)
    margin = ProfileRun(loaded[0], VOCAB_SIZE, Clock(0.0)).compare_windows()
    assert margin.difference == pytest.approx(0.25 / largest, rel=1e-4)
    assert f"{margin.difference:.1e} of the largest" in str(margin)


def test_windows_are_compared_as_far_as_time_allows(loaded: tuple[PackedModel, MtpHead]) -> None:
    assert ProfileRun(loaded[0], VOCAB_SIZE, Clock(0.2)).compare_windows().longest == 3


def test_steps_are_timed_with_and_without_drafts(loaded: tuple[PackedModel, MtpHead]) -> None:
    trunk, head = loaded
    times = NotedTimes()
    ProfileRun(trunk, VOCAB_SIZE, Clock(0.001)).time_steps(HeadDrafter(head), times, 16)
    # all steps take what the clock goes on by between two looks
    assert times.noted == {(number, number): [pytest.approx(1.0)] * 2 for number in (1, 2, 4)}


def test_no_more_drafts_are_timed_than_are_allowed(loaded: tuple[PackedModel, MtpHead]) -> None:
    trunk, head = loaded
    times = NotedTimes()
    ProfileRun(trunk, VOCAB_SIZE, Clock(0.001)).time_steps(HeadDrafter(head), times, 1)
    assert list(times.noted) == [(1, 1)]


def test_a_slow_machine_is_not_kept_from_its_work(loaded: tuple[PackedModel, MtpHead]) -> None:
    trunk, head = loaded
    times = NotedTimes()
    ProfileRun(trunk, VOCAB_SIZE, Clock(2.0)).time_steps(HeadDrafter(head), times, 16)
    assert times.noted == {}


def launch(folder: Path, mtp: str = "auto") -> Engine:
    return Engine.launch(Config(str(folder), ModelConfig(numerics="exact"), EngineConfig(mtp=mtp)))


def test_the_report_says_how_exactly_windows_compute(folder: Path) -> None:
    engine = launch(folder)
    engine.stop()
    (line,) = [line for line in engine.model.report if line.startswith("drafts: logits of windows")]
    assert "at most 0.0e+00 of the largest" in line


def test_a_head_that_cannot_run_is_left_aside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: HeadDrafter, rows: Sequence[DraftRow]) -> DraftBatch:
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(HeadDrafter, "draft", broken)
    engine = launch(folder)
    engine.stop()
    said = [line for line in engine.model.report if line.startswith("drafts:")]
    assert said == [
        "drafts: none, the prediction head in model-00002-of-00002.safetensors can't run on "
        f"{device.device_kind()}: no kernel for this"
    ]
    with pytest.raises(ConfigError, match="mtp is on, but the prediction head .* can't run"):
        launch(folder, mtp="on")
