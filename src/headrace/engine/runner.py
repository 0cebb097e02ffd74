"""Carrying out a plan: states, one packed forward, sampling, commits."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from headrace.engine.pool import PrefixPool
from headrace.errors import GenerationFailed
from headrace.grammar.constraint import Constraint, Window
from headrace.grammar.factory import ConstraintFactory
from headrace.models.packed import PackedModel, Row
from headrace.sampling.draw import NO_TOKEN
from headrace.sampling.history import History, needs_history
from headrace.sampling.logprobs import LogprobRows, read_logprobs, token_logprobs
from headrace.sampling.rows import pick
from headrace.sampling.sampler import SamplingRow, sample
from headrace.state.sequence import SequenceRecord, SequenceState
from headrace.state.slabs import SlabPool
from headrace.types.events import TokenLogprobs
from headrace.types.request import GenerationRequest, SamplingParams
from headrace.types.step import Chunk, ChunkFailure, ChunkResult, StepPlan, StepResult

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Live:
    """What the runner holds of a sequence."""

    state: SequenceState
    params: SamplingParams
    history: History | None
    constraint: Constraint | None
    request_id: str
    token_ids: list[int]
    """What the state has seen, token by token."""
    is_sound: bool = True
    """Whether the state is what the tokens say; not so after a failure."""
    record: SequenceRecord | None = None
    """In place of the state, as long as the sequence is preempted."""


@dataclass(frozen=True, slots=True)
class _Work:
    """A chunk whose window is open.

    lo: its first row among the logits that the step computes. legal: what may come after it and after its drafts; None
    if anything may, or if nothing is drawn.
    """

    chunk: Chunk
    request: GenerationRequest
    live: _Live
    lo: int
    legal: Window | None

    @property
    def tells_prompt(self) -> bool:
        """Whether log-probabilities of prompt tokens are due: then each token's logits are wanted."""
        is_prompt = self.chunk.start + 1 < len(self.request.prompt)
        return self.request.num_prompt_logprobs is not None and self.chunk.choice == 0 and is_prompt

    @property
    def num_logits(self) -> int:
        """Rows of logits that the chunk wants, its last tokens'."""
        return len(self.chunk.token_ids) if self.tells_prompt else int(self.chunk.samples)


