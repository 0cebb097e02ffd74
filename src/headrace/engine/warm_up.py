"""Made-up requests that build what steps of each size need, in pieces between the steps of real ones."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from headrace.config import Config
from headrace.engine.drafting import DrafterSetup
from headrace.engine.prefix_cache import PrefixCache
from headrace.engine.runner import Runner
from headrace.engine.warm_up_pieces import MOST_ROWS, NO_DRAFTS, PROMPT_TOKENS, WarmUpPiece, pieces_for
from headrace.errors import EngineDead
from headrace.isolation import isolated
from headrace.models import compiled
from headrace.models.load import LoadedModel
from headrace.models.packed import PackedModel
from headrace.scheduler.admission import MemoryBudget
from headrace.scheduler.scheduler import Scheduler
from headrace.speculate.depth import DepthPlanner, DraftForecast
from headrace.speculate.drafter import Drafter
from headrace.speculate.drafts import Drafts, DraftSource, RankedDraft
from headrace.speculate.ranking import Ranking, RowAcceptance
from headrace.speculate.speculator import Speculator
from headrace.state.sequence import StateCost
from headrace.state.slabs import StatePool
from headrace.types.request import Boundary, BoundaryKind, GenerationRequest
from headrace.types.status import StepVariants, WarmUpStatus

_SHARE = 0.25
"""Of the engine's time, at most, while it has requests."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WarmUpTarget:
    """What requests are served with. drafter: None if nothing is drafted. num_tokens: in the vocabulary.

    make_cache: makes an empty prefix cache.
    """

    model: PackedModel
    drafter: Drafter | None
    pool: StatePool
    num_tokens: int
    memory: MemoryBudget
    make_cache: Callable[[], PrefixCache]

    @property
    def num_variants(self) -> int:
        return self.model.num_new_variants if self.drafter is None else self.drafter.num_new_variants


class WarmUp:
    """Runs pieces one by one. Belongs to the engine's thread, but for `status`.

    A piece is short and leaves nothing behind, so that the engine can serve requests between any two.
    """

    def __init__(self, target: WarmUpTarget | None, max_num_seqs: int, pieces: Sequence[WarmUpPiece]) -> None:
        """target: None if there are no pieces. max_num_seqs: rows of a piece and of requests together."""
        self._given = target
        self._max_num_seqs = max_num_seqs
        self._left = list(pieces)
        self._num_failed = 0
        self._seconds = self._last_s = self._since_s = 0.0
        """Of all pieces so far, of the last one, and of steps with requests since then."""
        self._num_variants_when_ready = self._num_variants
        self.status = WarmUpStatus(num_pieces=len(pieces))
        """As of the last piece; may be read in any thread."""
        self.report: tuple[str, ...] = ()
        """A line for start-up if there is anything to warm up."""
        if pieces:
            most = max(piece.num_rows for piece in pieces)
            self.report = (
                f"warm-up: builds steps of up to {most} rows between requests, which are served more slowly until then",
            )

    @property
    def _target(self) -> WarmUpTarget:
        assert self._given is not None, "only pieces need it"
        return self._given

    @property
    def _num_variants(self) -> int:
        return 0 if self._given is None else self._given.num_variants

    @property
    def is_over(self) -> bool:
        return not self._left

    @property
    def is_due(self) -> bool:
        """Whether requests have had their share of the time since the last piece began."""
        return self._last_s <= _SHARE * (self._since_s + self._last_s)

    @property
    def num_bytes(self) -> int:
        return self._left[0].num_bytes(self._target.memory)

    def fits(self, num_running: int, reserved_bytes: int) -> bool:
        """Whether there are bytes and rows for the next piece besides those of started requests."""
        has_room = self.num_bytes <= self._target.memory.budget_bytes - reserved_bytes
        return has_room and self._left[0].num_rows <= self._max_num_seqs - num_running

    def drop_larger(self) -> None:
        """Leave out pieces that need more memory than there is now."""
        if self.is_over:
            return
        budget_bytes = self._target.memory.budget_bytes
        left = [piece for piece in self._left if piece.num_bytes(self._target.memory) <= budget_bytes]
        num_pieces = self.status.num_pieces - len(self._left) + len(left)
        self._left, self.status = left, replace(self.status, num_pieces=num_pieces)

    def variants(self) -> StepVariants:
        num_built = self._num_variants
        return StepVariants(num_built, num_built - self._num_variants_when_ready if self.is_over else 0)

    def record_step(self, seconds: float) -> None:
        self._since_s += seconds

    def advance(self) -> None:
        """Run the next piece. A failure is logged. Raises EngineDead where the device can compute nothing any more."""
        piece, started = self._left.pop(0), time.monotonic()
        self.run(piece)
        self._last_s, self._since_s = time.monotonic() - started, 0.0
        self._seconds += self._last_s
        num_pieces = self.status.num_pieces
        self.status = WarmUpStatus(num_pieces, num_pieces - len(self._left), self._num_failed, self._seconds)
        if self.is_over:
            self._num_variants_when_ready = self._num_variants
            failed = f", {self._num_failed} of {num_pieces} pieces failed" if self._num_failed else ""
            logger.info("ready: steps were warmed up in %.1f s%s", self._seconds, failed)

    def run(self, piece: WarmUpPiece) -> None:
        def fail(error: Exception) -> None:
            if isinstance(error, EngineDead):
                raise error
            logger.error("steps of %d rows could not be warmed up", piece.num_rows, exc_info=error)
            self._num_failed += 1

        with isolated(fail):
            _SyntheticRequests(piece, self._target).run()


