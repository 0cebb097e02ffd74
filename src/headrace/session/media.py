"""Reads and prepares a chat's media and inserts them into its prompt."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace.cancellation import run_in_thread
from headrace.engine.engine import load_processor
from headrace.errors import ContextTooLong, InvalidRequest, UnsupportedField
from headrace.lru_cache import LruCache
from headrace.media.decoder import MAX_DECODERS, MediaDecoder
from headrace.media.fetch import MediaFetcher, split_frames
from headrace.media.patches import Pixels, pixel_digest
from headrace.media.prepare import MediaFiles, prepare, read_pictures
from headrace.media.profile import VisionProfile, read_profile
from headrace.media.prompt import EncodeText, ExpandedPrompt, expand, expanded_length, num_media_tokens
from headrace.session.concurrency import BoundedExecutor
from headrace.text.normalise import media_parts
from headrace.text.template import RenderedPrompt
from headrace.types.chat import ChatRequest, ContentPart, MediaPart, TextPart
from headrace.types.media import MediaInput, MediaLimits, MediaPolicy, PromptMedia
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

    def __init__(self, process: Process, placeholder_id: int) -> None:
        """placeholder_id: the token that the chat template writes for each picture."""
        self._process = process
        self._placeholder_id = placeholder_id

    def prepare(self, item: MediaFiles, limits: MediaLimits, decoder: MediaDecoder) -> tuple[ProcessedItem, ...]:
        if item.options.min_pixels is not None or item.options.max_pixels is not None:
            message = (
                f"{item.param}: min_pixels and max_pixels are not supported: the model's processor decides the size"
            )
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
        places = [index for index, token_id in enumerate(token_ids) if token_id == self._placeholder_id]
        if len(places) != len(items):
            raise ValueError(f"the prompt has {len(places)} placeholders for its {len(items)} images")
        expanded: list[int] = []
        inputs, growth, done = [], [], 0
        for place, item in zip(places, items, strict=True):
            shown, one = item.prepared
            expanded += token_ids[done:place]
            inputs.append(replace(one, start=len(expanded), end=len(expanded) + len(shown)))
            expanded += shown
            done = place + 1
            growth.append((done, len(expanded) - done))
        return ExpandedPrompt((*expanded, *token_ids[done:]), PromptMedia(tuple(inputs)), tuple(growth))


def find_media_processor(model: ModelDescription, encode: EncodeText) -> MediaProcessor | None:
    """The processor of a loaded model; None for a text model. encode: its tokenizer's. Raises ModelError."""
    if not model.takes_media:
        return None
    profile = read_profile(model.directory, model.config)
    if profile is not None:
        return TowerProcessor(profile, encode)
    processor = load_processor(model)
    return WholeModelProcessor(processor, processor.placeholder_id)


CACHE_BYTES = 256 * 1024 * 1024
"""Prepared media kept for the next turn of a chat, which sends all of its pictures again."""

log = logging.getLogger("headrace.session")

Render = Callable[[ChatRequest], Awaitable[RenderedPrompt]]
"""Renders a chat's prompt, with one placeholder per image or video."""

_Key = tuple[bytes, str, bool, object]


class MediaReader:
    """Reads media for one model. Belongs to one event loop."""

    def __init__(self, processor: MediaProcessor, policy: MediaPolicy, limits: MediaLimits) -> None:
        """Raises ConfigError for an invalid policy."""
        self._processor = processor
        self._limits = limits
        self._fetcher = MediaFetcher(policy)
        self._decoder = MediaDecoder(limits)
        self._executor = BoundedExecutor(MAX_DECODERS, "media")
        self._cache: LruCache[_Key, tuple[ProcessedItem, ...]] = LruCache(CACHE_BYTES)

    async def prompt(self, request: ChatRequest, render: Render, max_tokens: int) -> tuple[RenderedPrompt, PromptMedia]:
        """The prompt of a chat with all of its media. render: renders it without them.

        Raises InvalidRequest that names a part, ContextTooLong for `max_tokens` or more, and what `render` raises.
        """
        parts = media_parts(request.messages)
        if self._processor.sees_videos or all(part.kind == "image" for part in parts):
            prompt = await render(request)
            prepared = await self._read_all(parts, max_tokens)
        else:
            prepared = await self._read_all(parts, max_tokens)
            num_frames = {id(part): len(items) for part, items in zip(parts, prepared, strict=True)}
            videos = [num_frames[id(part)] for part in parts if part.kind == "video"]
            log.info("%s: the model knows no videos, it is shown %s frames as images", request.request_id, videos)
            prompt = await render(_with_frames(request, num_frames))
        return await run_in_thread(self._expand, prompt, [item for items in prepared for item in items])

    async def _read_all(self, parts: Sequence[MediaPart], max_tokens: int) -> list[tuple[ProcessedItem, ...]]:
        prepared: list[tuple[ProcessedItem, ...]] = []
        num_tokens = 0
        for part in parts:
            prepared.append(await self._read(part, max_tokens))
            num_tokens += sum(item.num_tokens for item in prepared[-1])
            if num_tokens >= max_tokens:
                raise ContextTooLong.of_prompt(max_tokens, num_tokens, part.param, at_least=True)
        return prepared

    def _expand(self, prompt: RenderedPrompt, prepared: Sequence[ProcessedItem]) -> tuple[RenderedPrompt, PromptMedia]:
        """The prompt with its media's placeholders. Raises InvalidRequest if the template has not rendered each
        item."""
        try:
            expanded = self._processor.expand(prompt.token_ids, prepared)
        except ValueError as error:
            message = f"the model's chat template does not show all media of these messages: {error}"
            raise InvalidRequest(message, param="messages") from error
        boundaries = tuple(
            replace(boundary, num_tokens=expanded_length(boundary.num_tokens, expanded.growth))
            for boundary in prompt.boundaries
        )
        return replace(prompt, token_ids=expanded.token_ids, boundaries=boundaries), expanded.media

    async def _read(self, part: MediaPart, max_tokens: int) -> tuple[ProcessedItem, ...]:
        frames = split_frames(part.source, self._limits.sampled_frames, part.param) if part.kind == "video" else None
        files = [await self._fetcher.read(source, part.param) for source in frames or (part.source,)]
        key = (
            sha256(b"".join(sha256(file).digest() for file in files)).digest(),
            part.kind,
            frames is not None,
            part.options,
        )
        if (known := self._cache.get(key)) is not None:
            return known
        item = MediaFiles(part.kind, tuple(files), frames is not None, part.options, part.param)
        limits = replace(self._limits, tokens=max_tokens)
        kept = partial(self._cache.get, key)  # another request may have sent the same item meanwhile
        prepared = await self._executor.run(self._processor.prepare, item, limits, self._decoder, unless=kept)
        self._cache.put(key, prepared, sum(item.num_bytes for item in prepared))
        return prepared

    def close(self) -> None:
        self._executor.close()

    def start_process(self) -> None:
        self._decoder.start_process()


def _with_frames(request: ChatRequest, num_frames: Mapping[int, int]) -> ChatRequest:
    """The request with an image for each frame of a video. num_frames: by the part's identity."""
    messages = tuple(
        replace(message, content=tuple(shown for part in message.content for shown in _shown(part, num_frames)))
        for message in request.messages
    )
    return replace(request, messages=messages)


def _shown(part: ContentPart, num_frames: Mapping[int, int]) -> Sequence[ContentPart]:
    if isinstance(part, TextPart) or part.kind == "image":
        return (part,)
    return (replace(part, kind="image"),) * num_frames[id(part)]
