"""Reads a video's frame times, chooses the frames to take, and decodes these.

Frames are scaled as they are decoded, so memory never exceeds what the model takes.
"""

from __future__ import annotations

import io
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import av
import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from headrace.errors import InvalidRequest
from headrace.families.vision import FrameSampling
from headrace.media.image import decoder_errors_as
from headrace.media.patches import Pixels
from headrace.types.media import MediaLimits

# Self-contained formats; playlists and the like, which refer to other files, are excluded.
_OPTIONS = {
    "format_whitelist": "mov,matroska,webm,avi,gif,mpegts,mpeg,flv,asf,ogg",
    "protocol_whitelist": "none",
}

Preprocess = Callable[[Pixels], Pixels]
"""Preprocessing of one sampled frame [height, width, 3]."""


@dataclass(frozen=True, slots=True)
class VideoMetadata:
    """What is known of a video before decoding.

    frames: when they are shown.
    stamps: the container's time of each, rising.
    size: height and width, upright.
    """

    frames: FrameTimes
    stamps: tuple[int, ...]
    size: tuple[int, int]


def read_metadata(data: bytes, limits: MediaLimits, param: str) -> VideoMetadata:
    """The metadata of a video file.

    Raises InvalidRequest that names `param` for a file that is broken or over the limits.
    """
    with _opened(data, param) as (container, stream), decoder_errors_as(_broken(param)):
        stamps = _packet_stamps(container, stream, limits, param)
        base, rate = stream.time_base, stream.average_rate
        _check_frame(stream.codec_context.width, stream.codec_context.height, limits, param)
    if stamps is None:  # some containers only give the decoding order
        with _opened(data, param) as (container, stream), decoder_errors_as(_broken(param)):
            stamps = [frame.pts for frame in _decoded(container, stream, limits, param) if frame.pts is not None]
    if not stamps or not base:
        raise _broken(param)
    stamps = sorted(set(stamps))
    frames = frame_times([float(stamp * base) for stamp in stamps], float(rate) if rate else None)
    _check_length(frames, limits, param)
    with _opened(data, param) as (container, stream), decoder_errors_as(_broken(param)):
        first = next(_decoded(container, stream, limits, param), None)
    if first is None:
        raise _broken(param)
    size = (first.width, first.height) if first.rotation % 180 else (first.height, first.width)
    return VideoMetadata(frames, tuple(stamps), size)


def read_frames(
    data: bytes,
    metadata: VideoMetadata,
    indices: Sequence[int],
    preprocess: Preprocess,
    limits: MediaLimits,
    param: str,
) -> list[Pixels]:
    """`preprocess` of each of the frames with these non-decreasing indices.

    Raises InvalidRequest that names `param` if one of them can't be decoded.
    """
    wanted = sorted({metadata.stamps[index] for index in indices})
    pictures: dict[int, Pixels] = {}
    shown: VideoFrame | None = None
    with _opened(data, param) as (container, stream):
        for frame in _decoded(container, stream, limits, param):
            if frame.pts is None:
                continue
            # A frame that the decoder skips is replaced by the one before it.
            while wanted and wanted[0] < frame.pts:
                pictures[wanted.pop(0)] = preprocess(_upright(shown or frame, param))
            if wanted and wanted[0] == frame.pts:
                pictures[wanted.pop(0)] = preprocess(_upright(frame, param))
            if not wanted:
                return [pictures[metadata.stamps[index]] for index in indices]
            shown = frame
    raise _broken(param)


@contextmanager
def _opened(data: bytes, param: str) -> Iterator[tuple[InputContainer, VideoStream]]:
    with decoder_errors_as(_broken(param)):
        container = av.open(io.BytesIO(data), "r", options=_OPTIONS)
    with container:
        with decoder_errors_as(_broken(param)):
            stream = container.streams.best("video")
        if not isinstance(stream, VideoStream):
            raise InvalidRequest(f"{param}: the file holds no video", param=param)
        yield container, stream


def _packet_stamps(container: InputContainer, stream: VideoStream, limits: MediaLimits, param: str) -> list[int] | None:
    """Display times of the container's frames, unsorted, without decoding; None if some are missing.

    Raises InvalidRequest if there are fewer than declared: the file is truncated.
    """
    stamps, num_packets, all_say = [], 0, True
    for packet in container.demux(stream):
        if not packet.size:  # the end, or a dropped frame
            continue
        num_packets += 1
        if num_packets > limits.video_frames:
            raise _too_many(limits, param)
        if packet.pts is None:
            all_say = False
        elif not packet.is_discard:
            stamps.append(packet.pts)
    if num_packets < stream.frames:
        raise _broken(param)
    return stamps if all_say else None


def _decoded(container: InputContainer, stream: VideoStream, limits: MediaLimits, param: str) -> Iterator[VideoFrame]:
    frames = container.decode(stream)
    for number in itertools.count():
        with decoder_errors_as(_broken(param)):
            frame = next(frames, None)
        if frame is None:
            return
        if number >= limits.video_frames:
            raise _too_many(limits, param)
        _check_frame(frame.width, frame.height, limits, param)
        yield frame


def _upright(frame: VideoFrame, param: str) -> Pixels:
    """RGB pixels as a player shows them: phones store frames in sensor orientation."""
    if frame.is_corrupt:
        raise _broken(param)
    with decoder_errors_as(_broken(param)):
        pixels = np.asarray(frame.to_ndarray(format="rgb24"), dtype=np.uint8)
    quarters = round(frame.rotation / 90) % 4
    return np.ascontiguousarray(np.rot90(pixels, quarters)) if quarters else pixels


def _check_frame(width: int, height: int, limits: MediaLimits, param: str) -> None:
    if width * height > limits.image_pixels:
        size = f"{width} x {height} pixels, more than the maximum of {limits.image_pixels}"
        raise InvalidRequest(f"{param}: the video's frames have {size}", param=param)


def _check_length(frames: FrameTimes, limits: MediaLimits, param: str) -> None:
    if frames.duration_s > limits.video_s:
        message = f"{param}: the video lasts {frames.duration_s:.1f} s, more than the maximum of {limits.video_s:g} s"
        raise InvalidRequest(message, param=param)


def _too_many(limits: MediaLimits, param: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: the video has more than {limits.video_frames} frames", param=param)


def _broken(param: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: the video can't be read, is broken or truncated", param=param)


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
