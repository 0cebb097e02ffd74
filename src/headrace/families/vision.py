"""Vision records of model families, with the values that their published checkpoints share.

A checkpoint's own files contain the same values and take precedence (`media/profile.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from headrace.types.media import Bidirectional

Channels = tuple[float, float, float]
"""Red, green, blue."""


@dataclass(frozen=True, slots=True)
class PixelRange:
    """Least and most pixels of a scaled picture, both inclusive."""

    minimum: int
    maximum: int


@dataclass(frozen=True, slots=True)
class FrameSampling:
    """Frames taken from a video: `fps` per second, within the two limits, both inclusive."""

    fps: float
    min_frames: int
    max_frames: int


@dataclass(frozen=True, slots=True)
class VisionTokens:
    """Ids of the tokens around media and of the placeholders.

    video: None if the model has none for videos.
    mark: what a chat template writes for an image, if that is not the placeholder.
    """

    start: int
    end: int
    image: int
    video: int | None
    mark: int | None = None


@dataclass(frozen=True, slots=True)
class PatchVision:
    """Pictures as patches; `merge_size` * `merge_size` of them make one token.

    model_types: its `model_type` values in config.json.
    patch_size: pixels on a side.
    temporal_patch_size: frames in a patch; a still picture fills all of them.
    mean, std: of the channels after scaling to 0..1.
    image: pixels of a picture.
    video: pixels of all frames of a video together if has_timestamps, else of each frame.
    has_timestamps: a video is a sequence of frame groups, each after its timestamp and inside a pair of tokens; else
    one block without text. The template's pair stays around them all, as in transformers since 5.10 (4.57 put the
    groups in its place); which of the two the models were trained with is not published.
    caps_frames: a frame of a video gets at most the pixels of a fixed number of tokens.
    takes_whole_groups: frames are taken in whole patches' worth, at the starts of equal parts of the video; else any
    number of them, the first and the last always.
    tokens_per_second: steps on the time axis per second of a video without timestamps; None is one step per group.
    side: pixels on a side that pictures of any shape are scaled to; None keeps their shape within `image`.
    max_tokens: of a picture that is scaled to as many tokens as this allows, keeping its shape as far as whole tokens
    can; None where `image` gives the limit.
    is_bicubic: scaling filter; else bilinear.
    has_axes: tokens have positions in time, row and column; else they are counted.
    bidirectional: where tokens of one picture attend to each other.
    sees_videos: else a video's frames become pictures.
    mark: what chat templates write for a picture if they leave its start, its end and the margin to the processor; None
    if they write everything around its placeholder. It is the start token's spelling or, unless marks_by_start, the
    placeholder's.
    margin: text on both sides of a picture then.
    """

    model_types: tuple[str, ...]
    patch_size: int
    mean: Channels
    std: Channels
    image: PixelRange
    video: PixelRange
    has_timestamps: bool
    temporal_patch_size: int = 2
    merge_size: int = 2
    sampling: FrameSampling = field(default=FrameSampling(fps=2.0, min_frames=4, max_frames=768))
    caps_frames: bool = False
    takes_whole_groups: bool = False
    tokens_per_second: float | None = None
    side: int | None = None
    max_tokens: int | None = None
    is_bicubic: bool = True
    has_axes: bool = True
    bidirectional: Bidirectional = Bidirectional.NOWHERE
    sees_videos: bool = True
    mark: str | None = None
    marks_by_start: bool = False
    margin: str = ""

    @property
    def factor(self) -> int:
        """Pixels on a side of one token; sizes are multiples of it."""
        return self.patch_size * self.merge_size


_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_HALF = (0.5, 0.5, 0.5)

QWEN2_VISION = PatchVision(
    model_types=("qwen2_vl", "qwen2_5_vl"),
    patch_size=14,
    mean=_CLIP_MEAN,
    std=_CLIP_STD,
    image=PixelRange(3136, 12_845_056),
    video=PixelRange(3136, 12_845_056),
    has_timestamps=False,
    takes_whole_groups=True,
)
QWEN3_VISION = PatchVision(
    model_types=("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    patch_size=16,
    mean=_HALF,
    std=_HALF,
    image=PixelRange(65_536, 16_777_216),
    video=PixelRange(4096, 25_165_824),
    has_timestamps=True,
)

GEMMA3_VISION = PatchVision(
    model_types=("gemma3",),
    patch_size=14,
    temporal_patch_size=1,
    merge_size=4,
    mean=_HALF,
    std=_HALF,
    image=PixelRange(896 * 896, 896 * 896),
    video=PixelRange(896 * 896, 896 * 896),
    has_timestamps=False,
    side=896,
    is_bicubic=False,
    has_axes=False,
    bidirectional=Bidirectional.EVERYWHERE,
    sees_videos=False,
    # 256 tokens per frame: a video takes as much as a long chat.
    sampling=FrameSampling(fps=1.0, min_frames=1, max_frames=32),
    mark="<start_of_image>",
    marks_by_start=True,
    margin="\n\n",
)
GEMMA4_VISION = PatchVision(
    model_types=("gemma4",),
    patch_size=16,
    temporal_patch_size=1,
    merge_size=3,
    mean=_HALF,
    std=_HALF,
    image=PixelRange(48 * 48, 280 * 48 * 48),
    video=PixelRange(48 * 48, 280 * 48 * 48),
    has_timestamps=False,
    max_tokens=280,
    has_axes=False,
    sees_videos=False,
    sampling=FrameSampling(fps=1.0, min_frames=1, max_frames=32),
    mark="<|image|>",
)

UNKNOWN_VISION = replace(GEMMA3_VISION, model_types=())
"""For vision models without a record, which get a video as pictures."""

_VISIONS = (QWEN2_VISION, QWEN3_VISION, GEMMA3_VISION, GEMMA4_VISION)
_BY_MODEL_TYPE = {model_type: vision for vision in _VISIONS for model_type in vision.model_types}


def find_vision(model_type: str) -> PatchVision | None:
    return _BY_MODEL_TYPE.get(model_type)
