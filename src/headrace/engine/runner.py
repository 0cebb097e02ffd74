"""Carrying out a plan: states, one packed forward, sampling, commits."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from headrace.errors import GenerationFailed
from headrace.models.packed import PackedModel, Row
from headrace.sampling.draw import NO_TOKEN
from headrace.sampling.sampler import SamplingRow, sample
from headrace.state.sequence import SequenceState
from headrace.state.slabs import SlabPool
from headrace.types.request import GenerationRequest
from headrace.types.step import Chunk, ChunkFailure, ChunkResult, StepPlan, StepResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Work:
    """A chunk whose window is open."""

    chunk: Chunk
    state: SequenceState


class Runner:
    """Holds the states of all running sequences and computes their chunks. Belongs to the engine's thread."""

    def __init__(self, model: PackedModel) -> None:
        self._model = model
        self._pool = SlabPool()
        self._states: dict[str, SequenceState] = {}

    @property
    def state_bytes(self) -> int:
        """Bytes of all keys and values, used slots or not."""
        return self._pool.num_bytes

    def execute(self, plan: StepPlan, requests: Mapping[str, GenerationRequest]) -> StepResult:
        """Compute every chunk of the plan. `requests` has the request of each of its sequences.

        What goes wrong in one row's own work fails that row; what goes wrong in the step fails its rows. Either way
        there is an answer for every chunk, and the caller frees the rows that failed.
        """
        failures: list[ChunkFailure] = []
        work = self._open(plan.chunks, requests, failures)
        if not work:
            return StepResult((), tuple(failures))
        sampling = [one.chunk for one in work if one.chunk.samples]
        try:
            tokens = self._compute(work, sampling, requests)
        except Exception as error:  # the step's outer wall: its rows fail, the engine goes on
            logger.exception("a step of %d rows failed", len(work))
            failures += [ChunkFailure(one.chunk.sequence_id, error) for one in work]
            return StepResult((), tuple(failures))
        drawn = dict(zip((chunk.sequence_id for chunk in sampling), tokens, strict=True))
        results = []
        for one in work:
            answer = _commit(one, drawn.get(one.chunk.sequence_id))
            if isinstance(answer, ChunkFailure):
                failures.append(answer)
            else:
                results.append(answer)
        return StepResult(tuple(results), tuple(failures))

    def _open(
        self, chunks: Sequence[Chunk], requests: Mapping[str, GenerationRequest], failures: list[ChunkFailure]
    ) -> list[_Work]:
        """Open each chunk's window; a row that can't (no memory for a larger slot, say) fails alone."""
        work = []
        for chunk in chunks:
            try:
                work.append(_Work(chunk, self._begin(chunk, requests[chunk.sequence_id])))
            except Exception as error:  # a row's outer wall
                logger.exception("the row of request %s failed", chunk.sequence_id)
                failures.append(ChunkFailure(chunk.sequence_id, error))
        return work

    def _begin(self, chunk: Chunk, request: GenerationRequest) -> SequenceState:
        state = self._states.get(chunk.sequence_id)
        if state is None:
            state = self._states[chunk.sequence_id] = SequenceState(self._pool, len(request.prompt) + 1)
        if state.length != chunk.start:
            raise GenerationFailed(f"the state stands at {state.length} tokens, the chunk at {chunk.start}")
        state.begin(len(chunk.token_ids), len(chunk.token_ids) - chunk.num_drafts)
        return state

    def _compute(
        self, work: Sequence[_Work], sampling: Sequence[Chunk], requests: Mapping[str, GenerationRequest]
    ) -> list[int]:
        """One forward and one wait for the device. Gives the sampled token of each chunk in `sampling`."""
        picks, num_tokens = [], 0
        for one in work:
            num_tokens += len(one.chunk.token_ids)
            if one.chunk.samples:
                picks.append(num_tokens - 1)
        rows = [Row(one.state, one.chunk.token_ids) for one in work]
        # logits that nobody wants are never computed: only what is evaluated below is
        logits = self._model.forward(rows, picks or [num_tokens - 1])
        settings = [SamplingRow(requests[chunk.sequence_id].sampling, chunk.output_index) for chunk in sampling]
        tokens = sample(logits, settings) if sampling else mx.zeros((0,), mx.int32)
        mx.eval(tokens, [one.state.arrays() for one in work])
        drawn: list[int] = tokens.tolist()  # type: ignore[assignment]
        return drawn

    def free(self, sequence_ids: Iterable[str]) -> None:
        """Drop the states of sequences that ended."""
        for sequence_id in sequence_ids:
            state = self._states.pop(sequence_id, None)
            if state is not None:
                state.release()


def _commit(work: _Work, token: int | None) -> ChunkResult | ChunkFailure:
    chunk = work.chunk
    if token == NO_TOKEN:
        error = GenerationFailed("the model gave logits that are not numbers")
        return ChunkFailure(chunk.sequence_id, error)
    work.state.commit(len(chunk.token_ids) - chunk.num_drafts)
    tokens = () if token is None else (token,)
    return ChunkResult(chunk.sequence_id, len(chunk.token_ids) - chunk.num_drafts, tokens)
