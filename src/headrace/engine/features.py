"""Embeddings of images and videos, kept until the prompts that contain them are computed, and beyond."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from headrace.errors import GenerationFailed
from headrace.isolation import isolated
from headrace.models.chunked import ChunkedEncoding
from headrace.models.media import RowMedia, inputs_within, media_positions, row_media
from headrace.models.vision_tower import MediaEmbeddings
from headrace.models.vlm import Tower
from headrace.recent_times import RecentTimes
from headrace.scheduler.stages import PromptPlan
from headrace.types.media import MediaInput, PromptMedia
from headrace.types.request import GenerationRequest
from headrace.types.status import WaitReason

logger = logging.getLogger(__name__)

SLICE_SHARE = 0.5
"""Share of a plain step's time that the tower takes between two steps of running streams. As much again is left for
surprises, so that they do not wait for two steps' time."""

IDLE_SLICE_S = 0.25
"""The same when no stream runs: a new request waits for it."""


@dataclass(slots=True, eq=False)
class _Kept:
    """Embeddings of one input, and the requests that still need them."""

    embeddings: MediaEmbeddings
    needed_by: set[str] = field(default_factory=set)

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in (self.embeddings.rows, *self.embeddings.deep))


class LiveMedia:
    def __init__(self, media: PromptMedia, embedded: dict[bytes, MediaEmbeddings]) -> None:
        """embedded: by digest, of all inputs that are still to be computed."""
        self._media = media
        self._embedded = embedded

    def row(self, start: int, end: int) -> RowMedia:
        """The media needed to compute the tokens `start` to `end` of the sequence.

        Raises GenerationFailed if the tower could not encode one of them.
        """
        missing = [one for one in inputs_within(self._media, start, end) if one.digest not in self._embedded]
        if missing:
            raise GenerationFailed("the vision tower could not embed an image or video of the prompt")
        return row_media(self._media, start, end, self._embedded)

    def entry(self, start: int, end: int) -> RowMedia:
        """The same for a prediction head, which reads each token at the position of the one before it."""
        return RowMedia(media_positions(self._media, start - 1, end - 1), self.row(start, end).spans)


class FeatureCache:
    """A stage: holds requests back until the media after their cached part are embedded.

    Inputs are embedded one by one, in slices between steps, so that running streams go on. Those that the prefix cache
    covers are skipped. Embeddings stay, up to a limit, for the next turn of a chat, which sends its pictures again.
    """

    def __init__(
        self, tower: Tower | None = None, max_bytes: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """tower: None for a model without vision. max_bytes: of embeddings that no request needs any more."""
        self._tower = tower
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._pending: dict[str, list[MediaInput]] = {}
        self._failed: dict[str, set[bytes]] = {}
        """Inputs that the tower has failed on, for each request until it ends."""
        self._begun: tuple[bytes, ChunkedEncoding[MediaEmbeddings]] | None = None
        self._clock = clock
        self._work_s = RecentTimes[None]()
        """Seconds that a multiply-add takes."""

    @property
    def num_bytes(self) -> int:
        return sum(kept.num_bytes for kept in self._kept.values())

    @property
    def has_work(self) -> bool:
        return any(self._pending.values())

    def prepare(self, request: GenerationRequest, plan: PromptPlan) -> PromptPlan | WaitReason:
        if request.media is None:
            return plan
        needed = inputs_within(request.media, plan.num_cached, len(request.prompt))
        failed = self._failed.get(request.request_id, set())
        missing = [one for one in needed if one.digest not in self._kept and one.digest not in failed]
        if not missing:
            for one in needed:
                if one.digest in self._kept:
                    self._kept[one.digest].needed_by.add(request.request_id)
                    self._kept.move_to_end(one.digest)
            return plan
        self._pending[request.request_id] = missing
        return WaitReason.MEDIA

    def still_waits(self, request_id: str) -> bool:
        return bool(self._pending.get(request_id))

    def advance(self, plain_step_s: float | None) -> None:
        """Continue with the first input of the request that has waited longest.

        plain_step_s: the time of a step of the running streams, the most that they are to wait; 0 for as little as
        possible, None if there are none.
        """
        waiting = next(((request_id, missing) for request_id, missing in self._pending.items() if missing), None)
        if waiting is None:
            return
        request_id, missing = waiting
        one = missing[0]
        if one.digest not in self._kept:
            spare_s = IDLE_SLICE_S if plain_step_s is None else SLICE_SHARE * plain_step_s
            with isolated(partial(self._fail, missing, request_id)):
                self._embed(one, spare_s)
        if one.digest in self._kept:
            missing.pop(0)
            self._kept[one.digest].needed_by.add(request_id)
            self._shrink(self._max_bytes)

    def _fail(self, missing: list[MediaInput], request_id: str, error: Exception) -> None:
        """The tower has failed on the first one: the request fails when it reaches that input."""
        logger.error("the vision tower failed on an input of %s", request_id, exc_info=error)
        self._begun = None
        self._failed.setdefault(request_id, set()).add(missing.pop(0).digest)

    def _embed(self, one: MediaInput, spare_s: float) -> None:
        if self._begun is None or self._begun[0] != one.digest:
            assert self._tower is not None, "requests with media wait here only for a model with vision"
            self._begun = (one.digest, self._tower.begin(one))
        embedding = self._begun[1]
        started = self._clock()
        work_s = self._work_s.usual(None)
        work = embedding.compute(0 if work_s is None else spare_s / work_s)
        elapsed_s = self._clock() - started
        if work and elapsed_s > 0:  # a clock may be too coarse for a small piece
            self._work_s.add(None, elapsed_s / work)
        if embedding.is_done:
            self._kept[one.digest] = _Kept(embedding.result)
            self._begun = None

    def media_of(self, request: GenerationRequest) -> LiveMedia | None:
        if request.media is None:
            return None
        needed = {one.digest for one in request.media.inputs}
        return LiveMedia(request.media, {key: self._kept[key].embeddings for key in needed if key in self._kept})

    def end(self, request_id: str) -> None:
        self._pending.pop(request_id, None)
        if not any(self._pending.values()):
            self._begun = None
        for kept in self._kept.values():
            kept.needed_by.discard(request_id)
        self._failed.pop(request_id, None)
        self._shrink(self._max_bytes)

    def evict(self, num_bytes: int) -> int:
        """Free at least `num_bytes`, or all that no request needs. Returns the bytes freed."""
        before = self.num_bytes
        self._shrink(max(0, before - num_bytes))
        return before - self.num_bytes

    def _shrink(self, limit: int) -> None:
        """Drop what no request needs, least recently needed first, until at most `limit` bytes are held."""
        held = self.num_bytes
        for digest, kept in list(self._kept.items()):
            if held <= limit:
                return
            if not kept.needed_by:
                held -= kept.num_bytes
                del self._kept[digest]
