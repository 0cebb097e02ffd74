"""Media of a chat: read, prepared, and put into its prompt."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256

from headrace.errors import ContextTooLong, InvalidRequest
from headrace.media.fetch import MediaFetcher
from headrace.media.inline import split_frames
from headrace.media.prepare import prepare_frames, prepare_image, prepare_video
from headrace.media.prepared import PreparedMedia
from headrace.media.profile import VisionProfile
from headrace.media.prompt import EncodeText, expand, expanded_length, num_media_tokens
from headrace.text.template import RenderedPrompt
from headrace.types.chat import MediaPart
from headrace.types.media import MediaLimits, MediaPolicy, PromptMedia

KEPT_BYTES = 256 * 1024 * 1024
"""Of prepared media that are kept for the next turn of a chat, which sends all of its pictures again."""

MAX_DECODERS = 2
"""Items decoded at the same time: the engine needs the processor too."""

_Key = tuple[bytes, str, object]


class MediaReader:
    """Reads media for one model. Belongs to one event loop."""

    def __init__(self, profile: VisionProfile, policy: MediaPolicy, limits: MediaLimits, encode: EncodeText) -> None:
        """encode: of the model's tokenizer. Raises ConfigError for a policy that makes no sense."""
        self._profile = profile
        self._limits = limits
        self._encode = encode
        self._fetcher = MediaFetcher(policy)
        self._decoders = asyncio.Semaphore(MAX_DECODERS)
        self._kept: OrderedDict[_Key, PreparedMedia] = OrderedDict()
        self._kept_bytes = 0

    async def read(self, parts: Sequence[MediaPart], max_tokens: int) -> list[PreparedMedia]:
        """The parts, prepared. Raises InvalidRequest that names a part, ContextTooLong for `max_tokens` or more."""
        prepared: list[PreparedMedia] = []
        num_tokens = 0
        for part in parts:
            prepared.append(await self._read(part, max_tokens))
            num_tokens += num_media_tokens(prepared[-1].grid, self._profile.vision)
            if num_tokens >= max_tokens:
                raise ContextTooLong.of_prompt(max_tokens, num_tokens, part.param, at_least=True)
        return prepared

    def place(self, prompt: RenderedPrompt, prepared: Sequence[PreparedMedia]) -> tuple[RenderedPrompt, PromptMedia]:
        """The prompt with its media's placeholders. Raises InvalidRequest if the template has not shown each item."""
        try:
            expanded = expand(prompt.token_ids, prepared, self._profile, self._encode)
        except ValueError as error:
            message = f"the model's chat template does not show all media of these messages: {error}"
            raise InvalidRequest(message, param="messages") from error
        boundaries = tuple(
            replace(boundary, num_tokens=expanded_length(boundary.num_tokens, expanded.grown))
            for boundary in prompt.boundaries
        )
        return replace(prompt, token_ids=expanded.token_ids, boundaries=boundaries), expanded.media

    async def _read(self, part: MediaPart, max_tokens: int) -> PreparedMedia:
        frames = split_frames(part.source) if part.kind == "video" else None
        files = [await self._fetcher.read(source, part.param) for source in frames or (part.source,)]
        key = (sha256(b"".join(sha256(file).digest() for file in files)).digest(), part.kind, part.options)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        async with self._decoders:
            prepared = await asyncio.to_thread(self._prepare, part, files, frames is not None, max_tokens)
        self._keep(key, prepared)
        return prepared

    def _prepare(self, part: MediaPart, files: Sequence[bytes], is_frames: bool, max_tokens: int) -> PreparedMedia:
        vision, limits = self._profile.vision, replace(self._limits, tokens=max_tokens)
        if part.kind == "image":
            return prepare_image(files[0], vision, limits, part.param, part.options)
        if is_frames:
            rate = part.options.fps or limits.fps or vision.sampling.fps
            return prepare_frames(files, rate, vision, limits, part.param, part.options)
        return prepare_video(files[0], vision, limits, part.param, part.options)

    def _keep(self, key: _Key, prepared: PreparedMedia) -> None:
        self._kept[key] = prepared
        self._kept_bytes += prepared.patches.nbytes
        while self._kept_bytes > KEPT_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= oldest.patches.nbytes
