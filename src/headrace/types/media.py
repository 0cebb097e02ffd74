"""Images and videos: what of them a server takes, what a request says about them, and what the engine gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from pathlib import Path


class Route(StrEnum):
    """What a request needs of the model."""

    TEXT = "text"
    """The language model alone."""
    MEDIA = "media"
    """Its vision tower as well, unless what that has made of the pictures is still held."""


@dataclass(frozen=True, slots=True)
class MediaPolicy:
    """Where media may come from. `data:` URLs and plain base64 are always taken.

    hosts: that http(s) URLs may name; `*.name` is every host below a name, `*` any. `host:port` allows that port,
    without one it is the scheme's own. Empty: no URL.
    root: folder whose files may be named; None: no file.
    max_bytes: of one item. timeout_s: for one item from the net, all redirects counted. max_redirects: for one item.
    """

    hosts: tuple[str, ...] = ()
    root: Path | None = None
    max_bytes: int = 64 * 1024 * 1024
    timeout_s: float = 20.0
    max_redirects: int = 3


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """How much one item may hold.

    image_pixels: of a picture as stored, and of one frame of a video. video_s: seconds of a video. video_frames: frames
    that it holds. sampled_frames: that are looked at. fps: of a video unless its request says; None is the model's own.
    image_decode_s, video_decode_s: seconds of work on one picture and on one video.
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
    """What a request says about one item; None is the checkpoint's own.

    min_pixels, max_pixels: see families/vision.py. fps, max_frames: of a video; num_frames: exactly so many instead.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    fps: float | None = None
    max_frames: int | None = None
    num_frames: int | None = None


AS_MADE = MediaOptions()
"""As the checkpoint's makers would have it."""


@dataclass(frozen=True, slots=True, eq=False)
class MediaInput:
    """What the placeholder tokens `start` to `end` of a prompt stand for: an image, or a part of a video.

    pixels: bytes in the order in which the model's vision tower takes them, C-contiguous; for Qwen
    [patches, channels * temporal * height * width of a patch].
    grid: of patches: time, rows, columns.
    mean, std: per channel; the tower sees (byte / 255 - mean) / std.
    digest: sha256 of all that decides the embeddings: pixels, their shape and the grid.
    fields: for a model that runs whole, the placeholders as `input_ids` and what its family's processor has made of the
    picture; pixels are then those of the picture as it came.
    """

    start: int
    end: int
    pixels: memoryview
    grid: tuple[int, int, int]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    digest: bytes
    fields: Mapping[str, memoryview] = field(default_factory=dict)


class TwoWay(Enum):
    """In which layers tokens of one input see each other, whatever their order; they are computed at once then."""

    NOWHERE = auto()
    WINDOWS = auto()
    """In those with a sliding window."""
    EVERYWHERE = auto()


@dataclass(frozen=True, slots=True, eq=False)
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
    two_way: TwoWay = TwoWay.NOWHERE
