"""Carrying out a plan: states, one packed forward, sampling, commits."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from headrace.engine.draws import Drawn, Draws, Place, PromptScores
from headrace.engine.pool import PrefixPool
from headrace.errors import GenerationFailed
from headrace.grammar.constraint import Constraint, Window
from headrace.grammar.factory import ConstraintFactory
from headrace.models.packed import PackedModel, Row
from headrace.sampling.draw import NO_TOKEN
from headrace.sampling.history import History, needs_history
from headrace.sampling.sampler import SamplingRow
from headrace.speculate.speculator import DraftedRow, Drafting, Guesses, Speculator, packed_ids
from headrace.speculate.verify import gained_tokens, window_rows
from headrace.state.sequence import SequenceRecord, SequenceState
from headrace.state.slabs import SlabPool
from headrace.types.events import TokenLogprobs
from headrace.types.request import GenerationRequest, SamplingParams
from headrace.types.status import DraftStatus
from headrace.types.step import Chunk, ChunkFailure, ChunkResult, StepPlan, StepResult

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Live:
    """What the runner holds of a sequence.

    token_ids: every known token, as many as the state has seen and more. drafted: None if nothing is ever drafted.
    """

    state: SequenceState
    params: SamplingParams
    history: History | None
    request: GenerationRequest
    token_ids: list[int]
    constraint: Constraint | None = None
    drafted: DraftedRow | None = None
    is_sound: bool = True
    """Whether the state is what the tokens say; not so after a failure."""
    record: SequenceRecord | None = None
    """In place of the state, as long as the sequence is preempted."""

    @property
    def num_output_left(self) -> int:
        """Tokens that may still be sampled."""
        return self.request.max_tokens - (len(self.token_ids) - len(self.request.prompt))


@dataclass(frozen=True, slots=True)
class _Work:
    """A chunk whose window is open.

    lo: its first row among the logits that the step computes. guesses: the drafts behind its tokens, None for none.
    drafts: their ids, None as long as only the device knows them. legal: what may come at each place; None if
    anything may.
    """

    chunk: Chunk
    live: _Live
    lo: int = 0
    guesses: Guesses | None = None
    drafts: tuple[int, ...] | None = ()
    legal: Window | None = None

    @property
    def num_drafts(self) -> int:
        """Drafts in the window."""
        return 0 if self.guesses is None else self.guesses.num_drafts

    @property
    def num_tokens(self) -> int:
        """Tokens in the window."""
        return len(self.chunk.token_ids) + self.num_drafts

    @property
    def following(self) -> tuple[int, ...]:
        """Prompt tokens whose log-probabilities are due: those that the chunk's own predict; then each needs logits."""
        request, start = self.live.request, self.chunk.start
        if request.num_prompt_logprobs is None or self.chunk.choice > 0:
            return ()
        return request.prompt[start + 1 : start + 1 + len(self.chunk.token_ids)]

    @property
    def num_logits(self) -> int:
        """Rows of logits that the chunk wants, its last tokens'."""
        return self.num_tokens if self.following else int(self.chunk.samples) * (1 + self.num_drafts)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What the step drew for a chunk: at each place of its window, then for each of its forks."""

    window: Sequence[Drawn] = ()
    forks: Sequence[Drawn] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class Runner:
    """Holds the states of all running sequences and computes their chunks. Belongs to the engine's thread."""

    def __init__(
        self,
        model: PackedModel,
        vocab_size: int,
        prefixes: PrefixPool | None = None,
        constraints: ConstraintFactory | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        """prefixes: None if nothing is kept for later prompts. constraints: None if no request has a constraint.

        speculator: None if nothing is drafted.
        """
        self._model = model
        self._vocab_size = vocab_size
        self._prefixes = prefixes
        self._constraints = constraints
        self._speculator = speculator
        self._pool = SlabPool()
        self._live: dict[str, _Live] = {}

    @property
    def state_bytes(self) -> int:
        """Bytes that the states of all sequences hold."""
        return self._pool.num_bytes + sum(live.state.own_bytes for live in self._live.values())

    @property
    def preempted_bytes(self) -> int:
        """Bytes that the checkpoints of preempted sequences hold."""
        return sum(live.record.num_bytes for live in self._live.values() if live.record is not None)

    def draft_status(self) -> DraftStatus | None:
        """How tokens are guessed ahead; None if they are not."""
        if self._speculator is None:
            return None
        return DraftStatus(self._speculator.max_drafts, self._speculator.num_failures)

    def execute(self, plan: StepPlan, requests: Mapping[str, GenerationRequest]) -> StepResult:
        """Compute every chunk of the plan. `requests` has its requests by their ids.

        What goes wrong in one row's own work fails that row; what goes wrong in the step fails its rows. Either way
        there is an answer for every chunk and fork, and the caller frees the rows that failed.
        """
        self._preempt(plan.preempted)
        failures: list[ChunkFailure] = []
        work = self._open(plan.chunks, requests, failures)
        if not work:
            return StepResult((), tuple(failures))
        try:
            outcomes = self._compute(work)
        except Exception as error:  # the step's outer wall: its rows fail, the engine goes on
            logger.exception("a step of %d rows failed", len(work))
            for one in work:
                one.live.is_sound = False
            failures += [failure for one in work for failure in _failures(one.chunk, error)]
            return StepResult((), tuple(failures))
        results: list[ChunkResult] = []
        for one, outcome in zip(work, outcomes, strict=True):
            try:
                results += self._take_over(one, outcome, failures)
            except Exception as error:  # a row's outer wall
                logger.exception("the row of %s failed", one.chunk.sequence_id)
                one.live.is_sound = False
                failures += _failures(one.chunk, error)
        return StepResult(tuple(self._draft(results)), tuple(failures))

    def _preempt(self, sequence_ids: Iterable[str]) -> None:
        """Keep checkpoints in place of states; where that goes wrong, the sequence fails when it goes on."""
        for sequence_id in sequence_ids:
            live = self._live[sequence_id]
            try:
                live.record = live.state.checkpoint()
            except Exception:  # a row's outer wall
                logger.exception("the state of %s could not be kept", sequence_id)
                live.is_sound = False
            live.state.release()

    def _resume(self, live: _Live, record: SequenceRecord) -> None:
        """Make a state of a checkpoint; each of its layers goes as soon as the step has copied it."""
        live.state = SequenceState(self._pool, record.length + 1)
        live.state.restore(record)
        live.record = None

    def _open(
        self, chunks: Sequence[Chunk], requests: Mapping[str, GenerationRequest], failures: list[ChunkFailure]
    ) -> list[_Work]:
        """Open each chunk's window; a row that can't (no memory for a larger slot, say) fails alone."""
        work: list[_Work] = []
        lo = 0
        for chunk in chunks:
            try:
                one = replace(self._begin(chunk, requests[chunk.request_id]), lo=lo)
            except Exception as error:  # a row's outer wall
                logger.exception("the row of %s failed", chunk.sequence_id)
                failures += _failures(chunk, error)
                continue
            work.append(one)
            lo += one.num_logits
        return work

    def _begin(self, chunk: Chunk, request: GenerationRequest) -> _Work:
        live = self._live.get(chunk.sequence_id)
        if live is None:
            live = self._live[chunk.sequence_id] = self._new(request)
            if chunk.start and self._prefixes is not None:
                self._prefixes.restore(request.request_id, live.state)
        if not live.is_sound:
            raise GenerationFailed("its state was lost when it made room for others")
        if live.record is not None:
            self._resume(live, live.record)
        if live.state.length != chunk.start:
            raise GenerationFailed(f"the state stands at {live.state.length} tokens, the chunk at {chunk.start}")
        work = _with_drafts(_Work(chunk, live))
        num_certain = len(chunk.token_ids)
        marks = tuple(mark for mark in self._marks(chunk) if mark < chunk.start + num_certain)
        live.state.begin(work.num_tokens, num_certain, marks)
        return work

    def _new(self, request: GenerationRequest) -> _Live:
        history = History(request.prompt, self._vocab_size) if needs_history(request.sampling) else None
        state = SequenceState(self._pool, len(request.prompt) + 1)
        drafted = None if self._speculator is None else self._speculator.open(request.max_draft_tokens)
        known = list(request.prompt)
        return _Live(state, request.sampling, history, request, known, self._constraint(request), drafted)

    def _constraint(self, request: GenerationRequest) -> Constraint | None:
        if request.constraint is None:
            return None
        assert self._constraints is not None, "the engine refuses constraints that it has no factory for"
        return self._constraints.begin(request.constraint, request.stop_token_ids)

    def _marks(self, chunk: Chunk) -> tuple[int, ...]:
        """Lengths up to the chunk's end at which a prompt leaves snapshots."""
        if self._prefixes is None or chunk.output_index > 0:
            return ()
        return self._prefixes.marks(chunk.request_id, chunk.start, chunk.start + len(chunk.token_ids))

    def _compute(self, work: Sequence[_Work]) -> list[_Outcome]:
        """One forward and one wait for the device."""
        picks: list[int] = []
        num_tokens = 0
        for one in work:
            num_tokens += one.num_tokens
            picks += range(num_tokens - one.num_logits, num_tokens)
        rows = [Row(one.live.state, (*one.chunk.token_ids, *(0,) * one.num_drafts)) for one in work]
        ids = packed_ids([(one.chunk.token_ids, one.guesses) for one in work])
        # logits that nobody wants are never computed: only what is evaluated below is
        logits = self._model.forward(rows, picks or [num_tokens - 1], ids)
        places = [_places(one) for one in work]
        draws = Draws(logits, [place for of_one in places for place in of_one])
        scores = {one.lo: _prompt_scores(logits, one) for one in work if one.following}
        batches = {id(one.guesses.batch): one.guesses.batch for one in work if one.guesses is not None}
        mx.eval(
            draws.arrays(),
            [found.arrays() for found in scores.values()],
            [one.live.state.arrays() for one in work],
            list(batches.values()),
        )
        drawn = iter(draws.read())
        outcomes = []
        for one, of_one in zip(work, places, strict=True):
            own = [next(drawn) for _ in of_one]
            num_window = len(own) - len(one.chunk.forks)
            told = scores[one.lo].read() if one.following else ()
            outcomes.append(_Outcome(own[:num_window], own[num_window:], told))
        return outcomes

    def _take_over(self, work: _Work, outcome: _Outcome, failures: list[ChunkFailure]) -> list[ChunkResult]:
        """Close the chunk's window, keep what later prompts may use, and begin its forks. Rows without a token fail."""
        chunk, live = work.chunk, work.live
        gained = _gained(work, outcome.window)
        num_committed = len(chunk.token_ids) + max(0, len(gained) - 1)
        snapshots = live.state.take_snapshots()
        live.state.commit(num_committed)
        live.token_ids += [one.token_id for one in gained if one.token_id != NO_TOKEN]
        if chunk.output_index == 0:
            self._keep_prompt(work, snapshots)
        if chunk.forks:
            self._fork(work, outcome.forks)
        results = []
        if not chunk.samples:
            results.append(ChunkResult(chunk.sequence_id, num_committed, prompt_logprobs=outcome.prompt_logprobs))
        elif _is_drawn(chunk.sequence_id, gained, failures):
            results.append(_result(chunk.sequence_id, num_committed, gained, outcome.prompt_logprobs, work.num_drafts))
            _note(live, [one.token_id for one in gained])
        for sequence_id, fork in zip(chunk.forks, outcome.forks, strict=bool(outcome.forks)):
            if _is_drawn(sequence_id, [fork], failures):
                results.append(_result(sequence_id, 0, [fork]))
        return results

    def _keep_prompt(self, work: _Work, snapshots: dict[int, SequenceRecord]) -> None:
        """Hand over what a chunk of a prompt has computed, once the prediction head has read it."""
        chunk, live = work.chunk, work.live
        if self._speculator is not None and live.drafted is not None:
            self._speculator.catch_up(live.drafted, live.state, live.token_ids)
        if self._prefixes is None:
            return
        if live.state.length in self._marks(chunk):
            snapshots[live.state.length] = live.state.snapshot()
        self._prefixes.keep(chunk.request_id, snapshots)
        if chunk.samples:
            self._prefixes.store(chunk.request_id, live.token_ids, live.state)

    def _fork(self, work: _Work, forks: Sequence[Drawn]) -> None:
        """Begin the forks' sequences with copies of the state that the chunk has just reached."""
        record = work.live.state.checkpoint()
        for choice, (sequence_id, drawn) in enumerate(zip(work.chunk.forks, forks, strict=True), start=1):
            fork = self._new(work.live.request)
            fork.params = _params(work.live, choice)
            fork.state.restore(record)
            if drawn.token_id != NO_TOKEN:
                fork.token_ids.append(drawn.token_id)
                _note(fork, [drawn.token_id])
            self._live[sequence_id] = fork

    def _draft(self, results: Sequence[ChunkResult]) -> list[ChunkResult]:
        """Let guesses be made for the sequences that go on, and tell how many there are."""
        if self._speculator is None:
            return list(results)
        drafting = []
        for result in results:
            live = self._live[result.sequence_id]
            if live.drafted is not None and result.token_ids:
                live.drafted.guesses = None
                room = 0 if result.token_ids[-1] in live.request.stop_token_ids else live.num_output_left - 1
                drafting.append(Drafting(live.drafted, live.state, live.token_ids, room))
        self._speculator.draft(drafting)
        return [replace(result, num_ready=self._num_ready(result.sequence_id)) for result in results]

    def _num_ready(self, sequence_id: str) -> int:
        drafted = self._live[sequence_id].drafted
        return 0 if drafted is None or drafted.guesses is None else drafted.guesses.num_drafts

    def free(self, sequence_ids: Iterable[str]) -> None:
        """Drop the states of sequences that ended; what they have computed stays in the prefix cache."""
        for sequence_id in sequence_ids:
            live = self._live.pop(sequence_id, None)
            if live is None or live.record is not None:
                continue
            if self._prefixes is not None and live.is_sound and live.state.length:
                if self._speculator is not None and live.drafted is not None:
                    self._speculator.catch_up(live.drafted, live.state, live.token_ids)
                self._prefixes.store(live.request.request_id, live.token_ids, live.state)
            live.state.release()


def _failures(chunk: Chunk, error: BaseException) -> list[ChunkFailure]:
    return [ChunkFailure(sequence_id, error) for sequence_id in (chunk.sequence_id, *chunk.forks)]


def _with_drafts(work: _Work) -> _Work:
    """The chunk with as many of the guesses behind it as the plan allows and a constraint finds legal.

    Penalties and constraints look at the text before each place, so such rows have to know the ids.
    """
    live, guesses = work.live, None
    if live.drafted is not None and live.drafted.guesses is not None and work.chunk.num_drafts:
        guesses = live.drafted.guesses.first(work.chunk.num_drafts)
    must_know = live.history is not None or live.constraint is not None
    drafts = () if guesses is None else guesses.read() if must_know else None
    if live.constraint is None or not work.chunk.samples:
        return replace(work, guesses=guesses, drafts=drafts)
    assert drafts is not None
    legal = live.constraint.window(drafts)
    if guesses is not None:
        guesses = guesses.first(legal.num_legal) if legal.num_legal else None
    return replace(work, guesses=guesses, drafts=drafts[: legal.num_legal], legal=legal)


def _places(work: _Work) -> list[Place]:
    """The places of the chunk's window, one before each draft and one behind the last, then one for each of its forks.

    None if the chunk ends inside a prompt. Forks are drawn from the logits of the chunk's last token, as it is itself.
    """
    chunk, live = work.chunk, work.live
    if not chunk.samples:
        return []
    settings = SamplingRow(live.params, chunk.output_index, live.history, live.request.stop_token_ids)
    drafts = (0,) * work.num_drafts if work.drafts is None else work.drafts
    first = work.lo + work.num_logits - 1 - work.num_drafts
    num_top = live.request.num_logprobs
    masks = work.legal.masks if work.legal is not None else (None,) * (1 + work.num_drafts)
    rows = [replace(row, mask=mask) for row, mask in zip(window_rows(settings, drafts), masks, strict=False)]
    forks = [replace(rows[0], params=_params(live, choice)) for choice in range(1, len(chunk.forks) + 1)]
    places = [Place(first + offset, row, num_top) for offset, row in enumerate(rows)]
    return places + [Place(first, fork, num_top) for fork in forks]


def _params(live: _Live, choice: int) -> SamplingParams:
    return replace(live.params, seed=live.params.seed + choice)


def _prompt_scores(logits: mx.array, work: _Work) -> PromptScores:
    own = logits[work.lo : work.lo + work.num_logits]
    return PromptScores(own, work.following, work.live.request.num_prompt_logprobs or 0)


def _gained(work: _Work, window: Sequence[Drawn]) -> Sequence[Drawn]:
    """What the window adds to the output, up to the first stop token: nothing behind it is of use."""
    if not window:
        return ()
    drafts = work.drafts if work.drafts is not None else work.guesses.read() if work.guesses is not None else ()
    gained = window[: len(gained_tokens(drafts, [one.token_id for one in window]))]
    stops = work.live.request.stop_token_ids
    end = next((place for place, one in enumerate(gained) if one.token_id in stops), len(gained))
    return gained[: end + 1]


def _note(live: _Live, token_ids: Sequence[int]) -> None:
    """Tell what follows the text that it has grown."""
    if live.history is not None:
        live.history.append(token_ids)
    if live.constraint is not None:
        live.constraint.accept(token_ids)


def _is_drawn(sequence_id: str, gained: Sequence[Drawn], failures: list[ChunkFailure]) -> bool:
    """Whether there is a token at every place; else the sequence fails."""
    if all(one.token_id != NO_TOKEN for one in gained):
        return True
    error = GenerationFailed("no token can be drawn: the logits are not numbers, or every token is banned")
    failures.append(ChunkFailure(sequence_id, error))
    return False


def _result(
    sequence_id: str,
    num_committed: int,
    gained: Sequence[Drawn],
    prompt_logprobs: tuple[TokenLogprobs, ...] = (),
    num_verified: int = 0,
) -> ChunkResult:
    return ChunkResult(
        sequence_id,
        num_committed,
        tuple(one.token_id for one in gained),
        tuple(one.logprobs for one in gained if one.logprobs is not None),
        prompt_logprobs,
        num_verified,
    )
