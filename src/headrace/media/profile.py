"""One checkpoint's vision settings: its family's values, overridden by the checkpoint's own files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.errors import ModelError
from headrace.families.vision import Channels, FrameSampling, PatchVision, PixelRange, VisionTokens, find_vision
from headrace.types.media import Bidirectional


@dataclass(frozen=True, slots=True)
class VisionProfile:
    """What is needed to prepare media for a checkpoint."""

    vision: PatchVision
    tokens: VisionTokens


def read_profile(directory: Path, config: Mapping[str, Any]) -> VisionProfile | None:
    """The profile of the checkpoint in a folder; None if it has no vision tower or an unknown one.

    config: its config.json. Raises ModelError for unreadable files and missing token ids.
    """
    vision = find_vision(config.get("model_type", ""))
    if vision is None or not config.get("vision_config"):
        return None
    image, video = _processor_settings(directory)
    if vision.side is not None:
        return VisionProfile(_square(vision, config, image), _tokens(config, vision))
    if vision.max_tokens is not None:
        return VisionProfile(_within_tokens(vision, config, image), _tokens(config, vision))
    # The patch shape is the tower's and the same for both; pixel limits may differ.
    vision = replace(
        vision,
        patch_size=image.get("patch_size", vision.patch_size),
        temporal_patch_size=image.get("temporal_patch_size", vision.temporal_patch_size),
        merge_size=image.get("merge_size", vision.merge_size),
        mean=_channels(image.get("image_mean"), vision.mean),
        std=_channels(image.get("image_std"), vision.std),
        image=_pixels(image, vision.image),
        video=_pixels(video, vision.video),
        sampling=_sampling(video, vision.sampling),
        caps_frames=bool(video.get("cap_pixels_per_frame") or False),
        tokens_per_second=config["vision_config"].get("tokens_per_second"),
    )
    return VisionProfile(vision, _tokens(config, vision))


def _square(vision: PatchVision, config: Mapping[str, Any], image: Mapping[str, Any]) -> PatchVision:
    """The profile of a tower with pictures of one size: config.json gives the size and the number of tokens."""
    tower = config["vision_config"]
    try:
        side, patch_size = int(tower["image_size"]), int(tower["patch_size"])
    except KeyError as error:
        raise ModelError(f"config.json's vision_config has no {error.args[0]}") from error
    num_tokens = config.get("mm_tokens_per_image") or None
    on_side = side // patch_size
    merge_size = vision.merge_size if num_tokens is None else int(on_side / math.sqrt(num_tokens))
    if side % patch_size or (num_tokens is not None and merge_size * math.sqrt(num_tokens) != on_side):
        raise ModelError(f"config.json: {side} pixels in patches of {patch_size} don't make {num_tokens} tokens")
    return replace(
        vision,
        side=side,
        patch_size=patch_size,
        merge_size=merge_size,
        mean=_channels(image.get("image_mean"), vision.mean),
        std=_channels(image.get("image_std"), vision.std),
    )


def _within_tokens(vision: PatchVision, config: Mapping[str, Any], image: Mapping[str, Any]) -> PatchVision:
    """The profile of a tower that makes about as many tokens of every picture; it scales the channels itself."""
    tower = config["vision_config"]
    sees_both_ways = (config.get("text_config") or {}).get("use_bidirectional_attention") == "vision"
    return replace(
        vision,
        patch_size=tower.get("patch_size", vision.patch_size),
        merge_size=tower.get("pooling_kernel_size", vision.merge_size),
        max_tokens=image.get("max_soft_tokens") or config.get("vision_soft_tokens_per_image") or vision.max_tokens,
        bidirectional=Bidirectional.WINDOWS if sees_both_ways else Bidirectional.NOWHERE,
    )


_TOKEN_FIELDS = (
    {"start": "vision_start_token_id", "end": "vision_end_token_id", "image": "image_token_id"},
    {"start": "boi_token_index", "end": "eoi_token_index", "image": "image_token_index"},
    {"start": "boi_token_id", "end": "eoi_token_id", "image": "image_token_id"},
)
"""What families call them in config.json."""


def _tokens(config: Mapping[str, Any], vision: PatchVision) -> VisionTokens:
    names = next((each for each in _TOKEN_FIELDS if config.get(each["start"]) is not None), _TOKEN_FIELDS[0])
    if vision.sees_videos:
        names = {**names, "video": "video_token_id"}
    missing = [name for name in names.values() if config.get(name) is None]
    if missing:
        raise ModelError(f"config.json has a vision_config but no {missing[0]}")
    ids = {field: int(config[name]) for field, name in names.items()}
    mark = None if vision.mark is None else ids["start" if vision.marks_by_start else "image"]
    return VisionTokens(ids["start"], ids["end"], ids["image"], ids.get("video"), mark)


def _processor_settings(directory: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Settings for images and for videos, from the files that transformers reads, in its order."""
    both = _read(directory / "processor_config.json")
    image = both.get("image_processor") or _read(directory / "preprocessor_config.json")
    return image, both.get("video_processor") or _read(directory / "video_preprocessor_config.json") or image


def _read(path: Path) -> Mapping[str, Any]:
    """Empty if there is no file."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read: {error}") from error
    if not isinstance(settings, dict):
        raise ModelError(f"{path} holds no JSON object")
    return settings


def _pixels(settings: Mapping[str, Any], default: PixelRange) -> PixelRange:
    """`size` holds areas, though named as edges; older files name them pixels."""
    size = settings.get("size") or {}
    minimum = settings.get("min_pixels") or size.get("shortest_edge") or default.minimum
    maximum = settings.get("max_pixels") or size.get("longest_edge") or default.maximum
    return PixelRange(minimum, maximum)


def _sampling(settings: Mapping[str, Any], default: FrameSampling) -> FrameSampling:
    return FrameSampling(
        fps=settings.get("fps") or default.fps,
        min_frames=settings.get("min_frames") or default.min_frames,
        max_frames=settings.get("max_frames") or default.max_frames,
    )


def _channels(values: Any, default: Channels) -> Channels:
    if values is None:
        return default
    red, green, blue = values
    return (red, green, blue)
