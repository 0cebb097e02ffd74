"""Prepares images and videos for a prompt. Pure: may run in any thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from headrace.errors import ContextTooLong, InvalidRequest, UnsupportedField
from headrace.families.vision import UNKNOWN_VISION, FrameSampling, PatchVision, PixelRange
from headrace.media.image import decode_image
from headrace.media.patches import (
    Pixels,
    PreparedImage,
    PreparedMedia,
    PreparedVideo,
    Size,
    image_size,
    scaled,
    size_within_tokens,
    to_patches,
    video_size,
)
from headrace.media.prompt import num_media_tokens
from headrace.media.video import FrameTimes, SampledFrames, group_times, num_sampled, read_frames, read_outline, sample
from headrace.types.media import AS_MADE, MediaLimits, MediaOptions


@dataclass(frozen=True, slots=True)
class MediaFiles:
    """A picture or a video as received.

    files: one, or the pictures of a video given as frames (is_frames). param: its request field.
    """

    kind: Literal["image", "video"]
    files: tuple[bytes, ...]
    is_frames: bool
    options: MediaOptions
    param: str


def prepare(item: MediaFiles, vision: PatchVision, limits: MediaLimits) -> tuple[PreparedMedia, ...]:
    """The model's input for the item; for a model without video, one picture per frame.

    Raises InvalidRequest that names the item's field, ContextTooLong.
    """
    files, param, options = item.files, item.param, item.options
    if item.kind == "image":
        return (prepare_image(files[0], vision, limits, param, options),)
    if not vision.sees_videos:
        if item.is_frames:
            return prepare_frames_as_images(files, vision, limits, param, options)
        return prepare_video_as_images(files[0], vision, limits, param, options)
    if item.is_frames:
        rate = options.fps or limits.fps or vision.sampling.fps
        return (prepare_frames(files, rate, vision, limits, param, options),)
    return (prepare_video(files[0], vision, limits, param, options),)


def read_pictures(item: MediaFiles, limits: MediaLimits) -> list[Pixels]:
    """The picture, or frames of a video, for a model without a vision record. Raises as `prepare`."""
    if item.is_frames:
        check_frames(item.files, limits, item.param)
    if item.kind == "image" or item.is_frames:
        return [decode_image(file, limits.image_pixels, item.param) for file in item.files]
    outline = read_outline(item.files[0], limits, item.param)
    samples = choose_frames(outline.frames, UNKNOWN_VISION, limits, item.options)
    return read_frames(item.files[0], outline, samples.indices, lambda picture: picture, limits, item.param)


def prepare_image(
    data: bytes, vision: PatchVision, limits: MediaLimits, param: str, options: MediaOptions = AS_MADE
) -> PreparedImage:
    """An image file as patches. Raises InvalidRequest that names `param`, ContextTooLong for too many tokens."""
    picture = decode_image(data, limits.image_pixels, param)
    size = _image_size(_size_of(picture), vision, param, options)
    _check_tokens(1, size, vision, limits, param)
    return _still(scaled(picture, size, is_bicubic=vision.is_bicubic), vision)


def prepare_video(
    data: bytes, vision: PatchVision, limits: MediaLimits, param: str, options: MediaOptions = AS_MADE
) -> PreparedVideo:
    """A video file as patches of sampled frames. Raises InvalidRequest that names `param`, ContextTooLong."""
    outline = read_outline(data, limits, param)
    samples = choose_frames(outline.frames, vision, limits, options)
    size = _frame_size(len(samples.indices), outline.size, vision, limits, param, options)
    pictures = read_frames(data, outline, samples.indices, lambda picture: scaled(picture, size), limits, param)
    return _video(pictures, samples, outline.frames, vision)


def prepare_video_as_images(
    data: bytes, vision: PatchVision, limits: MediaLimits, param: str, options: MediaOptions = AS_MADE
) -> tuple[PreparedImage, ...]:
    """The sampled frames of a video file as pictures. Raises as `prepare_video`."""
    outline = read_outline(data, limits, param)
    samples = choose_frames(outline.frames, vision, limits, options)
    size = _image_size(outline.size, vision, param, options)
    _check_tokens(len(samples.indices), size, vision, limits, param)

    def read(picture: Pixels) -> Pixels:
        return scaled(picture, size, is_bicubic=vision.is_bicubic)

    pictures = read_frames(data, outline, samples.indices, read, limits, param)
    return tuple(_still(picture, vision) for picture in pictures)


def prepare_frames_as_images(
    files: Sequence[bytes], vision: PatchVision, limits: MediaLimits, param: str, options: MediaOptions = AS_MADE
) -> tuple[PreparedImage, ...]:
    """A video given as image files, as pictures. Raises as `prepare_frames`."""
    check_frames(files, limits, param)
    return tuple(prepare_image(file, vision, limits, param, options) for file in files)


def prepare_frames(
    files: Sequence[bytes],
    rate: float,
    vision: PatchVision,
    limits: MediaLimits,
    param: str,
    options: MediaOptions = AS_MADE,
) -> PreparedVideo:
    """A video given as image files, `rate` per second; all are used, because the client chose them.

    Raises InvalidRequest that names `param`, ContextTooLong.
    """
    check_frames(files, limits, param)
    times = FrameTimes(len(files), rate)
    first = decode_image(files[0], limits.image_pixels, param)
    size = _frame_size(len(files), _size_of(first), vision, limits, param, options)
    pictures = [scaled(decode_image(file, limits.image_pixels, param), size) for file in files]
    return _video(pictures, sample(times, len(files)), times, vision)


def choose_frames(
    frames: FrameTimes, vision: PatchVision, limits: MediaLimits, options: MediaOptions = AS_MADE
) -> SampledFrames:
    """Sample frames of a video: the request's options, else the checkpoint's, within the limits."""
    wanted = vision.sampling
    sampling = FrameSampling(
        fps=options.fps or limits.fps or wanted.fps,
        min_frames=wanted.min_frames,
        max_frames=wanted.max_frames if options.max_frames is None else options.max_frames,
    )
    multiple_of = vision.temporal_patch_size if vision.takes_whole_groups else 1
    num_samples = num_sampled(frames.num_frames, frames.rate, sampling, multiple_of)
    if options.num_frames is not None:
        num_samples = min(options.num_frames, frames.num_frames)
    return sample(frames, min(num_samples, limits.sampled_frames), with_last=not vision.takes_whole_groups)


def _image_size(size: Size, vision: PatchVision, param: str, options: MediaOptions) -> Size:
    is_fixed = vision.side is not None or vision.max_tokens is not None
    if is_fixed and (options.min_pixels is not None or options.max_pixels is not None):
        message = f"{param}: min_pixels and max_pixels: the model takes pictures of one size"
        raise UnsupportedField(message, param=param)
    if vision.side is not None:
        return vision.side, vision.side
    if vision.max_tokens is not None:
        return size_within_tokens(size, vision.factor, vision.max_tokens)
    try:
        return image_size(size, vision.factor, _within(vision.image, options))
    except ValueError as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from error


def _still(picture: Pixels, vision: PatchVision) -> PreparedImage:
    """A picture of the right size, repeated for all frames of a patch."""
    patches, grid = to_patches(np.broadcast_to(picture, (vision.temporal_patch_size, *picture.shape)), vision)
    return PreparedImage(patches, grid)


def _video(
    pictures: Sequence[Pixels], samples: SampledFrames, frames: FrameTimes, vision: PatchVision
) -> PreparedVideo:
    patches, grid = to_patches(np.stack(pictures), vision)
    # Sampled frames per second, as transformers counts them.
    rate = len(pictures) / frames.num_frames * frames.rate
    depth = vision.temporal_patch_size
    return PreparedVideo(patches, grid, group_times(samples.times, depth), depth / rate)


def _frame_size(
    num_frames: int, size: Size, vision: PatchVision, limits: MediaLimits, param: str, options: MediaOptions
) -> Size:
    try:
        scaled_to = video_size(num_frames, size, replace(vision, video=_within(vision.video, options)))
    except ValueError as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from error
    _check_tokens(-(-num_frames // vision.temporal_patch_size), scaled_to, vision, limits, param)
    return scaled_to


def _check_tokens(num_groups: int, size: Size, vision: PatchVision, limits: MediaLimits, param: str) -> None:
    grid = (num_groups, size[0] // vision.patch_size, size[1] // vision.patch_size)
    num_tokens = num_media_tokens(grid, vision)
    if limits.tokens is not None and num_tokens >= limits.tokens:
        raise ContextTooLong.of_prompt(limits.tokens, num_tokens, param, at_least=True)


def check_frames(files: Sequence[bytes], limits: MediaLimits, param: str) -> None:
    """Raise InvalidRequest that names `param` for no frames or too many."""
    if not 0 < len(files) <= limits.sampled_frames:
        message = f"{param} holds {len(files)} frames, it must be 1 to {limits.sampled_frames}"
        raise InvalidRequest(message, param=param)


def _within(pixels: PixelRange, options: MediaOptions) -> PixelRange:
    return PixelRange(
        pixels.minimum if options.min_pixels is None else options.min_pixels,
        pixels.maximum if options.max_pixels is None else options.max_pixels,
    )


def _size_of(picture: Pixels) -> Size:
    height, width, _ = picture.shape
    return height, width
