"""Video files in all containers, variable rates, and what is wrong with some."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from media.video_files import CODECS, shade, video_file

from headrace.errors import InvalidRequest
from headrace.media.video import FrameTimes, read_frames, read_metadata
from headrace.types.media import MediaLimits

LIMITS = MediaLimits()
NTSC = Fraction(24000, 1001)


def greys(data: bytes, indices: list[int]) -> list[float]:
    """The middle of each of these frames."""
    metadata = read_metadata(data, LIMITS, "video")
    frames = read_frames(data, metadata, indices, lambda pixels: pixels, LIMITS, "video")
    return [float(frame[20:44, 30:66].mean()) for frame in frames]


@pytest.mark.parametrize(
    ("form", "num_b_frames"), [*((form, 0) for form in CODECS), ("mp4", 2), ("matroska", 2), ("avi", 2), ("mpegts", 2)]
)
def test_each_container_gives_the_frames_that_are_asked_for(form: str, num_b_frames: int) -> None:
    data = video_file(16, NTSC, form=form, num_b_frames=num_b_frames)
    metadata = read_metadata(data, LIMITS, "video")
    assert metadata.size == (64, 96)
    assert metadata.frames == FrameTimes(16, float(NTSC))
    wanted = [0, 5, 5, 10, 15]
    assert greys(data, wanted) == pytest.approx([shade(index) for index in wanted], abs=4)


def test_frames_of_a_variable_rate_keep_their_times() -> None:
    shown = [0, 33, 66, 100, 1000, 1033, 3000, 3500, 3600, 3700, 5000, 9000]
    data = video_file(12, 1000, shown_ms=shown)
    frames = read_metadata(data, LIMITS, "video").frames
    assert frames.times == pytest.approx([time / 1000 for time in shown], abs=1e-3)
    assert frames.rate == pytest.approx(11 / 9, abs=1e-3)
    assert greys(data, [0, 4, 11]) == pytest.approx([shade(0), shade(4), shade(11)], abs=4)


@pytest.mark.parametrize("rotation", [90, 180, -90])
def test_a_video_is_turned_as_its_camera_lay(rotation: int) -> None:
    corner = np.zeros((64, 96, 3), np.uint8)
    corner[:32, :48] = 255
    data = video_file(4, pictures=[corner] * 4, rotation=rotation)
    metadata = read_metadata(data, LIMITS, "video")
    (frame,) = read_frames(data, metadata, [0], lambda pixels: pixels, LIMITS, "video")
    # FFmpeg counts degrees against the clock: +90 takes the upper left to the lower left.
    bright = {90: (-8, 8), 180: (-8, -8), -90: (8, -8)}[rotation]
    assert metadata.size == frame.shape[:2] == ((64, 96) if rotation == 180 else (96, 64))
    assert [frame[y, x, 0] > 128 for y in (8, -8) for x in (8, -8)] == [
        (y, x) == bright for y in (8, -8) for x in (8, -8)
    ]


def test_colours_are_red_green_and_blue() -> None:
    for channel in range(3):
        pure = np.zeros((64, 96, 3), np.uint8)
        pure[:, :, channel] = 255
        data = video_file(4, pictures=[pure] * 4)
        (frame,) = read_frames(data, read_metadata(data, LIMITS, "video"), [2], lambda pixels: pixels, LIMITS, "video")
        assert frame[32, 48].argmax() == channel and frame[32, 48, channel] > 220


def refusal(data: bytes, limits: MediaLimits = LIMITS) -> str:
    with pytest.raises(InvalidRequest) as refused:
        metadata = read_metadata(data, limits, "messages[0].content[1]")
        read_frames(
            data, metadata, range(len(metadata.stamps)), lambda pixels: pixels, limits, "messages[0].content[1]"
        )
    assert refused.value.param == "messages[0].content[1]"
    assert refused.value.message.startswith("messages[0].content[1]: ")
    return refused.value.message


def test_a_video_over_a_limit_is_refused() -> None:
    data = video_file(16, 8)
    assert "2.0 s, more than the maximum of 1.5 s" in refusal(data, MediaLimits(video_s=1.5))
    assert "more than 15 frames" in refusal(data, MediaLimits(video_frames=15))
    assert "96 x 64 pixels, more than the maximum of 6000" in refusal(data, MediaLimits(image_pixels=6000))


def test_a_file_cut_short_or_without_a_video_is_refused() -> None:
    # One has its table of frames at the start, one at the end.
    whole, plain = video_file(30, 8, form="avi"), video_file(30, 8)
    for data in (
        whole[: len(whole) // 2],
        plain[: len(plain) // 2],
        plain[:100],
        b"",
        b"hello",
        Path(__file__).read_bytes(),
    ):
        assert "the video can't be read, is broken or truncated" in refusal(data)


def test_a_playlist_that_names_another_file_is_no_video(tmp_path: Path) -> None:
    secret = tmp_path / "secret.ts"
    secret.write_bytes(video_file(form="mpegts"))
    for text in (
        f"#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\nfile://{secret}\n#EXT-X-ENDLIST\n",
        f"ffconcat version 1.0\nfile {secret}\n",
    ):
        refusal(text.encode())


FILES = tuple(video_file(8, form=form) for form in ("mp4", "matroska", "avi", "mpegts"))


@example(file=FILES[0], place=0.861328125, junk=b"\x00\x00\x00\x00\x10")
@given(file=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), junk=st.binary(min_size=1, max_size=8))
def test_damage_anywhere_is_an_invalid_request_or_does_not_matter(file: bytes, place: float, junk: bytes) -> None:
    at = int(place * len(file))
    data = file[:at] + junk + file[at + len(junk) :]
    limits = MediaLimits(image_pixels=100_000)
    taken: list[Any] = []
    try:
        metadata = read_metadata(data, limits, "video")
        taken = read_frames(data, metadata, range(len(metadata.stamps)), lambda pixels: pixels, limits, "video")
    except (InvalidRequest, MemoryError):  # FFmpeg's own, for a damaged size: the sandbox refuses such a file
        return
    assert len(taken) == len(metadata.stamps) and all(frame.dtype == np.uint8 for frame in taken)


def test_an_error_of_ours_is_not_blamed_on_the_video() -> None:
    data = video_file(4)
    with pytest.raises(ZeroDivisionError):
        read_frames(data, read_metadata(data, LIMITS, "video"), [2], lambda pixels: pixels // (1 // 0), LIMITS, "video")
