"""The scheduler's state of one choice of a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.types.events import FinishReason
from headrace.types.request import GenerationRequest
from headrace.types.step import Chunk


def sequence_ids(request: GenerationRequest) -> tuple[str, ...]:
    """The ids of a request's sequences, one per choice: the request's id, or `<id>/<choice>` if there are several."""
    if request.num_choices == 1:
        return (request.request_id,)
    return tuple(f"{request.request_id}/{choice}" for choice in range(request.num_choices))


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request and its progress. Only the scheduler changes it.

    There are no phases: computed tokens catch up with known tokens (the prompt, then each sampled token). A prompt is
    many tokens behind, a decoding sequence one. Only choice 0 computes the prompt; the others wait for it and start
    from a copy of its state.

    id: names it in chunks and results.
    num_cached: prompt tokens taken from the prefix cache.
    num_computed: tokens whose state the runner holds.
    token_ids: all known tokens, prompt first.
    awaits_fork: choice 0 has not finished the prompt.
    virtual_time: prompt tokens served, counted from the prefill's clock at admission; the least goes first.
    is_passed_over: the last step's remaining budget was too small for this prompt.
    is_preempted: the runner keeps only a checkpoint of its state.
    lacks_bytes: it was preempted for lack of bytes, not for another's turn.
    num_output_before: its output when it last started or resumed.
    has_rows: the runner has been given a chunk, so it holds state to free.
    num_ready: drafts that the runner holds for the next chunk.
    stop_token_id: the stop token that ended the output; not in token_ids.
    """

    request: GenerationRequest
    id: str
    choice: int
    num_cached: int = 0
    num_computed: int = field(init=False)
    token_ids: list[int] = field(init=False)
    awaits_fork: bool = field(init=False)
    virtual_time: float = 0.0
    is_passed_over: bool = False
    is_preempted: bool = False
    lacks_bytes: bool = False
    num_output_before: int = 0
    has_rows: bool = False
    num_ready: int = 0
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None

    def __post_init__(self) -> None:
        self.begin_with(self.request)
        self.num_computed = self.num_cached
        self.awaits_fork = self.choice > 0

    def begin_with(self, request: GenerationRequest) -> None:
        """Start over with a changed request; nothing of its prompt may be computed yet."""
        self.request = request
        self.token_ids = list(request.prompt)

    def skip(self, num_tokens: int) -> None:
        """Start after `num_tokens` of the prompt, whose state is in the prefix cache."""
        self.num_cached = self.num_computed = num_tokens

    @property
    def num_output(self) -> int:
        """Tokens sampled so far, without a stop token."""
        return len(self.token_ids) - len(self.request.prompt)

    @property
    def num_wanted(self) -> int:
        """Known tokens that are not computed yet."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest sampled token is left to compute."""
        return self.num_output > 0 and self.num_wanted == 1

    def preempt(self, *, lacks_bytes: bool) -> None:
        self.is_preempted, self.lacks_bytes = True, lacks_bytes

    def resume(self) -> None:
        self.is_preempted = self.lacks_bytes = False
        self.num_output_before = self.num_output

    def next_chunk(self, num_tokens: int) -> Chunk:
        """The next `num_tokens` tokens to compute, at most `num_wanted`, with drafts after the last known one.

        No draft for output beyond max_tokens.
        """
        stop = self.num_computed + num_tokens
        ends_prompt = stop == len(self.request.prompt)
        num_drafts = 0
        if self.num_ready and self.is_decoding:
            num_drafts = min(self.num_ready, self.request.max_tokens - self.num_output - 1)
        return Chunk(
            sequence_id=self.id,
            request_id=self.request.request_id,
            start=self.num_computed,
            token_ids=tuple(self.token_ids[self.num_computed : stop]),
            num_drafts=num_drafts,
            samples=stop == len(self.token_ids),
            output_index=self.num_output,
            choice=self.choice,
            forks=sequence_ids(self.request)[1:] if ends_prompt else (),
        )

    def accept(self, num_committed: int, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Apply the result of a chunk or fork and return the tokens that belong to the output.

        The first stop token ends the output and is left out, see `stop_token_id`. Reaching max_tokens ends it too, with
        the last token included. With max_tokens 0 nothing is output. Tokens beyond the end are dropped.
        """
        self.num_ready = 0
        if self.awaits_fork:
            self.awaits_fork = False
            self.num_computed = len(self.request.prompt)
        self.num_computed += num_committed
        accepted: list[int] = []
        for token_id in token_ids:
            if self.request.max_tokens == 0:
                self.finish_reason = FinishReason.LENGTH
                break
            if token_id in self.request.stop_token_ids:
                self.finish_reason = FinishReason.STOP
                self.stop_token_id = token_id
                break
            self.token_ids.append(token_id)
            accepted.append(token_id)
            if self.num_output == self.request.max_tokens:
                self.finish_reason = FinishReason.LENGTH
                break
        return tuple(accepted)
