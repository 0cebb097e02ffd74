"""Converts the knobs for media."""

from __future__ import annotations

from pathlib import Path

from headrace.config import MediaConfig
from headrace.errors import ConfigError
from headrace.types.media import MediaLimits, MediaPolicy


def media_policy(config: MediaConfig) -> MediaPolicy:
    """Where media may come from. Raises ConfigError for a media folder that does not exist."""
    root = None if config.media_root is None else Path(config.media_root).expanduser()
    if root is not None and not root.is_dir():
        raise ConfigError(f"--media-root: there is no folder {root}")
    return MediaPolicy(config.media_hosts, root, config.media_max_bytes, config.media_timeout_s)


def media_limits(config: MediaConfig) -> MediaLimits:
    return MediaLimits(
        image_pixels=config.image_max_pixels,
        video_s=config.video_max_s,
        sampled_frames=config.video_max_frames,
        fps=config.video_fps,
    )
