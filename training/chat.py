"""Conversations to token ids: what the chat template would render, cut where learning starts and stops.

A tested mirror of `headrace/miniature/chat_template.jinja`: training needs spans and speed, users get the template.
"""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from training.sample import IMAGE_MARK, VIDEO_MARK, Call, Clip, Sample, Turn

MERGE_PIXELS = 32  # height and width of what one media token covers
TOOLS_HEAD = "# Tools\n\nThese functions can be called:\n<tools>"
TOOLS_TAIL = (
    "\n</tools>\n\nCall one like this:\n<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n"
    "</function>\n</tool_call>"
)
Piece = tuple[str, bool]  # text, and whether the model learns to say it


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids [T], the learned mask [T] (may this token be predicted) and M-RoPE positions [3, T]."""

    ids: np.ndarray
    learned: np.ndarray
    positions: np.ndarray

    @property
    def last_turn(self) -> tuple[int, int]:
        """Where the last learned turn begins and ends."""
        end = int(np.flatnonzero(self.learned)[-1]) + 1
        return int(np.flatnonzero(~self.learned[:end])[-1]) + 1, end


def written_call(call: Call) -> str:
    lines = [f"<tool_call>\n<function={call.name}>\n"]
    for key, value in call.arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines.append(f"<parameter={key}>\n{text}\n</parameter>\n")
    return "".join([*lines, "</function>\n</tool_call>"])


def _header(sample: Sample) -> str:
    guidance = sample.turns[0].text.strip() if sample.turns[0].role == "system" else ""
    if sample.tools:
        schemas = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in sample.tools)
        tail = f"\n\n{guidance}" if guidance else ""
        return f"<|im_start|>system\n{TOOLS_HEAD}{schemas}{TOOLS_TAIL}{tail}<|im_end|>\n"
    return f"<|im_start|>system\n{guidance}<|im_end|>\n" if guidance else ""


def _assistant(turn: Turn, after_query: bool) -> list[Piece]:
    opening = "<|im_start|>assistant\n"
    thought = ""
    if after_query:
        opening += "<think>\n" if turn.thought is not None else "<think>\n\n</think>\n\n"
        thought = f"{turn.thought.strip()}\n</think>\n\n" if turn.thought is not None else ""
    text = turn.text.strip()
    calls = "\n".join(written_call(call) for call in turn.calls)
    gap = "\n\n" if text and calls else ""
    return [(opening, False), (f"{thought}{text}{gap}{calls}<|im_end|>", turn.learned), ("\n", False)]


def render(sample: Sample) -> list[Piece]:
    """The whole conversation as text pieces; neighbours of one kind are not yet joined."""
    turns = [turn for turn in sample.turns if turn.role != "system"]
    last_query = max(index for index, turn in enumerate(turns) if turn.role == "user")
    pieces: list[Piece] = [(_header(sample), False)]
    for index, turn in enumerate(turns):
        if turn.role == "user":
            pieces.append((f"<|im_start|>user\n{turn.text.strip()}<|im_end|>\n", False))
        elif turn.role == "assistant":
            pieces += _assistant(turn, index > last_query)
        elif turn.role == "tool":
            first = turns[index - 1].role != "tool"
            last = index + 1 == len(turns) or turns[index + 1].role != "tool"
            pieces.append(("<|im_start|>user" if first else "", False))
            pieces.append((f"\n<tool_response>\n{turn.text.strip()}\n</tool_response>", False))
            pieces.append(("<|im_end|>\n" if last else "", False))
        else:
            raise ValueError(f"a sample's turn has the unknown role {turn.role!r}")
    return pieces


def group_times(clip: Clip) -> list[float]:
    """Seconds of each pair of frames (an odd last frame is repeated)."""
    times = [*clip.times_s, clip.times_s[-1]] if len(clip.times_s) % 2 else list(clip.times_s)
    return [(times[index] + times[index + 1]) / 2 for index in range(0, len(times), 2)]


def expand_media(text: str, sample: Sample, outer_pair: bool) -> str:
    """Placeholders repeated to the size of their media; `outer_pair` keeps the vision marks around a whole video."""
    height, width = (side // MERGE_PIXELS for side in sample.size)
    if sample.clip is not None and VIDEO_MARK in text:
        pads = "<|vision_start|>" + "<|video_pad|>" * (height * width) + "<|vision_end|>"
        groups = "".join(f"<{time:.1f} seconds>{pads}" for time in group_times(sample.clip))
        text = text.replace(VIDEO_MARK, f"<|vision_start|>{groups}<|vision_end|>" if outer_pair else groups)
    pads = "<|vision_start|>" + "<|image_pad|>" * (height * width) + "<|vision_end|>"
    return text.replace(IMAGE_MARK, pads)


def rope_positions(ids: Sequence[int] | np.ndarray, pads: Iterable[int | None], grid: tuple[int, int]) -> np.ndarray:
    """M-RoPE positions [3, T]: text counts on, each block of placeholders spans its grid (height, width)."""
    is_pad = np.isin(np.asarray(ids), [pad for pad in pads if pad is not None])
    if not is_pad.any():
        return np.broadcast_to(np.arange(len(is_pad)), (3, len(is_pad)))
    height, width = grid
    positions = np.zeros((3, len(is_pad)), np.int64)
    index = current = 0
    while index < len(is_pad):
        if is_pad[index]:
            block = slice(index, index + height * width)
            if not is_pad[block].all() or len(is_pad) < block.stop:
                raise ValueError(f"the placeholders at token {index} do not fill a grid of {height} x {width}")
            cells = np.arange(height * width)
            positions[:, block] = current + np.stack([np.zeros_like(cells), cells // width, cells % width])
            index, current = block.stop, current + max(height, width)
        else:
            positions[:, index] = current
            index, current = index + 1, current + 1
    return positions


def joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbouring pieces of one kind as one, so that the tokenizer sees them whole."""
    merged: list[Piece] = []
    for text, learned in pieces:
        if not text:
            continue
        if merged and merged[-1][1] == learned:
            merged[-1] = (merged[-1][0] + text, learned)
        else:
            merged.append((text, learned))
    return merged


def encode(sample: Sample, tokenizer: Tokenizer, stream: random.Random | None = None) -> Encoded:
    """Token ids of the rendered conversation. `stream` decides the video layout (None: no outer pair)."""
    outer_pair = stream is not None and stream.random() < 0.5
    pieces = joined(render(sample))
    texts = [expand_media(text, sample, outer_pair) for text, _ in pieces]
    parts = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    ids = np.array([token for part in parts for token in part], np.int32)
    learned = np.repeat([learned for _, learned in pieces], [len(part) for part in parts])
    pads = [tokenizer.token_to_id("<|image_pad|>"), tokenizer.token_to_id("<|video_pad|>")]
    grid = (sample.size[0] // MERGE_PIXELS, sample.size[1] // MERGE_PIXELS)
    return Encoded(ids, learned, rope_positions(ids, pads, grid))
