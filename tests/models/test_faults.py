"""The self-check tells rounding from faults: no rounding of Metal's costs a level, and each fault put in is found.

Metal's forms and its rounding replace the CPU's. Not run on Metal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import metal_forms
import mlx.core as mx
import mlx.nn as nn
import pytest
from metal_rounding import QMM_FROM, round_like_metal
from models import tiny
from models.faults import FAULTS, OF_BATCHES, Fault

from headrace.backend import blas, gated_delta
from headrace.backend.kernels import Kernels
from headrace.models.levels import Level, choose_levels
from headrace.models.packed import PackedModel
from headrace.models.selfcheck import Reference, check, compare, run_reference

VOCAB_SIZE = 160
FAMILIES = (
    "qwen3",
    "qwen3_moe",
    "gemma3_text",
    "gpt_oss",
    "qwen3_5",
    "qwen3_5_moe",
    "deepseek_v3",
    "lfm2",
    "falcon_h1",
)


@dataclass(frozen=True)
class Setting:
    """qmm_from: in 4 bits, with products that round so from so many tokens on; None: single precision."""

    forms: str
    precision: str = "float32"
    qmm_from: int | None = None

    @property
    def kernels(self) -> Kernels:
        return Kernels("fast", self.forms)

    def __str__(self) -> str:
        return f"{self.forms}-{self.precision}-{self.qmm_from}"


SETTINGS = [
    Setting("cpu"),
    Setting("metal", "bfloat16", QMM_FROM["M1"]),
    *(
        pytest.param(setting, marks=pytest.mark.slow)
        for setting in (
            Setting("metal"),
            Setting("metal", "bfloat16", 2),
            Setting("metal", "bfloat16", QMM_FROM["M3"]),
            Setting("metal", "float16", QMM_FROM["M1"]),
        )
    ),
]

UNDER_ROUNDING = {("qwen3_5", "positions of the first row"), ("qwen3_5", "one position for a chunk")}
"""One of its four layers has attention: these change its logits by less than what bfloat16 may change."""


@pytest.fixture(autouse=True)
def stock_blas() -> None:
    blas.install("exact")


@pytest.fixture
def rounding(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    monkeypatch.setattr(gated_delta, "gated_delta_kernel", metal_forms.delta_kernel)
    if setting.qmm_from is not None:
        round_like_metal(monkeypatch, setting.qmm_from)
    yield setting


def made(family: str, setting: Setting) -> Any:
    model = tiny.build(family)
    if setting.qmm_from is not None:
        model.set_dtype(getattr(mx, setting.precision))
        nn.quantize(
            model,
            32,
            4,
            class_predicate=lambda _, module: hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0,
        )
    return model


@cache
def referred(family: str, setting: Setting) -> tuple[Any, Reference]:
    """Made under the setting's rounding; faults of ours change nothing in it."""
    model = made(family, setting)
    return model, run_reference(model, VOCAB_SIZE)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_rounding_costs_no_level(family: str, setting: Setting, rounding: Setting) -> None:
    result = check(made(family, setting), setting.kernels, VOCAB_SIZE, setting.precision)
    assert result.lowered == ()


CASES = [
    (family, level, fault)
    for family in FAMILIES
    for level in sorted(set(choose_levels(tiny.build(family)).values()), key=str)
    for fault in FAULTS[level]
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize(("family", "level", "fault"), CASES)
def test_a_fault_is_no_rounding(
    family: str, level: Level, fault: str, setting: Setting, rounding: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setting.precision == "bfloat16" and (family, fault) in UNDER_ROUNDING:
        pytest.skip("less than what bfloat16 may change")
    _refuse(family, setting, FAULTS[level][fault], monkeypatch)


@pytest.mark.parametrize("setting", [Setting("metal", "bfloat16", QMM_FROM["M1"])], ids=str)
@pytest.mark.parametrize("fault", OF_BATCHES)
def test_a_fault_of_batches_is_no_rounding(
    fault: str, setting: Setting, rounding: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    _refuse("qwen3", setting, OF_BATCHES[fault], monkeypatch)


def _refuse(family: str, setting: Setting, fault: Fault, patch: pytest.MonkeyPatch) -> None:
    model, reference = referred(family, setting)
    fault(patch)
    packed = PackedModel(model, choose_levels(model), setting.kernels)
    try:
        margin = compare(packed, reference)
    finally:
        packed.restore()
    assert not margin.within(setting.precision)
