"""What media a server takes: from where, and how much."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
    that it holds. sampled_frames: that are looked at. decode_s: seconds of work on one video.
    tokens: placeholders of one item; None is no limit.
    """

    image_pixels: int = 89_000_000
    video_s: float = 1800.0
    video_frames: int = 108_000
    sampled_frames: int = 768
    decode_s: float = 120.0
    tokens: int | None = None
