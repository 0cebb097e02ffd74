"""Whether a model fits this machine's memory and disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from headrace.backend.device import Device
from headrace.engine.memory import DEFAULT_CONTEXT, fitting_context
from headrace.models.preview import Preview, estimate


@dataclass(frozen=True, slots=True)
class Fit:
    """How a model's files and states compare with the memory that may be used, before anything is loaded.

    held_bytes: of the weights once loaded. state_bytes: of one request by its tokens; None if the configuration doesn't
    tell. own_context: the longest that the model was made for, in tokens. missing_bytes: of files still to be fetched,
    where free_disk_bytes are free.
    """

    weights_bytes: int
    held_bytes: int
    usable_bytes: int
    state_bytes: Callable[[int], int] | None
    own_context: int
    missing_bytes: int
    free_disk_bytes: int

    @property
    def fits(self) -> bool:
        return self.held_bytes < self.usable_bytes and self.missing_bytes < self.free_disk_bytes

    def lines(self) -> Iterator[str]:
        """Whether it fits, the context and requests that there is room for, and what to do if it does not fit."""
        if not self.weights_bytes:
            yield "its weights are not there: no model*.safetensors"
            return
        weights = f"{gb(self.weights_bytes)} of weights"
        if self.held_bytes != self.weights_bytes:
            weights += (
                f" ({gb(self.held_bytes)} {'in float32' if self.held_bytes > self.weights_bytes else 'quantised'})"
            )
        usable = f"{gb(self.usable_bytes)} of memory may be used"
        if self.held_bytes >= self.usable_bytes:
            yield f"does not fit: {weights}, {usable}"
            yield "take a model in fewer bits, a smaller one, or a larger --gpu-memory-utilization"
            return
        yield f"fits: {weights}, {usable}"
        if self.state_bytes is not None:
            left = self.usable_bytes - self.held_bytes
            context = fitting_context(left, self.state_bytes, self.own_context)
            share = "the model's full context" if context == self.own_context else f"the model's is {self.own_context}"
            each = self.state_bytes(context)
            requests = f"up to {left // each} such requests at a time, at least {gb(each)} each"
            yield f"context: {context} tokens, {share}; {requests}"
        if self.missing_bytes:
            free = f"{gb(self.free_disk_bytes)} of disk are free in {constants.HF_HUB_CACHE}"
            yield f"to fetch: {gb(self.missing_bytes)}; {free}"
            if not self.fits:
                yield "does not fit on the disk: free space there, or name another folder with HF_HOME"


def fit(
    found: Preview,
    device: Device,
    utilization: float | None,
    dtype: str,
    bits: float | None = None,
    kv_bits: int | None = None,
) -> Fit:
    """dtype: as in `ModelConfig.dtype`. bits: see `ModelEstimate.held_bytes`. kv_bits: of keys and
    values; None for exact ones."""
    # exact ones have the activations' precision, float32 on a CPU
    item_bytes, has_fine_slots = 4 if device.kind == "cpu" else 2, device.kind == "metal"
    estimated = estimate(found.files.config, item_bytes, has_fine_slots=has_fine_slots, kv_bits=kv_bits)
    stored = found.weights_bytes
    return Fit(
        stored,
        stored if estimated is None else estimated.held_bytes(stored, dtype, device, bits),
        int(device.memory_bytes * device.share(utilization)),
        None if estimated is None else estimated.cost.num_bytes,
        found.files.context_length or DEFAULT_CONTEXT,
        found.missing_bytes,
        shutil.disk_usage(existing(Path(constants.HF_HUB_CACHE))).free,
    )


def gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def existing(folder: Path) -> Path:
    """The folder, or the first of those that it is to be made in."""
    return next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
