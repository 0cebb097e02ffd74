"""Chooses the frames to take from a video. Arithmetic only."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.families.vision import FrameSampling


@dataclass(frozen=True, slots=True)
class FrameTimes:
    """When a video's frames are shown.

    rate: mean frames per second.
    times: of each frame in seconds, rising, if the rate varies; None: frame i is shown at i / rate.
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
    """indices: of the sampled frames, non-decreasing. times: the time of each in seconds."""

    indices: tuple[int, ...]
    times: tuple[float, ...]


def frame_times(shown: Sequence[float], declared_rate: float | None) -> FrameTimes:
    """When frames are shown, from their times in seconds in rising order; at least one.

    The declared rate is used if every frame is within half a frame of it; otherwise the measured rate.
    """
    first, num_frames = shown[0], len(shown)
    measured = (num_frames - 1) / (shown[-1] - first) if shown[-1] > first else None
    for rate in (declared_rate, measured):
        if rate and all(abs((time - first) * rate - index) < 0.5 for index, time in enumerate(shown)):
            return FrameTimes(num_frames, rate)
    if measured is None:  # a single moment of unknown duration
        return FrameTimes(num_frames, declared_rate or 1.0)
    return FrameTimes(num_frames, measured, tuple(time - first for time in shown))


def num_sampled(num_frames: int, rate: float, sampling: FrameSampling, multiple_of: int = 1) -> int:
    """Number of frames to sample: `fps` per second, within the limits, at most all.

    The order of operations, which decides rounding, is that of transformers.
    multiple_of: rounded down to such a number, unless that leaves nothing.
    """
    wanted = int(num_frames / rate * sampling.fps)
    num_samples = min(max(wanted, sampling.min_frames), sampling.max_frames, num_frames)
    return num_samples // multiple_of * multiple_of or num_samples


def sample(frames: FrameTimes, num_samples: int, *, with_last: bool = True) -> SampledFrames:
    """Evenly spaced frames from the first to the last, or without the last to the start of the last part.

    With a constant rate by index, rounded half to even, or down without the last. Otherwise by time: the frame shown at
    each moment, so that a long still scene gets its share; the moment becomes the timestamp.
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
    # In single precision, as torch.arange: small shortfalls decide rounding.
    starts = (np.arange(num_samples) * (num_frames / num_samples)).astype(np.float32)
    return tuple(starts.astype(int).tolist())


def group_times(times: Sequence[float], group_size: int) -> tuple[float, ...]:
    """Seconds of each group of `group_size` frames: the mean of its first and last frame.

    The last frame is repeated to fill the last group.
    """
    padded = [*times, *[times[-1]] * (-len(times) % group_size)]
    return tuple((padded[start] + padded[start + group_size - 1]) / 2 for start in range(0, len(padded), group_size))


def timestamp_text(seconds: float) -> str:
    """The timestamp before a group of frames."""
    return f"<{seconds:.1f} seconds>"
