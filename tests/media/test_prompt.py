"""Token ids and positions of prompts with media, against transformers' figures."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from media.reference import REFERENCE, cases, from_repeats, from_runs, name, options_of, profile_of

from headrace.media.patches import PreparedImage, PreparedMedia, PreparedVideo
from headrace.media.prepare import choose_frames
from headrace.media.profile import VisionProfile
from headrace.media.prompt import Block, ExpandedPrompt, expand, expanded_length, media_positions, num_media_tokens
from headrace.media.video import FrameTimes, SampledFrames, group_times, sample
from headrace.types.media import MediaLimits

VISION_START, VISION_END, IMAGE, VIDEO = 151652, 151653, 151655, 151656

# The Qwen3 vocabulary's ids of what timestamps are made of.
_PIECES = {"<": 27, ".": 13, ">": 29} | {str(digit): 15 + digit for digit in range(10)}
_SECONDS = 6486


def encode(text: str) -> list[int]:
    number = text.removesuffix(" seconds>")
    return [*(_PIECES[character] for character in number), _SECONDS, _PIECES[">"]]


def video(frames: FrameTimes, taken: SampledFrames, grid: Any) -> PreparedVideo:
    patches = np.zeros((grid[0] * grid[1] * grid[2], 3), np.uint8)
    group_s = 2 / (len(taken.indices) / frames.num_frames * frames.rate)
    return PreparedVideo(patches, tuple(grid), group_times(taken.times, 2), group_s)


def items(case: Any, profile: VisionProfile) -> list[PreparedMedia]:
    """The case's media in the prompt's order, with patches of nothing."""
    found: dict[str, list[PreparedMedia]] = {"image": [], "video": []}
    for grid in case["expect"]["image_grid_thw"] or ():
        found["image"].append(PreparedImage(np.zeros((grid[1] * grid[2], 3), np.uint8), tuple(grid)))
    for each, grid in zip(case.get("videos", ()), case["expect"]["video_grid_thw"] or (), strict=True):
        frames = FrameTimes(each["frames"], each["src_fps"])
        if case["family"] == "qwen3":
            taken = choose_frames(frames, profile.vision, MediaLimits(), options_of(case))
        else:
            taken = sample(frames, each["frames"])
        found["video"].append(video(frames, taken, grid))
    kinds = [part.partition("_pad|>")[0] for part in case["text"].split("<|")]
    return [found[kind].pop(0) for kind in kinds if kind in found]


def unexpanded(case: Any) -> list[int]:
    """The prompt as a template leaves it: each item one token between its pair."""
    ids: list[int] = []
    for value, count in case["expect"]["hf"]["ids_rle"]:
        ids += [value] * (1 if value in (IMAGE, VIDEO) else count)
    pair = [VISION_START, VIDEO, VISION_END]
    folded: list[int] = []
    while ids:
        if ids[:2] == [VISION_START, _PIECES["<"]]:  # a video: everything up to the second of two ends in a row
            stop = next(at for at in range(1, len(ids)) if ids[at - 1 : at + 1] == [VISION_END, VISION_END])
            folded, ids = folded + pair, ids[stop + 1 :]
        else:
            folded, ids = [*folded, ids[0]], ids[1:]
    return folded


def expanded(case: Any) -> ExpandedPrompt:
    profile = profile_of(case)
    return expand(unexpanded(case), items(case, profile), profile, encode)


@pytest.mark.parametrize("case", cases("prompt"), ids=name)
def test_a_prompt_has_the_token_ids_of_transformers(case: Any) -> None:
    assert list(expanded(case).token_ids) == from_repeats(case["expect"]["hf"]["ids_rle"])


@pytest.mark.parametrize("case", cases("prompt"), ids=name)
def test_a_prompt_has_the_positions_that_its_model_was_trained_with(case: Any) -> None:
    expected = case["expect"].get("original_max_plus_1", case["expect"]["hf"])
    check_positions(expanded(case), expected)


def check_positions(prompt: ExpandedPrompt, expected: Any) -> None:
    assert prompt.media.positions is not None
    positions = np.asarray(prompt.media.positions)
    for axis, runs in zip(positions, (expected["t"], expected["h"], expected["w"]), strict=True):
        assert axis.tolist() == from_runs(runs)
    assert sha256(positions.astype("<i4").tobytes()).hexdigest() == expected["sha256_int32_3xN"]
    assert prompt.media.rope_delta == expected["rope_delta"]
    decoded = [len(prompt.token_ids) + step + prompt.media.rope_delta for step in range(5)]
    assert decoded == expected["first_5_decode_positions"]


@pytest.mark.parametrize("case", cases("image"), ids=name)
def test_an_image_takes_as_many_tokens_as_in_transformers(case: Any) -> None:
    assert num_media_tokens(tuple(case["expect"]["grid_thw"]), profile_of(case).vision) == case["expect"]["tokens"]


@pytest.mark.parametrize("case", [case for case in cases("video") if "total_tokens_hf" in case["expect"]], ids=name)
def test_a_video_takes_as_many_tokens_as_in_transformers(case: Any) -> None:
    expected, profile = case["expect"], profile_of(case)
    taken = SampledFrames(
        tuple(range(expected["sampled"])),
        tuple(index / expected.get("fps_used_for_timestamps", 1) for index in from_runs(expected["indices_ap"])),
    )
    item = video(FrameTimes(expected["sampled"], 1.0), taken, expected["grid_thw"])
    prompt = expand([VISION_START, VIDEO, VISION_END], [item], profile, encode)
    assert prompt.token_ids.count(VIDEO) == expected["placeholder_tokens"]
    assert prompt.token_ids.count(VISION_START) == expected["vision_start_count_hf"]
    assert len(prompt.token_ids) == expected.get("span_tokens_hf", expected["placeholder_tokens"] + 2)


def test_each_group_of_a_timed_video_is_an_input_of_its_own() -> None:
    case = next(case for case in cases("prompt") if case["id"] == "p-video-image-video")
    prompt = expanded(case)
    spans = [(each.start, each.end) for each in prompt.media.inputs]
    places = [index for index, token_id in enumerate(prompt.token_ids) if token_id in (IMAGE, VIDEO)]
    assert [index for start, end in spans for index in range(start, end)] == places
    assert [each.grid for each in prompt.media.inputs] == [(1, 4, 6)] * 2 + [(1, 20, 16)] + [(1, 6, 4)] * 2


def test_lengths_before_and_behind_media_are_carried_over() -> None:
    case = next(case for case in cases("prompt") if case["id"] == "p-image-video")
    before, prompt = unexpanded(case), expanded(case)
    for length in range(len(before) + 1):
        moved = expanded_length(length, prompt.growth)
        behind = len(before) - length
        # Behind the last item all of the rest is the same, before the first one all of the beginning.
        assert prompt.token_ids[moved:] == tuple(before[length:]) or behind > before[::-1].index(VIDEO)
        assert prompt.token_ids[:moved] == tuple(before[:length]) or length > before.index(IMAGE)
        assert length == len(before) or before[length] == prompt.token_ids[moved] or before[length] == VIDEO


def test_media_and_placeholders_that_do_not_match_are_an_error() -> None:
    profile = profile_of({"family": "qwen3"})
    image = PreparedImage(np.zeros((4, 3), np.uint8), (1, 2, 2))
    for token_ids, media in (([1, 2], [image]), ([1, IMAGE, 2], []), ([VIDEO], [image])):
        with pytest.raises(ValueError, match="media placeholders"):
            expand(token_ids, media, profile, encode)


def test_equal_pictures_have_one_digest_and_others_another() -> None:
    profile = profile_of({"family": "qwen3"})
    rng = np.random.default_rng(1)
    first = rng.integers(0, 256, (24, 1536), dtype=np.uint8)
    changed = first.copy()
    changed[-1, -1] ^= 1
    media = [
        PreparedImage(first, (1, 4, 6)),
        PreparedImage(first.copy(), (1, 4, 6)),
        PreparedImage(changed, (1, 4, 6)),
        PreparedImage(first, (1, 6, 4)),
    ]
    digests = [each.digest for each in expand([IMAGE, 7] * 4, media, profile, encode).media.inputs]
    assert digests[0] == digests[1] and len(set(digests)) == 3
    assert {len(digest) for digest in digests} == {32}


@given(
    pieces=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(1, 5), st.integers(1, 5)), max_size=6),
    rest=st.integers(0, 9),
)
def test_positions_never_fall_back_and_leave_no_gap(pieces: list[tuple[int, int, int, int]], rest: int) -> None:
    blocks, index = [], 0
    for num_text, depth, rows, columns in pieces:
        blocks.append(Block(index + num_text, tuple(range(depth)), rows, columns))
        index = blocks[-1].end
    positions, delta = media_positions(index + rest, blocks)
    highest = np.maximum.accumulate(positions.max(axis=0)) if index + rest else np.array([])
    assert set(highest.tolist()) <= set(range(index + rest + 1))
    is_media = np.zeros(index + rest, bool)
    for block in blocks:
        is_media[block.start : block.end] = True
        start = positions[:, block.start]
        assert (start == start[0]).all()
        inside = positions[:, block.start : block.end] - start[:, None]
        assert inside.max(axis=1).tolist() == [len(block.times) - 1, block.rows - 1, block.columns - 1]
    for at in np.flatnonzero(~is_media):
        assert (positions[:, at] == (highest[at - 1] + 1 if at else 0)).all()
    assert index + rest + delta == (highest[-1] + 1 if len(highest) else 0)


def test_the_reference_covers_both_families() -> None:
    assert {case["family"] for case in REFERENCE["prompt"]} == {"qwen3", "qwen2_5"}
