"""What the flags about media come to."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.media import media_limits, media_policy
from headrace.config import load_config
from headrace.errors import ConfigError
from headrace.types.media import MediaLimits, MediaPolicy


def test_by_default_nothing_outside_of_the_request_is_read() -> None:
    config = load_config([], {}).media
    assert media_policy(config) == MediaPolicy(hosts=(), root=None)
    assert media_limits(config) == MediaLimits()


def test_flags_reach_the_policy_and_the_limits(tmp_path: Path) -> None:
    flags = ["--media-hosts", "a.example", "--media-hosts", "*.b.example", "--media-root", str(tmp_path)]
    flags += ["--media-max-bytes", "9", "--media-timeout-s", "2", "--image-max-pixels", "8", "--video-fps", "0.5"]
    flags += ["--video-max-frames", "7", "--video-max-s", "6"]
    config = load_config(flags, {}).media
    assert media_policy(config) == MediaPolicy(("a.example", "*.b.example"), tmp_path, 9, 2.0)
    assert media_limits(config) == MediaLimits(image_pixels=8, video_s=6.0, sampled_frames=7, fps=0.5)


def test_a_media_folder_that_is_none_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--media-root"):
        media_policy(load_config(["--media-root", str(tmp_path / "none")], {}).media)