@dataclass(frozen=True, slots=True)
class _Draw:
    """A token to be drawn: for a chunk, or for a fork of it. row: of the step's logits."""

    work: _Work
    sequence_id: str
    params: SamplingParams
    history: History | None
    constraint: Constraint | None
    row: int


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A drawn token, NO_TOKEN if the logits were not fit, and its log-probabilities if they were asked for."""

    draw: _Draw
    token_id: int
    logprobs: tuple[TokenLogprobs, ...]


class Runner:
    """Holds the states of all running sequences and computes their chunks. Belongs to the engine's thread."""

    def __init__(
        self,
        model: PackedModel,
        vocab_size: int,
        prefixes: PrefixPool | None = None,
        constraints: ConstraintFactory | None = None,
    ) -> None:
        """prefixes: None if nothing is kept for later prompts. constraints: None if no request has a constraint."""
        self._model = model
        self._vocab_size = vocab_size
        self._prefixes = prefixes
        self._constraints = constraints
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
            drawn, told = self._compute(work)
        except Exception as error:  # the step's outer wall: its rows fail, the engine goes on
            logger.exception("a step of %d rows failed", len(work))
            for one in work:
                one.live.is_sound = False
            failures += [failure for one in work for failure in _failures(one.chunk, error)]
            return StepResult((), tuple(failures))
        results: list[ChunkResult] = []
        for one in work:
            try:
                results += self._commit(one, drawn.get(one.chunk.sequence_id, []), told.get(one.lo, ()), failures)
            except Exception as error:  # a row's outer wall
                logger.exception("the row of %s failed", one.chunk.sequence_id)
                one.live.is_sound = False
                failures += _failures(one.chunk, error)
        return StepResult(tuple(results), tuple(failures))

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
            request = requests[chunk.request_id]
            try:
                live = self._begin(chunk, request)
                one = _Work(chunk, request, live, lo, _legal(chunk, live))
            except Exception as error:  # a row's outer wall
                logger.exception("the row of %s failed", chunk.sequence_id)
                failures += _failures(chunk, error)
                continue
            work.append(one)
            lo += one.num_logits
        return work

    def _begin(self, chunk: Chunk, request: GenerationRequest) -> _Live:
        live = self._live.get(chunk.sequence_id)
        if live is None:
            history = History(request.prompt, self._vocab_size) if needs_history(request.sampling) else None
            state = SequenceState(self._pool, len(request.prompt) + 1)
            known = list(request.prompt[: chunk.start])
            live = _Live(state, request.sampling, history, self._constraint(request), request.request_id, known)
            self._live[chunk.sequence_id] = live
            if chunk.start and self._prefixes is not None:
                self._prefixes.restore(request.request_id, state)
        if not live.is_sound:
            raise GenerationFailed("its state was lost when it made room for others")
        if live.record is not None:
            self._resume(live, live.record)
        if live.state.length != chunk.start:
            raise GenerationFailed(f"the state stands at {live.state.length} tokens, the chunk at {chunk.start}")
        end = chunk.start + len(chunk.token_ids)
        marks = tuple(mark for mark in self._marks(chunk) if mark < end)
        live.state.begin(len(chunk.token_ids), len(chunk.token_ids) - chunk.num_drafts, marks)
        return live

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

    def _compute(self, work: Sequence[_Work]) -> tuple[dict[str, list[_Drawn]], dict[int, tuple[TokenLogprobs, ...]]]:
        """One forward and one wait for the device.

        Gives what was drawn by the chunk's sequence id (its own token first, then its forks'), and the
        log-probabilities of prompt tokens by the chunk's first row of logits.
        """
        picks: list[int] = []
        num_tokens = 0
        for one in work:
            num_tokens += len(one.chunk.token_ids)
            picks += range(num_tokens - one.num_logits, num_tokens)
        rows = [Row(one.live.state, one.chunk.token_ids) for one in work]
        # logits that nobody wants are never computed: only what is evaluated below is
        logits = self._model.forward(rows, picks or [num_tokens - 1])
        draws = [draw for one in work if one.chunk.samples for draw in _draws(one)]
        drawn_logits = pick(logits, [draw.row for draw in draws])
        tokens = sample(drawn_logits, [_settings(draw) for draw in draws])
        scored = [index for index, draw in enumerate(draws) if draw.work.request.num_logprobs is not None]
        scores = _scores(drawn_logits, tokens, draws, scored) if scored else None
        prompt_scores = {one.lo: _prompt_scores(logits, one) for one in work if one.tells_prompt}
        told = [scores, *prompt_scores.values()]
        mx.eval(
            tokens,
            [found.arrays() for found in told if found is not None],
            [one.live.state.arrays() for one in work],
        )
        ids: list[int] = tokens.tolist()  # type: ignore[assignment]
        by_draw = dict(zip(scored, _read(scores, [draws[index] for index in scored]), strict=True)) if scores else {}
        drawn: dict[str, list[_Drawn]] = {}
        for index, draw in enumerate(draws):
            own = (by_draw[index],) if index in by_draw else ()
            drawn.setdefault(draw.work.chunk.sequence_id, []).append(_Drawn(draw, ids[index], own))
        return drawn, {one.lo: _read_prompt(prompt_scores[one.lo], one) for one in work if one.tells_prompt}

    def _commit(
        self,
        work: _Work,
        drawn: Sequence[_Drawn],
        prompt_logprobs: tuple[TokenLogprobs, ...],
        failures: list[ChunkFailure],
    ) -> list[ChunkResult]:
        """Close the chunk's window and begin its forks. Rows without a token fail."""
        chunk = work.chunk
        num_certain = len(chunk.token_ids) - chunk.num_drafts
        state = work.live.state
        snapshots = state.take_snapshots()
        state.commit(num_certain)
        work.live.token_ids += chunk.token_ids[:num_certain]
        if self._prefixes is not None and chunk.output_index == 0:
            if state.length in self._marks(chunk):
                snapshots[state.length] = state.snapshot()
            self._prefixes.keep(chunk.request_id, snapshots)
            if chunk.samples:
                self._prefixes.store(chunk.request_id, work.live.token_ids, state)
        if chunk.forks:
            self._fork(work, drawn[1:])
        results = [] if drawn else [ChunkResult(chunk.sequence_id, num_certain, prompt_logprobs=prompt_logprobs)]
        for one in drawn:
            is_own = one.draw.sequence_id == chunk.sequence_id
            if one.token_id == NO_TOKEN:
                error = GenerationFailed("no token can be drawn: the logits are not numbers, or every token is banned")
                failures.append(ChunkFailure(one.draw.sequence_id, error))
                continue
            live = self._live[one.draw.sequence_id]
            if live.history is not None:
                live.history.append([one.token_id])
            if live.constraint is not None:
                live.constraint.accept([one.token_id])
            results.append(
                ChunkResult(
                    one.draw.sequence_id,
                    num_certain if is_own else 0,
                    (one.token_id,),
                    one.logprobs,
                    prompt_logprobs if is_own else (),
                )
            )
        return results

    def _fork(self, work: _Work, forks: Sequence[_Drawn]) -> None:
        """Begin the forks' sequences with copies of the state that the chunk has just reached."""
        record = work.live.state.checkpoint()
        for one in forks:
            state = SequenceState(self._pool, record.length + 1)
            state.restore(record)
            live = work.live
            self._live[one.draw.sequence_id] = _Live(
                state, one.draw.params, one.draw.history, one.draw.constraint, live.request_id, list(live.token_ids)
            )

    def free(self, sequence_ids: Iterable[str]) -> None:
        """Drop the states of sequences that ended; what they have computed stays in the prefix cache."""
        for sequence_id in sequence_ids:
            live = self._live.pop(sequence_id, None)
            if live is None or live.record is not None:
                continue
            if self._prefixes is not None and live.is_sound and live.state.length:
                self._prefixes.store(live.request_id, live.token_ids, live.state)
            live.state.release()


