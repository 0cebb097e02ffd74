"""What the answers of chats and completions share.

A stream is: chunks with text, for each choice a chunk with its finish reason, a usage chunk if requested, `[DONE]`. No
other chunk has usage unless requested, because one client drops the text next to it. A failed stream ends with an error
event and without `[DONE]`: the openai SDK raises APIError on the first, and the second would tell other clients that
the answer is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from headrace.api.answer_encoder import server_sent, sparse_detail
from headrace.api.openai_errors import error_body
from headrace.errors import HeadraceError
from headrace.types.events import Event, Finished, Progress, Started, TokenScore, Usage

DONE = b"data: [DONE]\n\n"

# JSON has no infinity; this stands for the log-probability of an impossible token.
_LEAST_LOGPROB = -9999.0


class ChunkWriter(Protocol):
    """Encodes the chunks of one answer, and the whole of it."""

    def chunks(self, event: Event) -> Iterator[dict[str, Any]]:
        """Chunks for one event."""

    def ping(self) -> dict[str, Any]:
        """An empty chunk."""

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last chunk of a stream whose client asked for usage."""

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """The answer as one object; `events` are all events of the session."""


class ChunkedAnswer:
    """Sends chunks as a stream (an AnswerEncoder).

    include_usage: end with a usage chunk. counts_progress: put the usage so far into every chunk.
    """

    def __init__(self, writer: ChunkWriter, *, include_usage: bool = False, counts_progress: bool = False) -> None:
        self._writer = writer
        self._include_usage = include_usage
        self._counts_progress = counts_progress
        self._usage: Usage | None = None

    def pieces(self, event: Event) -> Iterator[bytes]:
        match event:
            case Started(num_prompt_tokens, route):
                self._usage = Usage(num_prompt_tokens, 0, route=route)
            case Progress(usage):
                self._usage = usage
                return
            case Finished():
                self._usage = event.usage
        for chunk in self._writer.chunks(event):
            yield self._sent(chunk)

    def ping(self) -> bytes:
        return self._sent(self._writer.ping())

    def end(self) -> bytes:
        if self._usage is None or not self._include_usage:
            return DONE
        return server_sent(self._writer.usage_chunk(self._usage)) + DONE

    def failure(self, error: HeadraceError) -> bytes:
        return server_sent(error_body(error))

    def _sent(self, chunk: dict[str, Any]) -> bytes:
        if self._counts_progress and self._usage is not None:
            chunk = {**chunk, "usage": usage_body(self._usage)}
        return server_sent(chunk)

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        return self._writer.whole(events)


def usage_body(usage: Usage) -> dict[str, Any]:
    """Token counts in OpenAI's names."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.num_cached_tokens,
            "route": usage.route.value,
            **sparse_detail(usage),
        },
        "completion_tokens_details": {
            "reasoning_tokens": usage.num_reasoning_tokens,
            "accepted_prediction_tokens": usage.num_accepted_tokens,
            "rejected_prediction_tokens": usage.num_drafted_tokens - usage.num_accepted_tokens,
        },
    }


def shown_logprob(logprob: float) -> float:
    """A log-probability that JSON can represent."""
    return max(logprob, _LEAST_LOGPROB)


def prompt_logprobs_body(scores: Sequence[TokenScore]) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` in vLLM's form: per token a mapping by id, null for the first token."""
    return [
        None if score.logprob is None else {str(each.token_id): _decoded(each) for each in (*score.top, score)}
        for score in scores
    ]


def _decoded(score: TokenScore) -> dict[str, Any]:
    assert score.logprob is not None
    return {"logprob": shown_logprob(score.logprob), "rank": score.rank, "decoded_token": score.text}
