"""Float16 instead of bfloat16, which the GPUs of M1 and M2 emulate."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from headrace.backend.device import Device
from headrace.families.registry import find_family
from headrace.models.selfcheck import Margin, run_reference
from headrace.models.source import ModelFiles
from headrace.models.weights import hold


def prefers_float16(files: ModelFiles, device: Device) -> bool:
    """Whether `--dtype auto` tries float16 here. Not with a vision tower: nothing here checks its precision."""
    if device.mac is None or not device.mac.emulates_bfloat16 or files.config.get("vision_config"):
        return False
    return not find_family(files.model_type).overflows_float16


def to_float16(model: Any, device: Device) -> Margin | None:
    """Bring an untouched model from bfloat16 to float16, and compare its logits before and after.

    None for a model that computes in another precision, which stays as it is.
    """
    hold(model, "stored", device.kind, device.memory_bytes)
    logits = model(mx.array([[0]]))
    if logits.dtype != mx.bfloat16:
        return None
    before = run_reference(model, logits.shape[-1]).logits
    hold(model, "float16", device.kind, device.memory_bytes)
    after = run_reference(model, logits.shape[-1]).logits
    apart = [
        mx.abs(one.astype(mx.float32) - other.astype(mx.float32)).max()
        for one, other in zip(before, after, strict=True)
    ]
    return Margin(float(mx.stack(apart).max()), max(float(mx.abs(one).max()) for one in before))
