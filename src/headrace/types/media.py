"""Images and videos of a prompt, as the engine gets them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MediaInput:
    """What the placeholder tokens `start` to `end` of a prompt stand for: an image, or a part of a video.

    pixels: bytes in the order in which the model's vision tower takes them, C-contiguous; for Qwen
    [patches, channels * temporal * height * width of a patch].
    grid: of patches: time, rows, columns.
    mean, std: per channel; the tower sees (byte / 255 - mean) / std.
    digest: sha256 of all that decides the embeddings: pixels, their shape and the grid.
    """

    start: int
    end: int
    pixels: memoryview
    grid: tuple[int, int, int]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    digest: bytes


@dataclass(frozen=True, slots=True)
class PromptMedia:
    """All media of one prompt.

    inputs: in the prompt's order; no two overlap.
    positions: int32 [3, prompt tokens]: the time, row and column that each token has in rotary embedding; None where
    the model counts tokens only.
    rope_delta: what a token after the prompt adds to its index to get its position, on all three axes.
    """

    inputs: tuple[MediaInput, ...]
    positions: memoryview | None = None
    rope_delta: int = 0
