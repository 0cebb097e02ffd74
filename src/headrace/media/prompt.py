"""Inserts media into a prompt: one placeholder per token, and positions over time, row and column (M-RoPE).

Text has the same position on all three axes. A media block starts at the position after the text before it: its tokens
have that number plus their time, row and column in the block. The following text continues with the next number unused
on any axis. This is how the models were trained (arXiv 2409.12191, section 2.1; the first release of each in
transformers). transformers 5.24 differs for a Qwen2.5-VL video with more time steps than rows or columns: the text
after it starts within its time, and the answer jumps past it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.families.vision import PatchVision
from headrace.media.patches import Pixels, PreparedImage, PreparedMedia, PreparedVideo, pixel_digest
from headrace.media.profile import VisionProfile
from headrace.types.media import MediaInput, PromptMedia

EncodeText = Callable[[str], Sequence[int]]
"""Plain text to token ids, nothing added."""


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    """A prompt with all its placeholders.

    growth: for each item, its end in the original prompt and how many tokens longer the prompt has become up to there.
    """

    token_ids: tuple[int, ...]
    media: PromptMedia
    growth: tuple[tuple[int, int], ...]


def expand(
    token_ids: Sequence[int], media: Sequence[PreparedMedia], profile: VisionProfile, encode: EncodeText
) -> ExpandedPrompt:
    """The prompt with as many placeholders per item as it has tokens, and timestamps between them.

    token_ids: with one image or video token per item, in the order of `media`. encode: for timestamps. Raises
    ValueError if the tokens and the items don't match.
    """
    tokens = profile.tokens
    kinds: dict[int | None, type[PreparedMedia]] = {tokens.video: PreparedVideo}
    kinds[tokens.image if tokens.mark is None else tokens.mark] = PreparedImage
    places = [index for index, token_id in enumerate(token_ids) if token_id in kinds]
    if [kinds[token_ids[place]] for place in places] != [type(item) for item in media]:
        raise ValueError(f"the prompt has {len(places)} media placeholders, which do not match its {len(media)} items")
    expanded = _Expansion(profile, encode)
    growth, done = [], 0
    for place, item in zip(places, media, strict=True):
        expanded.add_text(token_ids[done:place])
        expanded.add(item)
        done = place + 1
        growth.append((done, len(expanded.token_ids) - done))
    expanded.add_text(token_ids[done:])
    return ExpandedPrompt(tuple(expanded.token_ids), expanded.media(), tuple(growth))


def expanded_length(num_tokens: int, growth: Sequence[tuple[int, int]]) -> int:
    """The expanded length of the prompt's first `num_tokens` tokens. No length cuts an item in two."""
    behind = bisect_right(growth, num_tokens, key=lambda item: item[0])
    return num_tokens + (growth[behind - 1][1] if behind else 0)


def num_media_tokens(grid: tuple[int, int, int], vision: PatchVision) -> int:
    """Placeholders for a grid of patches, timestamps excluded."""
    return grid[0] * grid[1] * grid[2] // vision.merge_size**2


def timestamp_text(seconds: float) -> str:
    return f"<{seconds:.1f} seconds>"


@dataclass(frozen=True, slots=True)
class Block:
    """Placeholders from `start` on: rows * columns tokens for each of `times`, in steps since the block's start."""

    start: int
    times: tuple[int, ...]
    rows: int
    columns: int

    @property
    def end(self) -> int:
        return self.start + len(self.times) * self.rows * self.columns


def media_positions(num_tokens: int, blocks: Sequence[Block]) -> tuple[npt.NDArray[np.int32], int]:
    """Positions [3, num_tokens] (time, row, column), and the rope delta added to later tokens' indices.

    blocks: in the prompt's order, without overlap.
    """
    positions = np.empty((3, num_tokens), dtype=np.int32)
    index, counter = 0, 0
    for block in blocks:
        num_text = block.start - index
        positions[:, index : block.start] = np.arange(counter, counter + num_text)
        counter += num_text
        inside = np.stack(np.meshgrid(block.times, range(block.rows), range(block.columns), indexing="ij"))
        positions[:, block.start : block.end] = counter + inside.reshape(3, -1)
        counter += max(max(block.times) + 1, block.rows, block.columns)
        index = block.end
    positions[:, index:] = np.arange(counter, counter + num_tokens - index)
    return positions, counter - index


class _Expansion:
    """A prompt under construction."""

    def __init__(self, profile: VisionProfile, encode: EncodeText) -> None:
        self.token_ids: list[int] = []
        self._profile = profile
        self._encode = encode
        self._inputs: list[MediaInput] = []
        self._blocks: list[Block] = []

    def add_text(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids

    def add(self, item: PreparedMedia) -> None:
        """The item's placeholders; around a timed video's groups, what separates them."""
        tokens, vision = self._profile.tokens, self._profile.vision
        if isinstance(item, PreparedImage):
            if tokens.mark is not None:
                self.token_ids.append(tokens.start)
            self._add_placeholders(tokens.image, item.patches, item.grid, (0,))
            if tokens.mark is not None:
                self.token_ids.append(tokens.end)
        elif not vision.has_timestamps:
            self._add_placeholders(tokens.video, item.patches, item.grid, _time_steps(item, vision))
        else:
            for seconds, patches in zip(
                item.times, item.patches.reshape(item.grid[0], -1, item.patches.shape[1]), strict=True
            ):
                self.token_ids += [*self._encode(timestamp_text(seconds)), tokens.start]
                self._add_placeholders(tokens.video, patches, (1, *item.grid[1:]), (0,))
                self.token_ids.append(tokens.end)

    def media(self) -> PromptMedia:
        if not self._profile.vision.has_axes:
            return PromptMedia(tuple(self._inputs), bidirectional=self._profile.vision.bidirectional)
        positions, delta = media_positions(len(self.token_ids), self._blocks)
        return PromptMedia(tuple(self._inputs), positions.data, delta)

    def _add_placeholders(
        self, token_id: int | None, patches: Pixels, grid: tuple[int, int, int], times: tuple[int, ...]
    ) -> None:
        assert token_id is not None, "a model without videos is given none"
        vision = self._profile.vision
        start = len(self.token_ids)
        block = Block(start, times, grid[1] // vision.merge_size, grid[2] // vision.merge_size)
        self.token_ids += [token_id] * (block.end - start)
        self._blocks.append(block)
        self._inputs.append(
            MediaInput(
                start=start,
                end=block.end,
                pixels=np.ascontiguousarray(patches).data,
                grid=grid,
                mean=vision.mean,
                std=vision.std,
                digest=pixel_digest(patches, grid, times),
            )
        )


def _time_steps(video: PreparedVideo, vision: PatchVision) -> tuple[int, ...]:
    """Steps on the time axis of each group, from the first."""
    if vision.tokens_per_second is None:
        return tuple(range(video.grid[0]))
    return tuple(int(group * video.group_s * vision.tokens_per_second) for group in range(video.grid[0]))
