"""Which frames of a video are looked at, and when they are shown. Arithmetic only."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.families.vision import FrameSampling


@dataclass(frozen=True, slots=True)
class FrameTimes:
    """When a video's frames are shown.

    rate: frames per second, on average. times: of each frame in seconds, rising, where the rate is not constant; None:
    frame i is shown at i / rate.
    """

    num_frames: int
    rate: float
    times: tuple[float, ...] | None = None

    @property
    def duration_s(self) -> float:
        """Seconds from the first frame's start to the last one's end."""
        return self.num_frames / self.rate


@dataclass(frozen=True, slots=True)
class SampledFrames:
    """indices: of the frames to look at, never falling. times: seconds at which each is seen."""

    indices: tuple[int, ...]
    times: tuple[float, ...]


def frame_times(shown: Sequence[float], declared_rate: float | None) -> FrameTimes:
    """When frames are shown, from their times in seconds in rising order; at least one.

    The declared rate is believed if no frame is off by half a frame or more; otherwise the rate that the times show.
    """
    first, num_frames = shown[0], len(shown)
    measured = (num_frames - 1) / (shown[-1] - first) if shown[-1] > first else None
    for rate in (declared_rate, measured):
        if rate and all(abs((time - first) * rate - index) < 0.5 for index, time in enumerate(shown)):
            return FrameTimes(num_frames, rate)
    if measured is None:  # one moment only, and nothing is known about its length
        return FrameTimes(num_frames, declared_rate or 1.0)
    return FrameTimes(num_frames, measured, tuple(time - first for time in shown))


def num_sampled(num_frames: int, rate: float, sampling: FrameSampling, multiple_of: int = 1) -> int:
    """How many frames are taken: `fps` of each second, within the limits, and no more than there are.

    The order of the operations decides whether a product falls short of a whole number; it is that of transformers.
    multiple_of: rounded down to such a number, unless that leaves nothing.
    """
    wanted = int(num_frames / rate * sampling.fps)
    num_samples = min(max(wanted, sampling.min_frames), sampling.max_frames, num_frames)
    return num_samples // multiple_of * multiple_of or num_samples


def sample(frames: FrameTimes, num_samples: int, *, with_last: bool = True) -> SampledFrames:
    """Frames at even distances, from the first to the last, or without the last to the start of the last part.

    With a constant rate by index, rounded half to even, or down where the last is left out. Otherwise by time: at each
    moment the frame that is shown then, so that a still scene of one long frame gets its share, and the moment is what
    the model is told.
    """
    if frames.times is None:
        indices = _indices(frames.num_frames, num_samples, with_last)
        return SampledFrames(indices, tuple(index / frames.rate for index in indices))
    times = frames.times
    moments = np.linspace(0.0, times[-1], num_samples, endpoint=with_last).tolist()
    return SampledFrames(tuple(bisect_right(times, moment) - 1 for moment in moments), tuple(moments))


def _indices(num_frames: int, num_samples: int, with_last: bool) -> tuple[int, ...]:
    if with_last:
        return tuple(np.linspace(0, num_frames - 1, num_samples).round().astype(int).tolist())
    # In single precision, as torch.arange has it: what falls short of a whole number by less is that number.
    starts = (np.arange(num_samples) * (num_frames / num_samples)).astype(np.float32)
    return tuple(starts.astype(int).tolist())


def group_times(times: Sequence[float], group_size: int) -> tuple[float, ...]:
    """Seconds of each group of `group_size` frames: halfway between its first and last frame.

    The last frame completes a group that is not full.
    """
    padded = [*times, *[times[-1]] * (-len(times) % group_size)]
    return tuple((padded[start] + padded[start + group_size - 1]) / 2 for start in range(0, len(padded), group_size))


def timestamp_text(seconds: float) -> str:
    """How a time is written before a group of frames."""
    return f"<{seconds:.1f} seconds>"
