"""Executes a plan: states, one packed forward, sampling, commits."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import mlx.core as mx
import numpy as np

from headrace.backend import device
from headrace.engine.adapters import AdapterPool
from headrace.engine.drafting import StepReports, draft_status
from headrace.engine.features import FeatureCache
from headrace.engine.forward import Draws, PromptLogprobs, confirm, launch_next, logits_of
from headrace.engine.prefix_cache import PrefixCache
from headrace.engine.windows import (
    LiveSequence,
    Window,
    failures_of,
    not_drawn,
    open_window,
    params_of_choice,
)
from headrace.errors import EngineDead, GenerationFailed
from headrace.grammar.constraint import Constraint
from headrace.grammar.factory import ConstraintFactory
from headrace.isolation import isolate_each, isolated
from headrace.models.packed import PackedModel
from headrace.models.positions import TokenPositions
from headrace.models.step import QueryRecorder
from headrace.sampling.draw import NO_TOKEN
from headrace.sampling.history import History, needs_history
from headrace.speculate.speculator import DraftState, Speculator
from headrace.state.records import SequenceRecord
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool
from headrace.types.request import GenerationRequest
from headrace.types.status import DraftStatus
from headrace.types.step import Chunk, ChunkFailure, ChunkResult, StepPlan, StepResult

logger = logging.getLogger(__name__)


class Runner:
    """Holds the states of all running sequences and computes their chunks. Belongs to the engine's thread."""

    def __init__(
        self,
        model: PackedModel,
        vocab_size: int,
        prefixes: PrefixCache | None = None,
        constraints: ConstraintFactory | None = None,
        speculator: Speculator | None = None,
        features: FeatureCache | None = None,
        adapters: AdapterPool | None = None,
        *,
        pool: StatePool | None = None,
        records_queries: bool = False,
        ahead: bool = False,
    ) -> None:
        """prefixes, constraints, speculator, features, adapters, pool: None for none, or for an empty one.

        records_queries: see `recorded`. ahead: launch steps ahead where possible (async scheduling), see `launch_next`.
        """
        assert not (ahead and records_queries), "steps launched ahead can't record queries"
        self._model = model
        self._vocab_size = vocab_size
        self._prefixes = PrefixCache.off() if prefixes is None else prefixes
        self._constraints = constraints
        self._speculator = speculator
        self._features = FeatureCache() if features is None else features
        self.adapters = AdapterPool(model.loras) if adapters is None else adapters
        self._records_queries = records_queries
        self._runs_ahead = ahead
        self._pool = StatePool(has_batches=model.kernels.attends_in_batches) if pool is None else pool
        of_drafts = None if speculator is None else speculator.drafter.pool
        self._pools = [self._pool] if of_drafts is None else [self._pool, of_drafts]
        self._live: dict[str, LiveSequence] = {}
        self._gained: list[str] = []
        """Sequences that have gained tokens in the last step."""
        self._failures: list[ChunkFailure] = []
        """Of the step in progress."""
        self._reports = StepReports(speculator)

    @property
    def state_bytes(self) -> int:
        # shared arrays count once
        own = {id(array): array.nbytes for live in self._live.values() for array in live.state.own_arrays()}
        return sum(pool.num_bytes for pool in self._pools) + sum(own.values())

    @property
    def permanent_bytes(self) -> int:
        return sum(pool.num_bytes for pool in self._pools if pool.is_permanent)

    @property
    def preempted_bytes(self) -> int:
        return sum(live.record.num_bytes for live in self._live.values() if live.record is not None)

    def recorded(self, sequence_id: str) -> tuple[SequenceState, QueryRecorder]:
        live = self._live[sequence_id]
        assert live.recorder is not None, "queries were not recorded"
        return live.state, live.recorder

    def draft_status(self) -> DraftStatus | None:
        return draft_status(self._speculator, [live.state for live in self._live.values()])

    def execute(self, plan: StepPlan, requests: Mapping[str, GenerationRequest]) -> StepResult:
        """Compute every chunk of the plan. `requests` has its requests by id.

        An error in one row's own work fails that row; an error in the step fails all its rows. Either way every chunk
        and fork gets a result or a failure, and the caller frees the failed rows. Raises EngineDead if the device
        can't compute any more.
        """
        self._gained, self._failures = [], []
        if plan.preempted:
            self._preempt(plan.preempted)
        self._reports.begin()
        # a row whose window can't be opened (for example, no memory for a larger slot) fails alone
        opened: list[Window | None] = isolate_each(plan.chunks, partial(self._open, requests), self._fail_chunk)
        windows = [one for one in opened if one is not None]
        if not windows:
            return StepResult((), tuple(self._failures))
        try:
            self._compute(windows)
        except Exception as error:  # the step's exception boundary: its rows fail, the engine goes on
            # MLX's errors tell of the device, never of a request
            logger.exception("a step of %d rows failed%s", len(windows), f": {error}" * (type(error) is RuntimeError))
            if device.is_lost():
                raise EngineDead("the device has failed at every call since a step failed") from error
            for one in windows:
                one.live.is_sound = False
            # the prefix cache may hold copies that were launched before and have failed with the step
            self._prefixes.evict(sys.maxsize)
            self._failures += [failure for one in windows for failure in failures_of(one.chunk, error)]
            return StepResult((), tuple(self._failures))
        self._reports.finish(windows)
        by_row = isolate_each(windows, self._close, self._fail_window)
        results = [result for of_row in by_row for result in of_row]
        self._gained = [result.sequence_id for result in results if result.token_ids]
        return StepResult(tuple(results), tuple(self._failures))

    def _fail_chunk(self, chunk: Chunk, error: Exception) -> None:
        logger.error("sequence %s failed", chunk.sequence_id, exc_info=error)
        self._failures += failures_of(chunk, error)

    def _fail_window(self, window: Window, error: Exception) -> list[ChunkResult]:
        window.live.is_sound = False
        self._fail_chunk(window.chunk, error)
        return []

    def _preempt(self, sequence_ids: Iterable[str]) -> None:
        """Replace states by checkpoints; if that fails, the sequence fails when it resumes."""

        def keep(sequence_id: str) -> None:
            live = self._live[sequence_id]
            try:
                live.record = live.state.checkpoint()
            finally:
                live.state.release()

        def fail(sequence_id: str, error: Exception) -> None:
            logger.error("the state of preempted sequence %s could not be kept", sequence_id, exc_info=error)
            self._live[sequence_id].is_sound = False

        isolate_each(sequence_ids, keep, fail)

    def _resume(self, live: LiveSequence, record: SequenceRecord) -> None:
        """Make a state from a checkpoint; the step frees each layer of the checkpoint once it has copied it."""
        live.state, live.record = SequenceState(self._pool, record.length + 1), None
        live.state.restore(record)

    def _open(self, requests: Mapping[str, GenerationRequest], chunk: Chunk) -> Window:
        live = self._live.get(chunk.sequence_id)
        if live is None:
            request = requests[chunk.request_id]
            live = self._live[chunk.sequence_id] = self._new(request)
            if chunk.start:
                self._prefixes.restore(request.request_id, live.state)
        if not live.is_sound:
            raise GenerationFailed("the request's state could not be kept while it was preempted")
        if live.record is not None:
            self._resume(live, live.record)
        launched, live.launched = live.launched, None
        window = open_window(chunk, live)
        num_launched = int(launched is not None)
        if live.state.length - num_launched != chunk.start or (num_launched and window.num_tokens != 1):
            message = f"the state holds {live.state.length} tokens, but the chunk starts at token {chunk.start}"
            raise GenerationFailed(message)
        if launched is not None:
            window.launched, window.is_committed = launched, True
            return window
        num_certain, end, points = len(chunk.token_ids), chunk.start + len(chunk.token_ids), tuple[int, ...]()
        if chunk.is_prompt:
            points = self._prefixes.begin_chunk(chunk.request_id, chunk.start, end)
            window.leaves_snapshot = end in points
        live.state.begin(window.num_tokens, num_certain, tuple([each for each in points if each < end]))
        return window

    def _new(self, request: GenerationRequest) -> LiveSequence:
        history = History(request.full_prompt, self._vocab_size) if needs_history(request.sampling) else None
        constraint = self._constraint(request)
        media = self._features.media_of(request)
        positions = None if request.selected is None else TokenPositions(np.array(request.selected.positions, np.int32))
        adapter = self.adapters.slot(request)
        draft_state = DraftState(0)
        if self._speculator is not None:
            draft_state = self._speculator.open(request.max_draft_tokens, len(request.prompt))
        # last, for a state whose sequence fails before it begins would never be freed
        state = SequenceState(self._pool, len(request.prompt) + 1)
        return LiveSequence(
            state,
            request.sampling,
            history,
            request,
            list(request.prompt),
            constraint,
            media,
            draft_state,
            positions,
            QueryRecorder() if self._records_queries else None,
            adapter,
        )

    def _constraint(self, request: GenerationRequest) -> Constraint | None:
        if request.constraint is None:
            return None
        assert self._constraints is not None, "the engine refuses constraints that it has no factory for"
        return self._constraints.begin(request.constraint, request.stop_token_ids)

    def _compute(self, windows: Sequence[Window]) -> None:
        """Compute the windows' results with at most one forward and one wait for the device."""
        rows = [one.row for one in windows if one.launched is None]
        logits = logits_of(self._model, windows, rows)
        if any(one.is_constrained for one in windows):
            # The device computes while the host makes the masks.
            mx.async_eval(logits)
        sampled = isolate_each(windows, Window.sampling_rows, Window.fail)
        numbers = [number for one, own in zip(windows, sampled, strict=True) if own for number in one.sampled_logits]
        draws = Draws(logits, numbers, [row for own in sampled for row in own])
        prompts = [one for one in windows if one.chunk.is_prompt]
        states = self._model.launch(logits, rows) if prompts else self._model.unevaluated(rows)
        if prompts:
            self._close_prompts(prompts)  # copies of the states are launched after them
        if self._may_launch_next(windows):
            launch_next(self._model, windows, draws, states)
            if not self._model.is_compiled:
                states = []  # launched; what they hold by now is the next step's, which no token should wait for
        scores = {one.lo: PromptLogprobs(logits, one) for one in windows if one.following}
        mx.eval(
            draws.arrays(),
            [found.arrays() for found in scores.values()],
            states,
            [one.drafts.batch.arrays for one in windows if one.drafts.batch is not None],
            [one.live.recorder.arrays() for one in windows if one.live.recorder is not None],
        )
        token_ids, logprobs = draws.read()
        lo = 0
        for one, own in zip(windows, sampled, strict=True):
            hi = lo + len(own)
            if one.error is None:
                one.take(token_ids[lo:hi], logprobs[lo:hi])
                one.prompt_logprobs = scores[one.lo].read() if one.following else ()
            lo = hi

    def _may_launch_next(self, windows: Sequence[Window]) -> bool:
        """Whether the rows' next step can be launched before this one's tokens are known: it will have no drafts."""
        if not self._runs_ahead or not all(one.is_plain and one.error is None for one in windows):
            return False
        return self._speculator is None or self._speculator.may_overlap(
            [one.live.draft_state for one in windows if one.num_draws]
        )

    def _close(self, window: Window) -> list[ChunkResult]:
        """Commit a window, store a finished prompt in the prefix cache, and begin forks. Rows without a token fail."""
        if window.error is not None:
            raise window.error
        chunk, live = window.chunk, window.live
        num_committed = len(chunk.token_ids) + max(0, len(window.gained) - 1)
        result = window.result(num_committed)
        token_ids = result.token_ids
        is_drawn = NO_TOKEN not in token_ids
        if not window.is_committed:
            live.state.commit(num_committed)
        if not is_drawn:
            live.is_sound = False
        elif chunk.samples and chunk.is_prompt:
            self._prefixes.store(chunk.request_id, live.token_ids, live.state)
        results: list[ChunkResult] = []
        failures: list[ChunkFailure] = []  # an error below fails all of these sequences, each of them once
        if is_drawn:
            results.append(result)
        else:
            failures.append(not_drawn(chunk.sequence_id, live.constraint))
        if chunk.forks:
            self._fork(window, results, failures)
        if live.launched is not None:
            confirm(live, token_ids[-1])
        if is_drawn:
            live.grow(token_ids)
        self._failures += failures
        return results

    def _close_prompts(self, prompts: Sequence[Window]) -> None:
        """Commit chunks of prompts, whose tokens are all certain, and copy their states for later prompts.

        The prediction head processes them together.
        """
        for one in prompts:
            one.live.state.commit(len(one.chunk.token_ids))
            one.is_committed = True
        self._catch_up([one.live for one in prompts])
        with self._pool.together():
            isolate_each(prompts, self._keep_prompt, Window.fail)

    def _keep_prompt(self, window: Window) -> None:
        """Give the prefix cache copies of the states after a prompt's chunk; it stores them once a token is drawn."""
        chunk, live = window.chunk, window.live
        snapshots = live.state.take_snapshots()
        if window.leaves_snapshot:
            snapshots[live.state.length] = live.state.snapshot()
        self._prefixes.add_snapshots(chunk.request_id, snapshots)
        if chunk.samples:
            self._prefixes.copy(chunk.request_id, live.state)

    def _catch_up(self, lives: Sequence[LiveSequence]) -> None:
        if self._speculator is not None and lives:
            self._speculator.catch_up(lives)

    def _fork(self, window: Window, results: list[ChunkResult], failures: list[ChunkFailure]) -> None:
        """Begin the forks of a window, and add the result or failure of each."""
        record = window.live.state.checkpoint()
        for choice, (sequence_id, token_id) in enumerate(zip(window.chunk.forks, window.forked, strict=True), start=1):
            fork = self._live[sequence_id] = self._new(window.live.request)
            fork.params = params_of_choice(fork.params, choice)
            fork.state.restore(record)
            if token_id == NO_TOKEN:
                failures.append(not_drawn(sequence_id, fork.constraint))
                continue
            fork.grow([token_id])
            logprobs = [each for each in window.forked_logprobs[choice - 1 : choice] if each is not None]
            results.append(ChunkResult(sequence_id, 0, (token_id,), tuple(logprobs)))

    @property
    def step_s(self) -> float:
        """The last step's time as drafting counts it, see `StepReports`."""
        return self._reports.step_s

    def draft(self, step_s: float | None = None) -> dict[str, int]:
        """Propose drafts for the sequences that gained tokens in the last step. Returns how many, by sequence.

        Separate from `execute`, so that it does not delay the tokens. step_s: the step's time; None takes its own.
        """
        self._reports.report(self.step_s if step_s is None else step_s)
        gained, self._gained = self._gained, []
        if self._speculator is None:
            return {}
        lives = [self._live[each] for each in gained]
        self._speculator.draft(lives)
        self._reports.finish_drafting()
        return {each: live.draft_state.drafts.num_drafts for each, live in zip(gained, lives, strict=True)}

    def free(self, sequence_ids: Iterable[str]) -> None:
        found = [self._live.pop(each, None) for each in sequence_ids]
        ended = [live for live in found if live is not None and live.record is None]
        if not ended:
            return
        with isolated(partial(self._evict_failed_copies, ended)), self._pool.together():
            isolate_each(ended, self._store_answer, _log_unstored)
        for live in ended:
            live.state.release()

    def _store_answer(self, live: LiveSequence) -> None:
        if self._prefixes.is_on and live.is_sound and live.state.length:
            self._catch_up([live])
            was_drawn_from = live.num_output > 0
            self._prefixes.store(live.request.request_id, live.token_ids, live.state, was_drawn_from=was_drawn_from)

    def _evict_failed_copies(self, ended: Sequence[LiveSequence], error: Exception) -> None:
        # the answers are complete, but the copies of their states failed together, as they were launched together
        logger.error("the states of %d ended sequences are not stored in the prefix cache", len(ended), exc_info=error)
        self._prefixes.evict(sys.maxsize)

    def drop(self) -> None:
        """Free all states without storing them."""
        for live in self._live.values():
            if live.record is None:
                live.state.release()
        self._live.clear()


def _log_unstored(live: LiveSequence, error: Exception) -> None:
    logger.error("the state of %s is not stored in the prefix cache", live.request.request_id, exc_info=error)
