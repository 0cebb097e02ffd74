"""A sequence between steps, and its window in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import mlx.core as mx

from headrace.engine.features import LiveMedia
from headrace.errors import GenerationFailed, GrammarFailed
from headrace.grammar.constraint import Constraint, Mask
from headrace.models.lora import BASE
from headrace.models.media import RowMedia, entry_at
from headrace.models.positions import TokenPositions
from headrace.models.step import QueryRecorder, Row
from headrace.sampling.history import History
from headrace.sampling.rows import SamplingRow
from headrace.speculate.drafter import EntryMedia
from headrace.speculate.drafts import NO_DRAFTS, Drafts
from headrace.speculate.speculator import DraftState
from headrace.speculate.verify import gained_tokens, window_rows
from headrace.state.records import SequenceRecord
from headrace.state.sequence import SequenceState
from headrace.types.events import TokenLogprobs
from headrace.types.request import GenerationRequest, SamplingParams
from headrace.types.step import Chunk, ChunkFailure, ChunkResult


@dataclass(frozen=True, slots=True)
class LaunchedLogits:
    """A row of logits `[n, vocab_size]` after a sequence's last token, launched before that token was known."""

    logits: mx.array
    row: int


@dataclass(slots=True)
class LiveSequence:
    """The runner's record of a sequence.

    token_ids: every known token, at least as many as the state has seen.
    positions: of the tokens, in sparse prefill.
    recorder: records queries for scoring the prompt.
    adapter: see `Row`.
    """

    state: SequenceState
    params: SamplingParams
    history: History | None
    request: GenerationRequest
    token_ids: list[int]
    constraint: Constraint | None = None
    media: LiveMedia | None = None
    draft_state: DraftState = field(default_factory=partial(DraftState, 0))
    positions: TokenPositions | None = None
    recorder: QueryRecorder | None = None
    adapter: int = BASE
    launched: LaunchedLogits | None = None
    """If set, the state has computed all known tokens, else all but the last."""
    is_sound: bool = True
    """Whether the state matches the tokens; false after a failure."""
    record: SequenceRecord | None = None
    """Replaces the state while the sequence is preempted."""

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - len(self.request.prompt)

    @property
    def settings(self) -> SamplingRow:
        request = self.request
        return SamplingRow(
            self.params, self.num_output, self.history, request.stop_token_ids, num_top=request.num_logprobs
        )

    @property
    def entry_media(self) -> EntryMedia | None:
        """What a prediction head needs of the sequence's media, or of its positions in sparse prefill."""
        if self.positions is not None:
            return partial(entry_at, self.positions)
        return None if self.media is None else self.media.entry

    def grow(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids
        if self.history is not None:
            self.history.append(token_ids)
        if self.constraint is not None:
            self.constraint.accept(token_ids)

    # What follows is read by the speculator only, see `DraftableSequence`.
    @property
    def is_launched(self) -> bool:
        return self.launched is not None

    @property
    def room(self) -> int:
        """Drafts that its output has room for, besides a sampled token."""
        if self.token_ids[-1] in self.request.stop_token_ids:
            return 0
        return self.request.max_tokens - self.num_output - 1

    def forced_tokens(self, limit: int) -> tuple[int, ...]:
        return () if self.constraint is None else self.constraint.forced_tokens(limit)


def params_of_choice(params: SamplingParams, choice: int) -> SamplingParams:
    return replace(params, seed=params.seed + choice)


@dataclass(slots=True, eq=False)
class Window:
    """A chunk whose tokens are being computed, with the drafts after them, and its result.

    draft_ids: None as long as only the device knows them.
    masks: allowed tokens at each position; None if all are allowed, or before `limit`.
    media: among the window's tokens; None in a sequence without.
    following: prompt tokens after those of the chunk, if log-probabilities of prompt tokens are requested: then all
    tokens of the chunk need logits.
    lo: its first row among the step's logits.
    launched: its logits, if they were launched with the last step.
    leaves_snapshot: the prompt leaves a snapshot at its end.
    is_committed: the state has committed its tokens, which are all certain.
    error: why the row failed.
    gained, forked: tokens that the sequence gains, and the first one of each fork.
    logprobs, forked_logprobs: theirs, if requested.
    vector: see ChunkResult.
    """

    chunk: Chunk
    live: LiveSequence
    drafts: Drafts = NO_DRAFTS
    num_drafts: int = 0
    draft_ids: tuple[int, ...] | None = ()
    masks: tuple[Mask | None, ...] | None = None
    media: RowMedia | None = None
    following: tuple[int, ...] = ()
    lo: int = 0
    launched: LaunchedLogits | None = None
    leaves_snapshot: bool = False
    is_committed: bool = False
    error: Exception | None = None
    gained: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs | None] = ()
    forked: Sequence[int] = ()
    forked_logprobs: Sequence[TokenLogprobs | None] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    vector: bytes | None = None

    @property
    def is_plain(self) -> bool:
        """Whether at most one token is drawn, after certain ones: then the next step need not wait for its value."""
        return not self.num_drafts and not self.chunk.forks

    @property
    def num_draws(self) -> int:
        return (1 + self.num_drafts + len(self.chunk.forks)) * self.chunk.samples

    @property
    def next_row(self) -> Row | None:
        """The row for the token being drawn; None if the answer surely ends with it, or the state has no room."""
        live = self.live
        if live.num_output + 1 >= live.request.max_tokens or not live.state.has_room(1):
            return None
        start = self.chunk.start + self.num_tokens
        media = None if live.media is None else live.media.row(start, start + 1)
        return Row(live.state, (0,), media, live.positions, adapter=live.adapter)

    @property
    def num_tokens(self) -> int:
        return len(self.chunk.token_ids) + self.num_drafts

    @property
    def row(self) -> Row:
        """The tokens that the model computes; zeros stand for drafts that only the device knows."""
        token_ids = self.chunk.token_ids + self._draft_placeholders
        # a chunk inside a prompt has no token whose queries are wanted
        recorder = self.live.recorder if self.chunk.samples else None
        are_known = not self.num_drafts or self.draft_ids is not None
        live = self.live
        return Row(live.state, token_ids, self.media, live.positions, recorder, are_known, live.adapter)

    @property
    def _draft_placeholders(self) -> tuple[int, ...]:
        return (0,) * self.num_drafts if self.draft_ids is None else self.draft_ids

    @property
    def num_logits(self) -> int:
        return self.num_tokens if self.following else int(self.chunk.samples) * (1 + self.num_drafts)

    @property
    def is_constrained(self) -> bool:
        return self.live.constraint is not None and self.chunk.samples

    def sampling_rows(self) -> list[SamplingRow]:
        """How to sample the token before each draft and after the last, then that of each fork.

        Empty if the chunk ends inside a prompt. Makes the masks, which take longer than the rest of a window. Raises
        GenerationFailed.
        """
        if not self.chunk.samples:
            return []
        if self.live.constraint is not None and self.draft_ids is not None:
            self.masks = self.live.constraint.window(self.draft_ids).masks
        rows = window_rows(self.live.settings, self._draft_placeholders, self.masks)
        for choice in range(1, len(self.chunk.forks) + 1):
            rows.append(replace(rows[0], params=params_of_choice(self.live.params, choice)))
        return rows

    @property
    def sampled_logits(self) -> list[int]:
        """The row of the step's logits for each of `sampling_rows`; forks share the last one."""
        hi = self.lo + self.num_logits
        return [*range(hi - 1 - self.num_drafts, hi), *[hi - 1] * len(self.chunk.forks)]

    def fail(self, error: Exception) -> list[SamplingRow]:
        """Mark the row as failed: nothing is drawn for it, and it fails once the step has ended."""
        self.error = error
        return []

    def take(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> None:
        """Take what was sampled for `sampling_rows`. logprobs: empty if none are requested in the step."""
        num_own = len(token_ids) - len(self.chunk.forks)
        self.gained, self.forked = self._accepted(token_ids[:num_own]), token_ids[num_own:]
        self.logprobs, self.forked_logprobs = logprobs[: len(self.gained)], logprobs[num_own:]

    def _accepted(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The accepted drafts and the token after them, up to the first stop token.

        Accepted drafts after a stop token are useless, and the state must not go past the answer's end.
        """
        if len(token_ids) < 2:
            return token_ids
        gained = gained_tokens(self.drafts.read() if self.draft_ids is None else self.draft_ids, token_ids)
        stops = self.live.request.stop_token_ids
        end = next((number for number, token_id in enumerate(gained) if token_id in stops), len(gained))
        return gained[: end + 1]

    def result(self, num_committed: int) -> ChunkResult:
        if not self.chunk.samples:
            return ChunkResult(self.chunk.sequence_id, num_committed, prompt_logprobs=self.prompt_logprobs)
        return ChunkResult(
            self.chunk.sequence_id,
            num_committed,
            tuple(self.gained),
            tuple([each for each in self.logprobs if each is not None]),
            self.prompt_logprobs,
            self.num_drafts,
            self.vector,
        )


def open_window(chunk: Chunk, live: LiveSequence) -> Window:
    """The chunk with as many drafts after it as the plan allows and its constraint accepts.

    Penalties and constraints depend on the text before each position, so such rows need the drafts' ids.
    """
    drafts = NO_DRAFTS
    if chunk.num_drafts:
        drafts = live.draft_state.drafts.first(chunk.num_drafts)
    must_know = live.history is not None or live.constraint is not None or drafts.batch is None
    draft_ids = drafts.read() if must_know else None
    if live.constraint is not None and chunk.samples:
        assert draft_ids is not None
        num_legal = live.constraint.num_legal(draft_ids)
        drafts, draft_ids = drafts.first(num_legal), draft_ids[:num_legal]
    num_drafts = drafts.num_drafts
    end = chunk.start + len(chunk.token_ids) + num_drafts
    media = None if live.media is None else live.media.row(chunk.start, end)
    return Window(chunk, live, drafts, num_drafts, draft_ids, media=media, following=_following(chunk, live.request))


def _following(chunk: Chunk, request: GenerationRequest) -> tuple[int, ...]:
    if request.num_prompt_logprobs is None or chunk.choice > 0:
        return ()
    return request.prompt[chunk.start + 1 : chunk.start + 1 + len(chunk.token_ids)]


def failures_of(chunk: Chunk, error: BaseException) -> list[ChunkFailure]:
    return [ChunkFailure(sequence_id, error) for sequence_id in (chunk.sequence_id, *chunk.forks)]


def not_drawn(sequence_id: str, constraint: Constraint | None) -> ChunkFailure:
    if constraint is not None:
        return ChunkFailure(sequence_id, GrammarFailed("the answer's grammar leaves no token that can be drawn"))
    error = GenerationFailed("no token can be drawn: the logits are NaN or infinite, or every token is banned")
    return ChunkFailure(sequence_id, error)
