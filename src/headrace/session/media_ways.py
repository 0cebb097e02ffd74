"""How files of images and videos become what a model is shown, and find their place in its prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace.engine.engine import load_processor
from headrace.errors import InvalidRequest, UnsupportedField
from headrace.families.vision import GEMMA3_VISION
from headrace.media.digest import pixel_digest
from headrace.media.image import decode_image
from headrace.media.patches import Pixels
from headrace.media.prepare import (
    check_frames,
    choose_frames,
    prepare_frames,
    prepare_frames_as_images,
    prepare_image,
    prepare_video,
    prepare_video_as_images,
)
from headrace.media.prepared import PreparedMedia
from headrace.media.profile import VisionProfile, read_profile
from headrace.media.prompt import EncodeText, ExpandedPrompt, expand, num_media_tokens
from headrace.media.video import read_frames, read_outline
from headrace.types.chat import MediaPart
from headrace.types.media import MediaInput, MediaLimits, PromptMedia
from headrace.types.model import ModelDescription

Process = Callable[[Pixels], tuple[tuple[int, ...], Mapping[str, npt.NDArray[Any]]]]
"""A family's processor: the tokens in a picture's place, and what else it makes. Raises ValueError."""


@dataclass(frozen=True, slots=True)
class ShownItem:
    """A picture or a video, ready for a prompt.

    prepared: of the way's own kind. num_tokens: that a prompt has of it.
    """

    prepared: Any
    num_tokens: int
    num_bytes: int


class MediaWay(Protocol):
    """The way of one model. sees_videos: else the frames of a video are shown as pictures."""

    sees_videos: bool

    def prepare(
        self, part: MediaPart, files: Sequence[bytes], is_frames: bool, limits: MediaLimits
    ) -> tuple[ShownItem, ...]:
        """What the model is shown of the file of an image or a video, or of the files of a video's frames.

        May run in any thread. Raises InvalidRequest that names the part, ContextTooLong.
        """

    def expand(self, token_ids: Sequence[int], items: Sequence[ShownItem]) -> ExpandedPrompt:
        """The prompt with all items in their places. Raises ValueError if those don't fit."""


class TowerWay:
    """For models whose tower is known here."""

    def __init__(self, profile: VisionProfile, encode: EncodeText) -> None:
        """encode: of the model's tokenizer."""
        self.sees_videos = profile.vision.sees_videos
        self._profile = profile
        self._encode = encode

    def prepare(
        self, part: MediaPart, files: Sequence[bytes], is_frames: bool, limits: MediaLimits
    ) -> tuple[ShownItem, ...]:
        vision = self._profile.vision
        return tuple(
            ShownItem(one, num_media_tokens(one.grid, vision), one.patches.nbytes)
            for one in self._prepare(part, files, is_frames, limits)
        )

    def _prepare(
        self, part: MediaPart, files: Sequence[bytes], is_frames: bool, limits: MediaLimits
    ) -> tuple[PreparedMedia, ...]:
        vision = self._profile.vision
        if part.kind == "image":
            return (prepare_image(files[0], vision, limits, part.param, part.options),)
        if not vision.sees_videos:
            if is_frames:
                return prepare_frames_as_images(files, vision, limits, part.param, part.options)
            return prepare_video_as_images(files[0], vision, limits, part.param, part.options)
        if is_frames:
            rate = part.options.fps or limits.fps or vision.sampling.fps
            return (prepare_frames(files, rate, vision, limits, part.param, part.options),)
        return (prepare_video(files[0], vision, limits, part.param, part.options),)

    def expand(self, token_ids: Sequence[int], items: Sequence[ShownItem]) -> ExpandedPrompt:
        return expand(token_ids, [item.prepared for item in items], self._profile, self._encode)


class ProcessorWay:
    """For models that run whole: their family's processor says what stands in a picture's place."""

    sees_videos = False

    def __init__(self, process: Process, mark_id: int) -> None:
        """mark_id: the token that a chat template writes where a picture belongs."""
        self._process = process
        self._mark_id = mark_id

    def prepare(
        self, part: MediaPart, files: Sequence[bytes], is_frames: bool, limits: MediaLimits
    ) -> tuple[ShownItem, ...]:
        if part.options.min_pixels is not None or part.options.max_pixels is not None:
            message = f"{part.param}: min_pixels and max_pixels: the model's processor decides how large pictures are"
            raise UnsupportedField(message, param=part.param)
        return tuple(self._shown(picture, part.param) for picture in _pictures(part, files, is_frames, limits))

    def _shown(self, picture: Pixels, param: str) -> ShownItem:
        try:
            token_ids, made = self._process(picture)
        except ValueError as error:
            raise InvalidRequest(f"{param}: {error}", param=param) from error
        fields = {"input_ids": np.array([token_ids]), **made}
        views = {name: np.ascontiguousarray(value).data for name, value in fields.items()}
        grid = (1, *picture.shape[:2])
        digest = pixel_digest(picture, grid, (0,))
        one = MediaInput(0, len(token_ids), picture.data, grid, (0.0,) * 3, (1.0,) * 3, digest, views)
        num_bytes = picture.nbytes + sum(value.nbytes for value in fields.values())
        return ShownItem((token_ids, one), len(token_ids), num_bytes)

    def expand(self, token_ids: Sequence[int], items: Sequence[ShownItem]) -> ExpandedPrompt:
        places = [index for index, token_id in enumerate(token_ids) if token_id == self._mark_id]
        if len(places) != len(items):
            raise ValueError(f"the prompt has {len(places)} places for its {len(items)} pictures")
        expanded: list[int] = []
        inputs, grown, done = [], [], 0
        for place, item in zip(places, items, strict=True):
            shown, one = item.prepared
            expanded += token_ids[done:place]
            inputs.append(replace(one, start=len(expanded), end=len(expanded) + len(shown)))
            expanded += shown
            done = place + 1
            grown.append((done, len(expanded) - done))
        return ExpandedPrompt((*expanded, *token_ids[done:]), PromptMedia(tuple(inputs)), tuple(grown))


def find_way(model: ModelDescription, encode: EncodeText) -> MediaWay | None:
    """The way of a loaded model; None if it sees nothing. encode: of its tokenizer. Raises ModelError."""
    if not model.takes_media:
        return None
    profile = read_profile(model.directory, model.config)
    if profile is not None:
        return TowerWay(profile, encode)
    processor = load_processor(model)
    return ProcessorWay(processor, processor.mark_id)


def _pictures(part: MediaPart, files: Sequence[bytes], is_frames: bool, limits: MediaLimits) -> Sequence[Pixels]:
    """The picture, or the frames that are looked at of a video."""
    if is_frames:
        check_frames(files, limits, part.param)
    if part.kind == "image" or is_frames:
        return [decode_image(file, limits.image_pixels, part.param) for file in files]
    outline = read_outline(files[0], limits, part.param)
    # as many as of the other families that know no videos
    samples = choose_frames(outline.frames, GEMMA3_VISION, limits, part.options)
    return read_frames(files[0], outline, samples.indices, lambda picture: picture, limits, part.param)
