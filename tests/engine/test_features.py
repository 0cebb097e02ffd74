"""Slices of the vision tower's work: as long as running streams can bear, in order, for requests that still wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import mlx.core as mx
import pytest

from headrace.engine.features import IDLE_SLICE_S, SLICE_SHARE, FeatureCache
from headrace.errors import GenerationFailed
from headrace.models.vision_tower import MediaEmbeddings, VisionTower
from headrace.scheduler.stages import PromptPlan, PromptStages
from headrace.types.media import MediaInput, PromptMedia
from headrace.types.request import GREEDY, GenerationRequest
from headrace.types.status import WaitReason

HALF = (0.5, 0.5, 0.5)
WORK_S = 2.0**-10
"""Seconds of a unit of the made-up tower's work."""
BROKEN = 13
"""Bytes of an input that the tower can't embed."""


@dataclass
class MadeUpEmbedding:
    """Pieces of one unit each; a slice takes as long as it has units."""

    tower: MadeUpTower
    left: int
    result: MediaEmbeddings = field(default_factory=lambda: MediaEmbeddings(mx.zeros((4, 8))))

    @property
    def is_done(self) -> bool:
        return self.left == 0

    def compute(self, max_work: float) -> int:
        done = min(self.left, max(1, int(max_work)))
        self.left -= done
        self.tower.now += done * WORK_S
        self.tower.slices.append(done)
        return done


class MadeUpTower:
    """Takes as many units for an input as that has bytes."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slices: list[int] = []
        self.begun: list[bytes] = []

    def begin(self, one: MediaInput) -> MadeUpEmbedding:
        self.begun.append(one.digest)
        if one.pixels.nbytes == BROKEN:
            raise RuntimeError("an input that the tower can't embed")
        return MadeUpEmbedding(self, one.pixels.nbytes)


def features(tower: MadeUpTower, max_bytes: int = 10**6) -> FeatureCache:
    return FeatureCache(cast(VisionTower, cast(Any, tower)), max_bytes, clock=lambda: tower.now)


def waits(stages: PromptStages, request: GenerationRequest) -> bool:
    """Whether the request waits for its media; else all of the prompt may be computed."""
    found = stages.prepare(request)
    assert found in (WaitReason.MEDIA, PromptPlan())
    return found is WaitReason.MEDIA


def request(request_id: str, works: Sequence[int]) -> GenerationRequest:
    """A prompt with an input for each number, which takes so many units; equal ones are the same picture."""
    inputs = [
        MediaInput(4 * index, 4 * index + 4, memoryview(bytes(work)), (1, 4, 4), HALF, HALF, b"%d" % work)
        for index, work in enumerate(works)
    ]
    return GenerationRequest(request_id, (7,) * (4 * len(works) + 1), GREEDY, 1, media=PromptMedia(tuple(inputs)))


def test_a_slice_takes_no_more_than_running_streams_can_bear() -> None:
    tower = MadeUpTower()
    cache = features(tower)
    stages = PromptStages([cache])
    one = request("a", [500])
    assert waits(stages, one)
    step_s = 2.0**-5
    while waits(stages, one):
        cache.advance(step_s)
    assert sum(tower.slices) == 500 and tower.begun == [b"500"]
    assert tower.slices[:2] == [1, 1]  # how fast the tower is was not known
    assert set(tower.slices[2:-1]) == {int(SLICE_SHARE * step_s / WORK_S)}


def test_where_no_step_was_measured_a_slice_is_one_piece_and_without_streams_it_is_long() -> None:
    tower = MadeUpTower()
    cache = features(tower)
    stages = PromptStages([cache])
    assert waits(stages, request("a", [1000]))
    for _ in range(3):
        cache.advance(0.0)
    cache.advance(None)
    assert tower.slices == [1, 1, 1, int(IDLE_SLICE_S / WORK_S)]


def test_inputs_are_looked_at_in_order_and_the_same_one_once() -> None:
    tower = MadeUpTower()
    cache = features(tower)
    stages = PromptStages([cache])
    first, second = request("a", [30, 20]), request("b", [20, 10])
    assert waits(stages, first) and waits(stages, second)
    while waits(stages, second):
        cache.advance(None)
    assert tower.begun == [b"30", b"20", b"10"]
    assert not waits(stages, first)


def test_what_nobody_waits_for_any_more_is_given_up() -> None:
    tower = MadeUpTower()
    cache = features(tower)
    stages = PromptStages([cache])
    assert waits(stages, request("a", [50]))
    cache.advance(0.0)
    stages.end("a")
    cache.advance(0.0)
    assert tower.slices == [1]
    assert waits(stages, request("b", [40]))
    while waits(stages, request("b", [40])):
        cache.advance(None)
    assert tower.begun == [b"50", b"40"] and sum(tower.slices) == 1 + 40


def test_a_clock_that_has_not_moved_says_nothing_about_the_tower_s_speed() -> None:
    tower = MadeUpTower()
    cache = FeatureCache(cast(VisionTower, cast(Any, tower)), 10**6, clock=lambda: 1.0)
    stages = PromptStages([cache])
    one = request("a", [5])
    assert waits(stages, one)
    for _ in range(5):
        cache.advance(1.0)
    assert tower.slices == [1, 1, 1, 1, 1] and not waits(stages, one)


def test_what_the_tower_failed_on_is_remembered_until_its_request_ends() -> None:
    tower = MadeUpTower()
    cache = features(tower)
    stages = PromptStages([cache])
    broken = request("a", [BROKEN, 20])
    while waits(stages, broken):
        cache.advance(None)
    for other in range(3):  # they take the rows and end, while it waits for one
        assert not waits(stages, request(f"b{other}", [20]))
        stages.end(f"b{other}")
        assert not waits(stages, broken)
    assert tower.begun == [b"13", b"20"]
    media = cache.media_of(broken)
    assert media is not None
    with pytest.raises(GenerationFailed, match="could not embed"):
        media.row(0, 4)
    stages.end("a")
    assert waits(stages, replace(broken, request_id="c")), "another request tries again"
