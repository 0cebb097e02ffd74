"""The values a job hands to the renderer: conversations with known answers, and drawings instead of pixels."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

IMAGE_MARK = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO_MARK = "<|vision_start|><|video_pad|><|vision_end|>"


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call; `arguments` keeps the order in which they are written."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. `thought` is None where nothing was thought; a learned turn counts in the loss."""

    role: str
    text: str = ""
    thought: str | None = None
    calls: tuple[Call, ...] = ()
    learned: bool = True


@dataclass(frozen=True, slots=True)
class Shape:
    """A filled shape; centre and radius are shares of the picture's height and width (radius: of the shorter)."""

    kind: str
    color: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True, slots=True)
class Drawing:
    """One picture: shapes on a plain ground, drawn in order."""

    ground: str
    shapes: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class Clip:
    """One video: a drawing per frame, and the time of each frame in seconds."""

    frames: tuple[Drawing, ...]
    times_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """A conversation. All pictures (or clips) of a sample share one size [height, width] in pixels."""

    job: str
    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    thinking: bool = False
    drawings: tuple[Drawing, ...] = ()
    clip: Clip | None = None
    size: tuple[int, int] = (128, 128)
    facts: Mapping[str, Any] = field(default_factory=dict)


def is_held_out(key: str) -> bool:
    """Whether this key belongs to the held-out split (one in eight), the same in every process."""
    return zlib.crc32(key.encode()) % 8 == 0
