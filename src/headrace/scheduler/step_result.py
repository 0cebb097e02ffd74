"""Checks that a step's result matches its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.types.request import GenerationRequest
from headrace.types.step import Chunk, ChunkResult, StepResult


def check_result(chunks: Sequence[Chunk], result: StepResult, requests: Mapping[str, GenerationRequest]) -> None:
    """Raise ValueError unless each chunk and fork has exactly one result with consistent counts.

    requests: by request id.
    """
    found = [each.sequence_id for each in result.results]
    found += [failure.sequence_id for failure in result.failures]
    planned = [sequence_id for chunk in chunks for sequence_id in (chunk.sequence_id, *chunk.forks)]
    if sorted(found) != sorted(planned):
        raise ValueError(f"the step planned {planned}, its result has {found}")
    results = {each.sequence_id: each for each in result.results}
    for chunk in chunks:
        request = requests[chunk.request_id]
        if chunk.sequence_id in results:
            _check_chunk(chunk, results[chunk.sequence_id], request)
        for fork in chunk.forks:
            if fork in results:
                _check_fork(results[fork], request)


def _check_chunk(chunk: Chunk, result: ChunkResult, request: GenerationRequest) -> None:
    """Committed tokens beyond the chunk's own are accepted drafts, and each of them is also output."""
    num_certain = len(chunk.token_ids)
    num_accepted = result.num_committed - num_certain
    num_gained = len(result.token_ids)
    num_due = num_accepted + 1 if chunk.samples else 0
    is_possible = 0 <= num_accepted <= result.num_verified <= chunk.num_drafts
    if not is_possible or num_gained != num_due:
        raise ValueError(
            f"{chunk.sequence_id}: {result.num_committed} tokens committed and {num_gained} gained do not fit a chunk "
            f"of {num_certain} tokens that {'samples' if chunk.samples else 'does not sample'}, "
            f"with {result.num_verified} of {chunk.num_drafts} drafts verified"
        )
    num_predicted = 0
    if request.num_prompt_logprobs is not None:
        last = min(chunk.start + result.num_committed, len(request.prompt) - 1)
        num_predicted = max(0, last - chunk.start)
    _check_logprobs(result, request, num_predicted)


def _check_fork(result: ChunkResult, request: GenerationRequest) -> None:
    if result.num_committed != 0 or len(result.token_ids) != 1:
        raise ValueError(
            f"{result.sequence_id}: a fork commits nothing and gains one token, "
            f"not {result.num_committed} and {len(result.token_ids)}"
        )
    _check_logprobs(result, request, 0)


def _check_logprobs(result: ChunkResult, request: GenerationRequest, num_predicted: int) -> None:
    num_due = len(result.token_ids) if request.num_logprobs is not None else 0
    if len(result.logprobs) != num_due or len(result.prompt_logprobs) != num_predicted:
        raise ValueError(
            f"{result.sequence_id}: {num_due} log-probabilities of the output and {num_predicted} of the prompt are "
            f"due, not {len(result.logprobs)} and {len(result.prompt_logprobs)}"
        )