def prepare_warm_up(
    make: Callable[[WarmUpTarget | None, int, Sequence[WarmUpPiece]], WarmUp],
    config: Config,
    loaded: LoadedModel,
    drafting: DrafterSetup,
    pool: StatePool,
    cost: StateCost,
    memory: MemoryBudget,
    chunk_tokens: int,
    max_model_len: int,
) -> WarmUp:
    packed, knobs = loaded.packed, config.engine
    # with snapshots in the shortest chunks: a longer prompt's last chunk may be as short
    make_cache = partial(
        PrefixCache, "", has_spans=cost.has_spans, needs_snapshots=cost.needs_snapshots, shortest_prefix=1
    )
    drafter = None if drafting.speculator is None else drafting.speculator.drafter
    target = WarmUpTarget(packed, drafter, pool, loaded.tokens.end, memory, make_cache)
    if not packed.is_compiled:
        return make(target, knobs.max_num_seqs, ())
    max_rows = min(knobs.max_num_seqs, MOST_ROWS, memory.budget_bytes // memory.cost(PROMPT_TOKENS))
    most_tokens = min(chunk_tokens, compiled.MOST_TOKENS)
    prefills = drafter is not None and drafter.draft_model is not None
    found = pieces_for(max_rows, most_tokens, drafting.max_drafts, caches=knobs.prefix_cache == "on", prefills=prefills)
    fitting = [
        piece for piece in found if piece.num_tokens <= max_model_len and piece.num_bytes(memory) <= memory.budget_bytes
    ]
    return make(target, knobs.max_num_seqs, fitting)


class _SyntheticRequests:
    """The requests of a piece, with a scheduler and a runner that nothing else uses."""

    def __init__(self, piece: WarmUpPiece, target: WarmUpTarget) -> None:
        self._piece = piece
        self._num_tokens = target.num_tokens
        self._planned = _PlannedDrafts()
        self._speculator = None
        if target.drafter is not None:
            most = max([each.number for each in piece.drafts], default=0)
            self._speculator = Speculator(target.drafter, most, self._planned, _DraftsAllPlanned(self._planned))
        prefixes = target.make_cache() if piece.num_snapshots else None
        stages = [] if prefixes is None else [prefixes]
        self._scheduler = Scheduler(
            piece.num_rows,
            piece.num_rows * piece.num_tokens,  # so that all prompts are computed together
            piece.num_tokens,
            memory=target.memory,
            stages=stages,
        )
        ahead = target.model.launches_ahead
        self._runner = Runner(
            target.model, target.num_tokens, prefixes, speculator=self._speculator, ahead=ahead, pool=target.pool
        )
        self._num_requests = 0

    def run(self) -> None:
        """Raises the first row's error, and EngineDead."""
        try:
            for number in range(self._piece.num_rows):
                self._add(self._piece.prompt_tokens, number)
            for drafts in self._piece.drafts:
                # before the step that precedes the one they are for
                self._planned.drafts = drafts
                self._step_behind_prompts()
            if self._piece.joining:
                self._scheduler.abort("0")
                self._add(self._piece.joining, 0 if self._piece.num_snapshots else self._piece.num_rows)
            self._planned.drafts = NO_DRAFTS
            self._step_behind_prompts()
        finally:
            self._runner.drop()
        if self._speculator is not None and self._speculator.num_failures:
            raise RuntimeError("drafting failed in the warm-up")

    def _add(self, num_tokens: int, first_id: int) -> None:
        """first_id: of the prompt, whose ids rise by one."""
        number = self._num_requests
        self._num_requests += 1
        prompt = tuple([(first_id + place) % self._num_tokens for place in range(num_tokens)])
        first = num_tokens - self._piece.num_snapshots
        inside = tuple(Boundary(length, BoundaryKind.PROMPT) for length in range(first, num_tokens))
        name, sampling, max_tokens = str(number), self._piece.sampling, self._piece.max_tokens
        request = GenerationRequest(name, prompt, sampling, max_tokens, boundaries=inside)
        self._scheduler.add(request, time.monotonic())

    def _step_behind_prompts(self) -> None:
        while self._step():
            pass

    def _step(self) -> int:
        """Gives how many tokens of prompts were computed."""
        self._runner.free(self._scheduler.take_released())
        self._scheduler.end_stages()
        before = time.monotonic()
        plan = self._scheduler.schedule(None if self._scheduler.spare_s is None else math.inf)
        if plan.is_empty:  # no memory for another row
            return 0
        result = self._runner.execute(plan, self._scheduler.planned_requests())
        if result.failures:
            raise result.failures[0].error
        now = time.monotonic()
        self._scheduler.update(result, now - before, now)
        self._scheduler.set_num_drafts(self._runner.draft())
        return plan.num_prompt_tokens


class _PlannedDrafts(Ranking):
    """The same candidate for every row."""

    def __init__(self) -> None:
        super().__init__()
        self.drafts = NO_DRAFTS

    def best(self, acceptance: RowAcceptance, max_drafts: int, **others: Any) -> Drafts:
        number = min(self.drafts.number, max_drafts)
        if self.drafts.by_model:
            return Drafts((), (RankedDraft(DraftSource.MODEL, 0, 1.0),) * number)
        return Drafts((0,) * number, (RankedDraft(DraftSource.FORCED, 0, 1.0),) * number)


class _DraftsAllPlanned(DepthPlanner):
    """Plans all of every candidate, whatever it costs."""

    def __init__(self, planned: _PlannedDrafts) -> None:
        super().__init__()
        self._planned = planned

    def prefills(self, rows: Sequence[DraftForecast]) -> list[int]:
        return [number for number, row in enumerate(rows) if row.prefill_s]

    def plan(self, rows: Sequence[DraftForecast]) -> tuple[int, ...]:
        return tuple([len(row.survival) for row in rows])

    def is_due(self, rows: Sequence[DraftForecast]) -> bool:
        """False before steps without drafts, so that they are overlapped."""
        return self._planned.drafts.number > 0
