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
from headrace.media.video import FrameTimes, SampledFrames, group_times, num_sampled, read_frames, read_metadata, sample
from headrace.types.media import DEFAULT_MEDIA_OPTIONS, MediaLimits, MediaOptions


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

    Raises InvalidRequest that names the item's field, ContextTooLong for too many tokens.
    """
    preparation = _Preparation(item, vision, limits)
    if item.kind == "image":
        return (preparation.image(item.files[0]),)
    if vision.sees_videos:
        return (preparation.frames() if item.is_frames else preparation.video(),)
    return preparation.frames_as_images() if item.is_frames else preparation.video_as_images()


def read_pictures(item: MediaFiles, limits: MediaLimits) -> list[Pixels]:
    """The picture, or frames of a video, for a model without a vision record. Raises as `prepare`."""
    if item.is_frames:
        _check_frames(item, limits)
    if item.kind == "image" or item.is_frames:
        return [decode_image(file, limits.image_pixels, item.param) for file in item.files]
    metadata = read_metadata(item.files[0], limits, item.param)
    samples = choose_frames(metadata.frames, UNKNOWN_VISION, limits, item.options)
    return read_frames(item.files[0], metadata, samples.indices, lambda picture: picture, limits, item.param)


def choose_frames(
    frames: FrameTimes, vision: PatchVision, limits: MediaLimits, options: MediaOptions = DEFAULT_MEDIA_OPTIONS
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


def _check_frames(item: MediaFiles, limits: MediaLimits) -> None:
    if not 0 < len(item.files) <= limits.sampled_frames:
        message = f"{item.param} holds {len(item.files)} frames, but must hold 1 to {limits.sampled_frames}"
        raise InvalidRequest(message, param=item.param)


@dataclass(frozen=True, slots=True)
class _Preparation:
    """An item as the input of one model."""

    item: MediaFiles
    vision: PatchVision
    limits: MediaLimits

    def image(self, file: bytes) -> PreparedImage:
        picture = self._decoded(file)
        size = self._image_size(_size_of(picture))
        self._check_tokens(1, size)
        return self._still(self._scaled(picture, size))

    def video(self) -> PreparedVideo:
        (file,), param = self.item.files, self.item.param
        metadata = read_metadata(file, self.limits, param)
        samples = choose_frames(metadata.frames, self.vision, self.limits, self.item.options)
        size = self._frame_size(len(samples.indices), metadata.size)
        pictures = read_frames(
            file, metadata, samples.indices, lambda picture: scaled(picture, size), self.limits, param
        )
        return self._timed(pictures, samples, metadata.frames)

    def video_as_images(self) -> tuple[PreparedImage, ...]:
        (file,), param = self.item.files, self.item.param
        metadata = read_metadata(file, self.limits, param)
        samples = choose_frames(metadata.frames, self.vision, self.limits, self.item.options)
        size = self._image_size(metadata.size)
        self._check_tokens(len(samples.indices), size)
        pictures = read_frames(
            file, metadata, samples.indices, lambda picture: self._scaled(picture, size), self.limits, param
        )
        return tuple(self._still(picture) for picture in pictures)

    def frames(self) -> PreparedVideo:
        """A video given as image files; all are used, because the client chose them."""
        files = self.item.files
        _check_frames(self.item, self.limits)
        rate = self.item.options.fps or self.limits.fps or self.vision.sampling.fps
        times = FrameTimes(len(files), rate)
        size = self._frame_size(len(files), _size_of(self._decoded(files[0])))
        pictures = [scaled(self._decoded(file), size) for file in files]
        return self._timed(pictures, sample(times, len(files)), times)

    def frames_as_images(self) -> tuple[PreparedImage, ...]:
        _check_frames(self.item, self.limits)
        return tuple(self.image(file) for file in self.item.files)

    def _decoded(self, file: bytes) -> Pixels:
        return decode_image(file, self.limits.image_pixels, self.item.param)

    def _scaled(self, picture: Pixels, size: Size) -> Pixels:
        return scaled(picture, size, is_bicubic=self.vision.is_bicubic)

    def _image_size(self, size: Size) -> Size:
        vision, options, param = self.vision, self.item.options, self.item.param
        is_fixed = vision.side is not None or vision.max_tokens is not None
        if is_fixed and (options.min_pixels is not None or options.max_pixels is not None):
            message = f"{param}: min_pixels and max_pixels are not supported: the model takes images of one size"
            raise UnsupportedField(message, param=param)
        if vision.side is not None:
            return vision.side, vision.side
        if vision.max_tokens is not None:
            return size_within_tokens(size, vision.factor, vision.max_tokens)
        try:
            return image_size(size, vision.factor, _within(vision.image, options))
        except ValueError as error:
            raise InvalidRequest(f"{param}: {error}", param=param) from error

    def _frame_size(self, num_frames: int, size: Size) -> Size:
        vision, param = self.vision, self.item.param
        try:
            found = video_size(num_frames, size, replace(vision, video=_within(vision.video, self.item.options)))
        except ValueError as error:
            raise InvalidRequest(f"{param}: {error}", param=param) from error
        self._check_tokens(-(-num_frames // vision.temporal_patch_size), found)
        return found

    def _check_tokens(self, num_groups: int, size: Size) -> None:
        grid = (num_groups, size[0] // self.vision.patch_size, size[1] // self.vision.patch_size)
        num_tokens = num_media_tokens(grid, self.vision)
        if self.limits.tokens is not None and num_tokens >= self.limits.tokens:
            raise ContextTooLong.of_prompt(self.limits.tokens, num_tokens, self.item.param, at_least=True)

    def _still(self, picture: Pixels) -> PreparedImage:
        """A picture of the right size, repeated for all frames of a patch."""
        depth = self.vision.temporal_patch_size
        patches, grid = to_patches(np.broadcast_to(picture, (depth, *picture.shape)), self.vision)
        return PreparedImage(patches, grid)

    def _timed(self, pictures: Sequence[Pixels], samples: SampledFrames, frames: FrameTimes) -> PreparedVideo:
        patches, grid = to_patches(np.stack(pictures), self.vision)
        # sampled frames per second, as transformers counts them
        rate = len(pictures) / frames.num_frames * frames.rate
        depth = self.vision.temporal_patch_size
        return PreparedVideo(patches, grid, group_times(samples.times, depth), depth / rate)


def _within(pixels: PixelRange, options: MediaOptions) -> PixelRange:
    return PixelRange(
        pixels.minimum if options.min_pixels is None else options.min_pixels,
        pixels.maximum if options.max_pixels is None else options.max_pixels,
    )


def _size_of(picture: Pixels) -> Size:
    height, width, _ = picture.shape
    return height, width
