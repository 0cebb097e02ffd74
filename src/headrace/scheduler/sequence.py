"""What the scheduler knows about one choice of a request that it works on."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.types.events import FinishReason
from headrace.types.request import GenerationRequest
from headrace.types.step import Chunk


def sequence_ids(request: GenerationRequest) -> tuple[str, ...]:
    """The sequences of a request, one for each choice: the request's id, or `<id>/<choice>` if there are several."""
    if request.num_choices == 1:
        return (request.request_id,)
    return tuple(f"{request.request_id}/{choice}" for choice in range(request.num_choices))


@dataclass(slots=True, eq=False)
class Sequence:
    """A choice of a request and how far it has come. Only the scheduler changes it.

    There are no phases: tokens are known (the prompt, then each sampled one) and computed tokens catch up
    with them. A prompt is many tokens behind, a decoding sequence one. Only choice 0 computes the prompt; the
    others await the end of that and begin with a copy of its state.

    id: chunks and results carry it.
    num_cached: prompt tokens that need no computing. num_computed: tokens whose state the runner holds.
    token_ids: every known token, prompt first.
    awaits_fork: choice 0 has not come to the end of the prompt yet.
    virtual_time: prompt tokens served, counted from the prefill's clock at admission; the least goes first.
    is_passed_over: the last step had budget left, but too little for this prompt.
    is_preempted: it has made room: the runner keeps a checkpoint of its state and no more. lacks_bytes: because there
    were no bytes for it, not for another's turn. num_output_before: its output when it last began or went on.
    has_rows: whether the runner has ever been given a chunk, so that it holds state to be freed.
    num_ready: drafts that the runner holds for the next chunk.
    stop_token_id: the stop token that ended the output, which is in no list of tokens.
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
        """Nothing of the prompt is computed yet, and the request has it otherwise now."""
        self.request = request
        self.token_ids = list(request.prompt)

    def skip(self, num_tokens: int) -> None:
        """Begin behind `num_tokens` of the prompt, whose state the runner finds in the prefix cache."""
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
        """The next `num_tokens` tokens to compute, at most `num_wanted`, and drafts behind the last known one.

        A draft that can't be output is not worth its computing: the last token before max_tokens needs none.
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
        """Take over the result of a chunk or a fork and return the tokens that belong to the output.

        The first stop token ends the output and is left out, see `stop_token_id`; so does reaching max_tokens, with
        the token that reaches it included. With max_tokens 0 nothing is output: the prompt was all that was wanted.
        What the runner gained beyond the end is dropped.
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
