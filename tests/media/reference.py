"""Figures of tests/data/vision/qwen.json, unpacked, and the test pictures that they are about."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.families.vision import QWEN2_VISION, QWEN3_VISION, PatchVision, PixelRange, VisionTokens
from headrace.media.patches import PreparedImage, PreparedVideo
from headrace.media.prepare import MediaFiles, prepare
from headrace.media.profile import VisionProfile
from headrace.types.media import DEFAULT_MEDIA_OPTIONS, MediaLimits, MediaOptions

REFERENCE: Mapping[str, Any] = json.loads(
    (Path(__file__).parent.parent / "data" / "vision" / "qwen.json").read_text("utf-8")
)

_FAMILIES = {"qwen3": QWEN3_VISION, "qwen2_5": replace(QWEN2_VISION, tokens_per_second=2)}


def cases(section: str, *, refused: bool = False) -> list[Any]:
    """Cases of a section that transformers answers, or those that it refuses."""
    return [case for case in REFERENCE[section] if ("error" in case["expect"]) == refused]


def name(case: Mapping[str, Any]) -> str:
    return str(case["id"])


def vision_of(case: Mapping[str, Any], kind: str = "image") -> PatchVision:
    """The family's record, with what the case says about a processor's configuration."""
    vision = _FAMILIES[case["family"]]
    pixels: PixelRange = getattr(vision, kind)
    pixels = PixelRange(case.get("min_pixels", pixels.minimum), case.get("max_pixels", pixels.maximum))
    sampling = replace(vision.sampling, max_frames=case.get("max_frames", vision.sampling.max_frames))
    caps = case.get("cap_pixels_per_frame", False)
    return replace(vision, **{kind: pixels}, sampling=sampling, caps_frames=caps)


def options_of(case: Mapping[str, Any]) -> MediaOptions:
    """What the case's call says beside the configuration. transformers ignores `max_frames` there."""
    call = case.get("call", {})
    return MediaOptions(fps=call.get("fps"), num_frames=call.get("num_frames"))


def samples_nothing(case: Mapping[str, Any]) -> bool:
    """Whether the case takes every frame."""
    default = case["family"] == "qwen3"
    return not case.get("call", {}).get("do_sample_frames", default)


def profile_of(case: Mapping[str, Any]) -> VisionProfile:
    ids = REFERENCE["meta"]["token_ids"]["qwen3_vl"]
    tokens = VisionTokens(ids["vision_start"], ids["vision_end"], ids["image_pad"], ids["video_pad"])
    return VisionProfile(vision_of(case), tokens)


def from_runs(runs: Sequence[Sequence[int]]) -> list[int]:
    """Runs [start, step, count]."""
    return [start + step * index for start, step, count in runs for index in range(count)]


def from_repeats(runs: Sequence[Sequence[int]]) -> list[int]:
    """Runs [value, count]."""
    return [value for value, count in runs for _ in range(count)]


def picture(pattern: str, size: Sequence[int], frame: int = 0, mode: str = "RGB") -> Any:
    """One of the test patterns as uint8 [height, width, channels] (no last axis for `L`)."""
    height, width = size
    y, x, c = np.meshgrid(np.arange(height), np.arange(width), np.arange(3), indexing="ij")
    if pattern == "hash":
        values = (7 * x + 13 * y + 29 * c + 31 * frame + ((x * y) % 11)) % 256
    else:
        red = 255 * x // max(width - 1, 1)
        green = 255 * y // max(height - 1, 1)
        blue = 255 * (x + y + 2 * frame) // max(width + height - 2 + 2 * frame, 1)
        values = np.where(c == 0, red, np.where(c == 1, green, blue))
    pixels = values.astype(np.uint8)
    if mode == "L":
        return pixels[:, :, 0]
    if mode == "RGBA":
        alpha = ((5 * x[:, :, :1] + 3 * y[:, :, :1]) % 256).astype(np.uint8)
        return np.concatenate([pixels, alpha], axis=2)
    return pixels


def prepare_image(
    file: bytes, vision: PatchVision, limits: MediaLimits, param: str, options: MediaOptions = DEFAULT_MEDIA_OPTIONS
) -> PreparedImage:
    (image,) = prepare(MediaFiles("image", (file,), False, options, param), vision, limits)
    assert isinstance(image, PreparedImage)
    return image


def prepare_video(
    file: bytes, vision: PatchVision, limits: MediaLimits, param: str, options: MediaOptions = DEFAULT_MEDIA_OPTIONS
) -> PreparedVideo:
    (video,) = prepare(MediaFiles("video", (file,), False, options, param), vision, limits)
    assert isinstance(video, PreparedVideo)
    return video


def prepare_frames(
    files: Sequence[bytes], rate: float, vision: PatchVision, limits: MediaLimits, param: str
) -> PreparedVideo:
    """A video given as pictures, so many a second."""
    (video,) = prepare(MediaFiles("video", tuple(files), True, MediaOptions(fps=rate), param), vision, limits)
    assert isinstance(video, PreparedVideo)
    return video