def _failures(chunk: Chunk, error: BaseException) -> list[ChunkFailure]:
    return [ChunkFailure(sequence_id, error) for sequence_id in (chunk.sequence_id, *chunk.forks)]


def _legal(chunk: Chunk, live: _Live) -> Window | None:
    if live.constraint is None or not chunk.samples:
        return None
    return live.constraint.window(chunk.token_ids[len(chunk.token_ids) - chunk.num_drafts :])


def _draws(work: _Work) -> list[_Draw]:
    """The chunk's own token and one for each of its forks, all from the logits of its last token."""
    chunk, live = work.chunk, work.live
    row = work.lo + work.num_logits - 1
    draws = [_Draw(work, chunk.sequence_id, live.params, live.history, live.constraint, row)]
    for choice, sequence_id in enumerate(chunk.forks, start=1):
        params = replace(live.params, seed=live.params.seed + choice)
        history = live.history.fork() if live.history is not None else None
        constraint = live.constraint.copy() if live.constraint is not None else None
        draws.append(_Draw(work, sequence_id, params, history, constraint, row))
    return draws


def _settings(draw: _Draw) -> SamplingRow:
    work = draw.work
    mask = work.legal.masks[-1] if work.legal is not None else None
    return SamplingRow(draw.params, work.chunk.output_index, draw.history, work.request.stop_token_ids, mask)


def _scores(logits: mx.array, tokens: mx.array, draws: Sequence[_Draw], scored: Sequence[int]) -> LogprobRows:
    rows = mx.array(list(scored))
    num_top = max(draws[index].work.request.num_logprobs or 0 for index in scored)
    # a row without a token has no log-probability either, but the lookup needs an id
    return token_logprobs(logits[rows], mx.maximum(tokens[rows], 0), num_top)


def _read(scores: LogprobRows, draws: Sequence[_Draw]) -> list[TokenLogprobs]:
    return read_logprobs(scores, [draw.work.request.num_logprobs or 0 for draw in draws])


def _prompt_scores(logits: mx.array, work: _Work) -> LogprobRows:
    """What the chunk's tokens predicted of the prompt tokens behind them."""
    start, prompt = work.chunk.start, work.request.prompt
    following = prompt[start + 1 : start + 1 + len(work.chunk.token_ids)]
    rows = logits[work.lo : work.lo + len(following)]
    return token_logprobs(rows, mx.array(list(following)), work.request.num_prompt_logprobs or 0)


def _read_prompt(scores: LogprobRows, work: _Work) -> tuple[TokenLogprobs, ...]:
    count = work.request.num_prompt_logprobs or 0
    return tuple(read_logprobs(scores, [count] * scores.token_ids.shape[0]))
