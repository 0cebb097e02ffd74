"""What `headrace doctor` concludes: what is wrong with the machine, and whether a model fits it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.backend.device import Device, available_memory_bytes
from headrace.backend.doctor import compiler
from headrace.cli.installed import vision_advice
from headrace.models.source import ModelFiles

_LOW_DISK_BYTES = 5_000_000_000
_LOW_MEMORY_BYTES = 2_000_000_000


@dataclass(frozen=True, slots=True)
class Resources:
    """free_memory_bytes: None where the system doesn't say. cache_folder: where fetched models are kept."""

    device: Device
    free_memory_bytes: int | None
    free_disk_bytes: int
    cache_folder: Path
    load: float = 0.0
    """Programs that wanted to run at a time, on average over the last minute."""

    def lines(self) -> Iterator[str]:
        if self.free_memory_bytes is not None:
            yield f"memory: {_gb(self.free_memory_bytes)} free"
        yield f"disk: {_gb(self.free_disk_bytes)} free in {self.cache_folder}"

    def advice(self) -> Iterator[str]:
        """What to do for a better server, a line each."""
        if self.device.kind == "cpu" and compiler() is None:
            yield "install a C++ compiler (g++): MLX fuses operations on a CPU with it"
        if self.device.kind == "cpu" and self.load > 1.5 * self.device.num_cores > 1.5:
            busy = f"{self.load:.0f} programs share {self.device.num_cores} cores"
            yield f"{busy}, and threads of the BLAS wait for each other: OPENBLAS_NUM_THREADS=1 is faster then"
        if (advice := vision_advice()) is not None:
            yield f"{advice} adds what images and videos need"
        if self.free_memory_bytes is not None and self.free_memory_bytes < _LOW_MEMORY_BYTES:
            yield f"end other programs: {_gb(self.free_memory_bytes)} of memory are little"
        if self.free_disk_bytes < _LOW_DISK_BYTES:
            yield f"free space on the disk of {self.cache_folder}: models have gigabytes"


def resources(device: Device, cache_folder: Path) -> Resources:
    """cache_folder: may not exist yet."""
    existing = next(folder for folder in (cache_folder, *cache_folder.absolute().parents) if folder.is_dir())
    return Resources(
        device, available_memory_bytes(), shutil.disk_usage(existing).free, cache_folder, os.getloadavg()[0]
    )


@dataclass(frozen=True, slots=True)
class Fit:
    """How a model's files and states compare with the memory that may be used, before anything is loaded.

    token_bytes: of keys and values of one token, all of attention's layers together, as if none had a window; 0 if the
    configuration doesn't say.
    """

    weights_bytes: int
    usable_bytes: int
    token_bytes: int
    own_context: int | None

    @property
    def fits(self) -> bool:
        return self.weights_bytes < self.usable_bytes

    def lines(self) -> Iterator[str]:
        weights, usable = _gb(self.weights_bytes), _gb(self.usable_bytes)
        if not self.fits:
            yield f"does not fit: {weights} of weights, {usable} of memory may be used"
            return
        yield f"fits: {weights} of weights, {usable} of memory may be used"
        if self.token_bytes:
            num_tokens = (self.usable_bytes - self.weights_bytes) // self.token_bytes
            longest = f"; its own context is {self.own_context} tokens" if self.own_context else ""
            yield f"room for about {num_tokens} tokens of all requests together{longest}"


def fit(files: ModelFiles, device: Device, utilization: float) -> Fit:
    weights_bytes = sum(file.stat().st_size for file in files.directory.glob("model*.safetensors"))
    # Keys and values have the activations' precision, float32 on a CPU.
    item_bytes = 4 if device.kind == "cpu" else 2
    return Fit(
        weights_bytes,
        int(device.memory_bytes * utilization),
        _numbers_per_token(files.text_config) * item_bytes,
        files.context_length,
    )


def _numbers_per_token(config: Mapping[str, Any]) -> int:
    """Keys and values of one token in all layers of attention."""
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    if not isinstance(layers, int) or not isinstance(heads, int):
        return 0
    if isinstance(types := config.get("layer_types"), list):
        layers = sum("linear" not in str(kind) and "attention" in str(kind) for kind in types)
    elif isinstance(interval := config.get("full_attention_interval"), int) and interval > 0:
        layers //= interval
    if isinstance(rank := config.get("kv_lora_rank"), int):
        return layers * (rank + int(config.get("qk_rope_head_dim") or 0))
    width = config.get("head_dim") or int(config.get("hidden_size") or 0) // heads
    return 2 * layers * int(config.get("num_key_value_heads") or heads) * int(width)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
