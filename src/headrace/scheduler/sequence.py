"""What the scheduler knows about one request that it works on."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.types.events import FinishReason
from headrace.types.request import GenerationRequest
from headrace.types.step import Chunk


@dataclass(slots=True, eq=False)
class Sequence:
    """A request and how far it has come. Only the scheduler changes it.

    There are no phases: tokens are known (the prompt, then each sampled one) and computed tokens catch up
    with them. A prompt is many tokens behind, a decoding sequence one.

    request: as it was added. arrival: rises by one for each request added.
    num_cached: prompt tokens that need no computing. num_computed: tokens whose state the runner holds.
    token_ids: every known token, prompt first.
    virtual_time: prompt tokens served, counted from the scheduler's clock at admission; the least goes first.
    is_passed_over: the last step had budget left, but too little for this prompt.
    in_flight: the chunk of this sequence that the runner is working on.
    has_rows: whether the runner has ever been given a chunk, so that it holds state to be freed.
    is_aborted: the request was given up while its chunk was in flight.
    """

    request: GenerationRequest
    arrival: int
    num_cached: int = 0
    num_computed: int = field(init=False)
    token_ids: list[int] = field(init=False)
    virtual_time: float = 0.0
    is_passed_over: bool = False
    in_flight: Chunk | None = None
    has_rows: bool = False
    is_aborted: bool = False
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt)
        self.num_computed = self.num_cached

    @property
    def id(self) -> str:
        """The request's id; chunks and results carry it."""
        return self.request.request_id

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

    def next_chunk(self, num_tokens: int) -> Chunk:
        """The next `num_tokens` tokens to compute; at most `num_wanted`."""
        stop = self.num_computed + num_tokens
        return Chunk(
            sequence_id=self.id,
            start=self.num_computed,
            token_ids=tuple(self.token_ids[self.num_computed : stop]),
            samples=stop == len(self.token_ids),
            output_index=self.num_output,
        )

    def accept(self, num_committed: int, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Take over a chunk's result and return the tokens that belong to the output.

        The first stop token ends the output and is left out; so does reaching max_tokens, with the token
        that reaches it included. What the runner gained beyond the end (accepted drafts) is dropped.
        """
        self.num_computed += num_committed
        accepted: list[int] = []
        for token_id in token_ids:
            if token_id in self.request.stop_token_ids:
                self.finish_reason = FinishReason.STOP
                break
            self.token_ids.append(token_id)
            accepted.append(token_id)
            if self.num_output == self.request.max_tokens:
                self.finish_reason = FinishReason.LENGTH
                break
        return tuple(accepted)
