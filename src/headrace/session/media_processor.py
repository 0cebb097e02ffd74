"""Turns files of images and videos into the model's inputs and inserts them into its prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace.engine.engine import load_processor
from headrace.errors import InvalidRequest, UnsupportedField
from headrace.media.decoder import MediaDecoder
from headrace.media.patches import Pixels, pixel_digest
from headrace.media.prepare import MediaFiles, prepare, read_pictures
from headrace.media.profile import VisionProfile, read_profile
from headrace.media.prompt import EncodeText, ExpandedPrompt, expand, num_media_tokens
from headrace.types.media import MediaInput, MediaLimits, PromptMedia
from headrace.types.model import ModelDescription

Process = Callable[[Pixels], tuple[tuple[int, ...], Mapping[str, npt.NDArray[Any]]]]
"""A family's processor: the tokens of a picture, and its other outputs. Raises ValueError."""


@dataclass(frozen=True, slots=True)
class ProcessedItem:
    """A picture or a video, ready for a prompt.

    prepared: specific to the processor. num_tokens: in the prompt.
    """

    prepared: Any
    num_tokens: int
    num_bytes: int


class MediaProcessor(Protocol):
    """The media processor of one model. sees_videos: otherwise a video's frames become pictures."""

    sees_videos: bool

    def prepare(self, item: MediaFiles, limits: MediaLimits, decoder: MediaDecoder) -> tuple[ProcessedItem, ...]:
        """The model's inputs for an image or a video.

        May run in any thread. Raises InvalidRequest that names the part, ContextTooLong.
        """

    def expand(self, token_ids: Sequence[int], items: Sequence[ProcessedItem]) -> ExpandedPrompt:
        """The prompt with all items in place. Raises ValueError if they don't match."""


class TowerProcessor:
    """For models whose vision tower is implemented here."""

    def __init__(self, profile: VisionProfile, encode: EncodeText) -> None:
        """encode: the tokenizer's."""
        self.sees_videos = profile.vision.sees_videos
        self._profile = profile
        self._encode = encode

    def prepare(self, item: MediaFiles, limits: MediaLimits, decoder: MediaDecoder) -> tuple[ProcessedItem, ...]:
        vision = self._profile.vision
        prepared = decoder.run(prepare, item, vision, limits, param=item.param, is_video=item.kind == "video")
        return tuple(ProcessedItem(one, num_media_tokens(one.grid, vision), one.patches.nbytes) for one in prepared)

    def expand(self, token_ids: Sequence[int], items: Sequence[ProcessedItem]) -> ExpandedPrompt:
        return expand(token_ids, [item.prepared for item in items], self._profile, self._encode)


class WholeModelProcessor:
    """For models that run whole: their family's processor provides a picture's tokens."""

    sees_videos = False

    def __init__(self, process: Process, mark_id: int) -> None:
        """mark_id: the token that a chat template writes in a picture's place."""
        self._process = process
        self._mark_id = mark_id

    def prepare(self, item: MediaFiles, limits: MediaLimits, decoder: MediaDecoder) -> tuple[ProcessedItem, ...]:
        if item.options.min_pixels is not None or item.options.max_pixels is not None:
            message = f"{item.param}: min_pixels and max_pixels: the model's processor decides how large pictures are"
            raise UnsupportedField(message, param=item.param)
        pictures = decoder.run(read_pictures, item, limits, param=item.param, is_video=item.kind == "video")
        return tuple(self._shown(picture, item.param) for picture in pictures)

    def _shown(self, picture: Pixels, param: str) -> ProcessedItem:
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
        return ProcessedItem((token_ids, one), len(token_ids), num_bytes)

    def expand(self, token_ids: Sequence[int], items: Sequence[ProcessedItem]) -> ExpandedPrompt:
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


def find_media_processor(model: ModelDescription, encode: EncodeText) -> MediaProcessor | None:
    """The processor of a loaded model; None for a text model. encode: its tokenizer's. Raises ModelError."""
    if not model.takes_media:
        return None
    profile = read_profile(model.directory, model.config)
    if profile is not None:
        return TowerProcessor(profile, encode)
    processor = load_processor(model)
    return WholeModelProcessor(processor, processor.mark_id)
