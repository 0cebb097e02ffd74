"""Clips: which way shapes move, and in which order they appear, over 4 to 16 frames."""

import random

from training.jobs.pictures import COLORS, GROUNDS, KINDS, article, name_of
from training.sample import VIDEO_MARK, Clip, Drawing, Sample, Shape, Turn, is_held_out

DIRECTIONS = {"to the right": (1, 0), "to the left": (-1, 0), "up": (0, -1), "down": (0, 1)}
SMALL_SIZES, LARGE_SIZES = ((96, 96), (96, 96), (96, 128), (128, 128)), ((96, 96),)
LARGE_FROM_FRAMES = 10  # longer clips are shrunk to the smallest size by the pixel budget of the preprocessor


def _looks(stream: random.Random, ground: str, count: int) -> list[tuple[str, str]]:
    return stream.sample([(kind, color) for kind in KINDS for color in COLORS if color != ground], count)


def _path(stream: random.Random, direction: str, lane: float) -> tuple[tuple[float, float], tuple[float, float]]:
    """Start and end of a straight movement along one lane (share of the other axis)."""
    if direction == "nowhere":
        spot = (stream.uniform(0.25, 0.75), lane)
        return spot, spot
    dx, dy = DIRECTIONS[direction]
    reach = stream.uniform(0.2, 0.32)
    start, end = 0.5 - reach, 0.5 + reach
    if dx:
        return ((start, lane), (end, lane)) if dx > 0 else ((end, lane), (start, lane))
    return ((lane, start), (lane, end)) if dy > 0 else ((lane, end), (lane, start))


def _moving(stream: random.Random, num_frames: int) -> tuple[list[Drawing], str, str]:
    ground = stream.choice(GROUNDS)
    looks = _looks(stream, ground, stream.choice((1, 1, 2)))
    axis = stream.choice((("to the right", "to the left"), ("up", "down")))
    lanes = (stream.uniform(0.35, 0.65),) if len(looks) == 1 else (stream.uniform(0.22, 0.3), stream.uniform(0.7, 0.78))
    ways = [stream.choice(axis) if stream.random() < 0.88 else "nowhere" for _ in looks]
    paths = [_path(stream, way, lane) for way, lane in zip(ways, lanes, strict=True)]
    radius = stream.uniform(0.1, 0.16)
    frames = []
    for index in range(num_frames):
        share = index / (num_frames - 1)
        frames.append(
            Drawing(
                ground,
                tuple(
                    Shape(
                        kind,
                        color,
                        start[0] + (end[0] - start[0]) * share,
                        start[1] + (end[1] - start[1]) * share,
                        radius,
                    )
                    for (kind, color), (start, end) in zip(looks, paths, strict=True)
                ),
            )
        )
    at = stream.randrange(len(looks))
    named = f"{looks[at][1]} {looks[at][0]}"
    question = stream.choice(
        (
            f"Which way does the {named} move?",
            f"Where does the {named} go?",
            f"In which direction does the {named} move?",
            *(("What happens in the video?", "Describe the video.") if len(looks) == 1 else ()),
        )
    )
    answer = f"The {named} does not move." if ways[at] == "nowhere" else f"The {named} moves {ways[at]}."
    return frames, question, answer


def _order(stream: random.Random, num_frames: int) -> tuple[list[Drawing], str, str]:
    """Shapes shown one after another; every one fills at least a whole pair of frames."""
    ground = stream.choice(GROUNDS)
    num_shapes = 2 if num_frames < 6 else stream.choice((2, 3))
    looks = _looks(stream, ground, num_shapes)
    shown = [
        Shape(kind, color, stream.uniform(0.35, 0.65), stream.uniform(0.35, 0.65), stream.uniform(0.13, 0.2))
        for kind, color in looks
    ]
    num_pairs = (num_frames + 1) // 2
    frames = [
        Drawing(ground, (shown[min((index // 2) * num_shapes // num_pairs, num_shapes - 1)],))
        for index in range(num_frames)
    ]
    names = [article(name_of(shape, sized=False)) for shape in shown]
    kind = stream.randrange(3)
    if kind == 0:
        return frames, stream.choice(("What comes first?", "Which shape comes first?")), f"First comes {names[0]}."
    if kind == 1:
        return frames, stream.choice(("What comes last?", "Which shape comes last?")), f"Last comes {names[-1]}."
    question = stream.choice(
        (
            "What happens in the video?",
            "In which order do the shapes come?",
            "Describe the video.",
            "What do you see in this video?",
        )
    )
    return frames, question, f"First comes {', then '.join(names)}."


def make(stream: random.Random, held_out: bool = False) -> Sample:
    """One clip and one question; the split is by the clip's frames."""
    while True:
        num_frames = stream.choice((4, 6, 8, 8, 10, 12, 16))
        frames, question, answer = (_moving if stream.random() < 0.6 else _order)(stream, num_frames)
        if is_held_out(str(frames[0]) + question) == held_out:
            break
    rate = stream.choice((2.0, 2.0, 2.0, 1.0, 4.0, 24.0))
    clip = Clip(tuple(frames), tuple(index / rate for index in range(num_frames)))
    sizes = LARGE_SIZES if num_frames >= LARGE_FROM_FRAMES else SMALL_SIZES
    thinking = stream.random() < 0.4
    turns = (
        Turn("user", VIDEO_MARK + question if stream.random() < 0.8 else question + VIDEO_MARK),
        Turn("assistant", answer, "I watch the video." if thinking else None),
    )
    return Sample("clips", turns, thinking=thinking, clip=clip, size=stream.choice(sizes))
