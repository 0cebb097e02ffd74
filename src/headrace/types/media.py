"""Images and videos: the server's limits, the request's options, and the engine's inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from pathlib import Path


class Route(StrEnum):
    """Which parts of the model answer a request."""

    TEXT = "text"
    """The language model alone."""
    MEDIA = "media"
    """The vision tower as well, unless its output is still cached."""
    HANDOVER = "handover"
    """None: another server answers it."""


@dataclass(frozen=True, slots=True)
class MediaPolicy:
    """Where media may come from. `data:` URLs and plain base64 are always accepted.

    hosts: allowed in http(s) URLs; `*.name` is every subdomain, `*` any host. `host:port` allows that port, a bare host
    the scheme's default port. Empty: no URLs.
    root: folder whose files may be named; None: no files.
    max_bytes: of one item.
    timeout_s: for one download, redirects included.
    max_redirects: for one item.
    """

    hosts: tuple[str, ...] = ()
    root: Path | None = None
    max_bytes: int = 64 * 1024 * 1024
    timeout_s: float = 20.0
    max_redirects: int = 3


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits of one item.

    image_pixels: of a picture as stored, and of one video frame.
    video_s: seconds of a video.
    video_frames: frames in it.
    sampled_frames: frames used.
    fps: of a video unless its request sets it; None is the model's.
    image_decode_s, video_decode_s: seconds to decode one picture or video.
    tokens: placeholders of one item; None is no limit.
    """

    image_pixels: int = 89_000_000
    video_s: float = 1800.0
    video_frames: int = 108_000
    sampled_frames: int = 768
    fps: float | None = None
    image_decode_s: float = 20.0
    video_decode_s: float = 120.0
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """A request's options for one item; None is the checkpoint's default.

    min_pixels, max_pixels: see families/vision.py. fps, max_frames: of a video;
    num_frames: exactly so many instead.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    fps: float | None = None
    max_frames: int | None = None
    num_frames: int | None = None


DEFAULT_MEDIA_OPTIONS = MediaOptions()
"""The checkpoint's defaults."""


@dataclass(frozen=True, slots=True, eq=False)
class MediaInput:
    """An image or a part of a video, standing for the placeholder tokens `start` to `end`.

    pixels: bytes in the vision tower's order, C-contiguous; for Qwen [patches, channels * temporal * height * width of
    a patch].
    grid: of patches: time, rows, columns.
    mean, std: per channel; the tower sees (byte / 255 - mean) / std.
    digest: sha256 of everything that decides the embeddings: pixels, shape and grid.
    fields: for a model that runs whole, the placeholders as `input_ids` and its processor's other outputs; pixels are
    then the original picture's.
    """

    start: int
    end: int
    pixels: memoryview
    grid: tuple[int, int, int]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    digest: bytes
    fields: Mapping[str, memoryview] = field(default_factory=dict)


class Bidirectional(Enum):
    """The layers in which an input's tokens attend to each other in both directions; they are then computed at once."""

    NOWHERE = auto()
    WINDOWS = auto()
    """Layers with a sliding window."""
    EVERYWHERE = auto()


@dataclass(frozen=True, slots=True, eq=False)
class PromptMedia:
    """All media of one prompt.

    inputs: in the prompt's order, without overlaps.
    positions: int32 [3, prompt tokens]: each token's time, row and column in rotary embedding; None where the model
    only counts tokens.
    rope_delta: position minus index for tokens after the prompt, on all three axes.
    """

    inputs: tuple[MediaInput, ...]
    positions: memoryview | None = None
    rope_delta: int = 0
    bidirectional: Bidirectional = Bidirectional.NOWHERE
