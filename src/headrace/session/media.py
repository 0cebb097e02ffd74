"""Reads and prepares a chat's media and inserts them into its prompt."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256

from headrace.cancellation import run_in_thread
from headrace.errors import ContextTooLong, InvalidRequest
from headrace.lru_cache import LruCache
from headrace.media.decoder import MAX_DECODERS, MediaDecoder
from headrace.media.fetch import MediaFetcher, split_frames
from headrace.media.prepare import MediaFiles
from headrace.media.prompt import expanded_length
from headrace.session.helper_gate import HelperGate
from headrace.session.media_processor import MediaProcessor, ProcessedItem
from headrace.text.normalise import media_parts
from headrace.text.template import RenderedPrompt
from headrace.types.chat import ChatRequest, ContentPart, MediaPart, TextPart
from headrace.types.media import MediaLimits, MediaPolicy, PromptMedia

KEPT_BYTES = 256 * 1024 * 1024
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
        self._gate = HelperGate(MAX_DECODERS, "media")
        self._kept: LruCache[_Key, tuple[ProcessedItem, ...]] = LruCache(KEPT_BYTES)

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
        return await run_in_thread(self._place, prompt, [item for items in prepared for item in items])

    async def _read_all(self, parts: Sequence[MediaPart], max_tokens: int) -> list[tuple[ProcessedItem, ...]]:
        """The processed items of each part."""
        prepared: list[tuple[ProcessedItem, ...]] = []
        num_tokens = 0
        for part in parts:
            prepared.append(await self._read(part, max_tokens))
            num_tokens += sum(item.num_tokens for item in prepared[-1])
            if num_tokens >= max_tokens:
                raise ContextTooLong.of_prompt(max_tokens, num_tokens, part.param, at_least=True)
        return prepared

    def _place(self, prompt: RenderedPrompt, prepared: Sequence[ProcessedItem]) -> tuple[RenderedPrompt, PromptMedia]:
        """The prompt with its media's placeholders. Raises InvalidRequest if the template has not rendered each
        item."""
        try:
            expanded = self._processor.expand(prompt.token_ids, prepared)
        except ValueError as error:
            message = f"the model's chat template does not show all media of these messages: {error}"
            raise InvalidRequest(message, param="messages") from error
        boundaries = tuple(
            replace(boundary, num_tokens=expanded_length(boundary.num_tokens, expanded.grown))
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
        if (known := self._kept.get(key)) is not None:
            return known
        item = MediaFiles(part.kind, tuple(files), frames is not None, part.options, part.param)
        limits = replace(self._limits, tokens=max_tokens)
        kept = partial(self._kept.get, key)  # another request may have sent the same item meanwhile
        prepared = await self._gate.run(self._processor.prepare, item, limits, self._decoder, unless=kept)
        self._kept.put(key, prepared, sum(item.num_bytes for item in prepared))
        return prepared

    def warm(self) -> None:
        """Prepare in the background for the first item."""
        self._decoder.warm()


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
