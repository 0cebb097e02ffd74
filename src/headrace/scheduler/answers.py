"""Checks that a step's result matches its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.types.request import GenerationRequest
from headrace.types.step import Chunk, ChunkResult, StepResult


def check_answers(chunks: Sequence[Chunk], result: StepResult, requests: Mapping[str, GenerationRequest]) -> None:
    """Raise ValueError unless each chunk and fork has exactly one result with consistent counts.

    requests: by request id.
    """
    answered = [answer.sequence_id for answer in result.results]
    answered += [failure.sequence_id for failure in result.failures]
    planned = [sequence_id for chunk in chunks for sequence_id in (chunk.sequence_id, *chunk.forks)]
    if sorted(answered) != sorted(planned):
        raise ValueError(f"the step planned {planned}, its result answers {answered}")
    answers = {answer.sequence_id: answer for answer in result.results}
    for chunk in chunks:
        request = requests[chunk.request_id]
        if chunk.sequence_id in answers:
            _check_chunk(chunk, answers[chunk.sequence_id], request)
        for fork in chunk.forks:
            if fork in answers:
                _check_fork(answers[fork], request)


def _check_chunk(chunk: Chunk, answer: ChunkResult, request: GenerationRequest) -> None:
    """Committed tokens beyond the chunk's own are accepted drafts, and each of them is also output."""
    num_certain = len(chunk.token_ids)
    num_right = answer.num_committed - num_certain
    num_gained = len(answer.token_ids)
    num_due = num_right + 1 if chunk.samples else 0
    is_possible = 0 <= num_right <= answer.num_verified <= chunk.num_drafts
    if not is_possible or num_gained != num_due:
        raise ValueError(
            f"{chunk.sequence_id}: {answer.num_committed} tokens committed and {num_gained} gained do not fit a chunk "
            f"of {num_certain} tokens that {'samples' if chunk.samples else 'does not sample'}, "
            f"with {answer.num_verified} of {chunk.num_drafts} drafts verified"
        )
    num_predicted = 0
    if request.num_prompt_logprobs is not None:
        last = min(chunk.start + answer.num_committed, len(request.prompt) - 1)
        num_predicted = max(0, last - chunk.start)
    _check_logprobs(answer, request, num_predicted)


def _check_fork(answer: ChunkResult, request: GenerationRequest) -> None:
    if answer.num_committed != 0 or len(answer.token_ids) != 1:
        raise ValueError(
            f"{answer.sequence_id}: a fork commits nothing and gains one token, "
            f"not {answer.num_committed} and {len(answer.token_ids)}"
        )
    _check_logprobs(answer, request, 0)


def _check_logprobs(answer: ChunkResult, request: GenerationRequest, num_predicted: int) -> None:
    num_due = len(answer.token_ids) if request.num_logprobs is not None else 0
    if len(answer.logprobs) != num_due or len(answer.prompt_logprobs) != num_predicted:
        raise ValueError(
            f"{answer.sequence_id}: {num_due} log-probabilities of the output and {num_predicted} of the prompt are "
            f"due, not {len(answer.logprobs)} and {len(answer.prompt_logprobs)}"
        )
