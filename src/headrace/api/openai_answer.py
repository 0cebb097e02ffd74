"""Answers of chats and completions: events as chunks of a stream, or as one object folded from the same chunks.

A stream is: chunks with text, for each choice a chunk with its finish reason, a usage chunk if requested, `[DONE]`. No
other chunk has usage unless requested, because one client drops the text next to it. The last chunk has llama.cpp's
`timings`. A failed stream ends with an error event and without `[DONE]`: the openai SDK raises APIError on the first,
and the second would tell other clients that the answer is complete.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from headrace.api.answer_encoder import AnswerHeading, approximations, logprob_entries, server_sent, shown_logprob
from headrace.api.error_bodies import openai_error
from headrace.api.llama_cpp import progress_body, timings_body
from headrace.errors import HeadraceError
from headrace.types.events import (
    DecodedLogprob,
    DecodedPromptLogprobs,
    Event,
    Finished,
    HiddenLogprobs,
    PrefillProgress,
    Progress,
    Reasoning,
    Started,
    Text,
    ToolArguments,
    ToolCallStart,
    Usage,
)

DONE = b"data: [DONE]\n\n"


class ChunkedAnswer(ABC):
    """An AnswerEncoder.

    num_choices: over all prompts.
    includes_logprobs: whether they were requested.
    include_usage: a stream ends with a usage chunk. usage_in_chunks, timings_in_chunks: every chunk has them so far,
    timings from the first token on.
    """

    chunk_kind: ClassVar[str]
    whole_kind: ClassVar[str]

    def __init__(
        self,
        heading: AnswerHeading,
        num_choices: int = 1,
        *,
        includes_logprobs: bool = False,
        include_usage: bool = False,
        usage_in_chunks: bool = False,
        timings_in_chunks: bool = False,
    ) -> None:
        self._heading = heading
        self._chunk_heading = heading.of(self.chunk_kind)
        self._open = list(range(num_choices))
        self._num_choices = num_choices
        self._includes_logprobs = includes_logprobs
        self._include_usage = include_usage
        self._usage_in_chunks = usage_in_chunks
        self._timings_in_chunks = timings_in_chunks
        self._usage: Usage | None = None

    def pieces(self, event: Event) -> list[bytes]:
        chunks = self.chunks(event)
        is_last = isinstance(event, Finished) and not self._open
        return [self._sent(chunk, is_last=is_last) for chunk in chunks]

    def ping(self) -> bytes:
        return self._sent(self.empty_chunk())

    def end(self) -> bytes:
        if self._usage is None or not self._include_usage:
            return DONE
        return server_sent(self.usage_chunk(self._usage)) + DONE

    def failure(self, error: HeadraceError) -> bytes:
        return server_sent(openai_error(error))

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """The answer as one object. Raises ValueError if a choice has not finished."""
        chunks = [chunk for event in events for chunk in self.chunks(event)]
        if self._usage is None or self._open:
            raise ValueError("each choice of an answer ends with Finished")
        pieces: list[list[dict[str, Any]]] = [[] for _ in range(self._num_choices)]
        for chunk in chunks:
            for choice in chunk["choices"]:
                pieces[choice["index"]].append(choice)
        choices = [self._joined(index, each) for index, each in enumerate(pieces)]
        answer = {
            **self._heading.of(self.whole_kind),
            "choices": choices,
            "usage": usage_body(self._usage),
            "timings": timings_body(self._usage),
        }
        for chunk in chunks:
            if "prompt_logprobs" in chunk:
                answer["prompt_logprobs"] = chunk["prompt_logprobs"]
        return answer

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        """Chunks for one event. Raises TypeError for one without a form."""
        match event:
            case Text() | Reasoning():
                pass
            case Started(num_prompt_tokens, route):
                self._usage = Usage(num_prompt_tokens, 0, route=route)
            case Progress(usage):
                self._usage = usage
            case Finished():
                self._usage = event.usage
                self._open.remove(event.choice)
        return [self._chunk_heading | part for part in self._event_bodies(event)]

    def empty_chunk(self) -> dict[str, Any]:
        index = self._open[0] if self._open else 0
        return self._chunk_heading | self._piece(index)

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._chunk_heading | {"choices": [], "usage": usage_body(usage), "timings": timings_body(usage)}

    def _sent(self, chunk: dict[str, Any], *, is_last: bool = False) -> bytes:
        """is_last: no choice follows."""
        usage = self._usage
        if usage is not None and self._usage_in_chunks:
            chunk = {**chunk, "usage": usage_body(usage)}
        is_due = is_last and not self._include_usage
        if usage is not None and (is_due or (self._timings_in_chunks and usage.num_output_tokens)):
            chunk = {**chunk, "timings": timings_body(usage)}
        return server_sent(chunk)

    @abstractmethod
    def _event_bodies(self, event: Event) -> Sequence[dict[str, Any]]:
        """Chunks for one event, without the heading."""

    @abstractmethod
    def _piece(self, index: int) -> dict[str, Any]:
        """A chunk without text for a choice, without the heading."""

    @abstractmethod
    def _joined(self, index: int, pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A choice from its parts of all chunks."""


class ChatAnswer(ChunkedAnswer):
    """reasoning_field: the name of the thinking text's field."""

    chunk_kind = "chat.completion.chunk"
    whole_kind = "chat.completion"

    def __init__(
        self,
        heading: AnswerHeading,
        num_choices: int = 1,
        *,
        reasoning_field: str = "reasoning_content",
        **options: bool,
    ) -> None:
        super().__init__(heading, num_choices, **options)
        self._reasoning_field = reasoning_field

    def _event_bodies(self, event: Event) -> Sequence[dict[str, Any]]:
        match event:
            case Text():
                return (self._piece(event.choice, {"content": event.text}, event.logprobs),)
            case Reasoning():
                return (self._piece(event.choice, {self._reasoning_field: event.text}, event.logprobs),)
            case ToolArguments(index, text, choice):
                return (self._piece(choice, {"tool_calls": [{"index": index, "function": {"arguments": text}}]}),)
            case ToolCallStart(index, id, name, choice):
                call = {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}
                return (self._piece(choice, {"tool_calls": [call]}),)
            case HiddenLogprobs(logprobs, choice):
                return (self._piece(choice, {}, logprobs),)
            case Started():
                start = {"role": "assistant", "content": ""}
                return [self._piece(choice, start) for choice in range(self._num_choices)]
            case PrefillProgress(choice):
                return ({**self._piece(choice), "prompt_progress": progress_body(event)},)
            case DecodedPromptLogprobs(_, logprobs):
                return ({"choices": [], "prompt_logprobs": prompt_logprobs_body(logprobs)},)
            case Progress():
                return ()
            case Finished(reason, _, choice, logprobs):
                return (self._piece(choice, {}, logprobs, reason.value),)
        raise TypeError(f"a chat's answer can't hold {type(event).__name__}")

    def _piece(
        self,
        index: int,
        delta: dict[str, Any] | None = None,
        logprobs: Sequence[DecodedLogprob] = (),
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        body = {"content": logprob_entries(logprobs), "refusal": None} if logprobs else None
        choice = {"index": index, "delta": delta or {}, "logprobs": body, "finish_reason": finish_reason}
        return {"choices": [choice]}

    def _joined(self, index: int, pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
        deltas = [piece["delta"] for piece in pieces]
        content = "".join(delta.get("content", "") for delta in deltas)
        reasoning = "".join(delta.get(self._reasoning_field, "") for delta in deltas)
        calls: dict[int, list[dict[str, Any]]] = {}
        for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
            calls.setdefault(call["index"], []).append(call)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls and not content:
            message["content"] = None
        if reasoning:
            message[self._reasoning_field] = reasoning
        if calls:
            message["tool_calls"] = [_joined_call(each) for each in calls.values()]
        body = None
        if self._includes_logprobs:
            entries = [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]]
            body = {"content": entries, "refusal": None}
        finish_reason = pieces[-1]["finish_reason"]
        return {"index": index, "message": message, "logprobs": body, "finish_reason": finish_reason}


def _joined_call(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    arguments = "".join(piece["function"]["arguments"] for piece in pieces)
    start = pieces[0]
    return {
        "id": start["id"],
        "type": "function",
        "function": {"name": start["function"]["name"], "arguments": arguments},
    }


class CompletionAnswer(ChunkedAnswer):
    """choices_per_prompt: consecutive ones belong to one prompt."""

    chunk_kind = whole_kind = "text_completion"

    def __init__(
        self, heading: AnswerHeading, num_choices: int = 1, *, choices_per_prompt: int = 1, **options: bool
    ) -> None:
        super().__init__(heading, num_choices, **options)
        self._choices_per_prompt = choices_per_prompt
        self._offsets = [_Offsets() for _ in range(num_choices)]

    def _event_bodies(self, event: Event) -> Sequence[dict[str, Any]]:
        match event:
            case Text():
                return (self._piece(event.choice, event.text, event.logprobs),)
            case HiddenLogprobs(logprobs, choice):
                return (self._piece(choice, "", logprobs),)
            case Started() | Progress():
                return ()
            case PrefillProgress(choice):
                return ({**self._piece(choice), "prompt_progress": progress_body(event)},)
            case DecodedPromptLogprobs(first, logprobs):
                body = prompt_logprobs_body(logprobs)
                choices = [self._piece(first + index)["choices"][0] for index in range(self._choices_per_prompt)]
                return [{"choices": [{**choice, "prompt_logprobs": body}]} for choice in choices]
            case Finished(reason, _, choice, logprobs):
                return (self._piece(choice, "", logprobs, reason.value),)
        raise TypeError(f"a completion's answer can't hold {type(event).__name__}")

    def _piece(
        self, index: int, text: str = "", logprobs: Sequence[DecodedLogprob] = (), finish_reason: str | None = None
    ) -> dict[str, Any]:
        offsets = self._offsets[index].of(text, logprobs)
        body = _logprob_lists(logprobs, offsets) if logprobs else None
        return {"choices": [{"index": index, "text": text, "logprobs": body, "finish_reason": finish_reason}]}

    def _joined(self, index: int, pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
        body = None
        if self._includes_logprobs:
            parts = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
            body = {name: [each for part in parts for each in part[name]] for name in _logprob_lists((), ())}
        joined = {"text": "".join(piece["text"] for piece in pieces), "logprobs": body}
        # The last piece has the finish reason, one may have the prompt's log-probabilities.
        return {name: value for piece in pieces for name, value in piece.items()} | joined


class _Offsets:
    """Where a choice's tokens begin in its text, in characters; the parts of one character share its offset."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0
        self._num_told = 0

    def of(self, text: str, tokens: Sequence[DecodedLogprob]) -> list[int]:
        """Offsets of the tokens that begin in the choice's next piece of text."""
        start, offsets = self._num_told, list[int]()
        for token in tokens:
            offsets.append(self._length)
            self._length += self._num_added(token, text, max(self._length - start, 0))
        self._num_told += len(text)
        return offsets

    def _num_added(self, token: DecodedLogprob, text: str, position: int) -> int:
        if token.data is not None:
            added = self._utf8.decode(token.data)
            # Some decoders leave out the space before a text's first token.
            is_cut = not self._length and added.startswith(" ") and text[position : position + 1] not in ("", " ")
            return len(added) - is_cut
        # A special token counts where the text has its name, as in an echo; there it ends an unfinished character.
        state = self._utf8.getstate()
        named = self._utf8.decode(b"", final=True) + token.text
        if text.startswith(named, position):
            return len(named)
        self._utf8.setstate(state)
        return 0


def _logprob_lists(logprobs: Sequence[DecodedLogprob], offsets: Sequence[int]) -> dict[str, list[Any]]:
    return {
        "tokens": [token.text for token in logprobs],
        "token_logprobs": [None if token.logprob is None else shown_logprob(token.logprob) for token in logprobs],
        "top_logprobs": [_top(token) for token in logprobs],
        "text_offset": list(offsets),
    }


def _top(token: DecodedLogprob) -> dict[str, float] | None:
    """The most likely tokens and the sampled one. Of tokens with the same text, the most likely one is kept."""
    if token.logprob is None:
        return None
    top: dict[str, float] = {}
    for each in (*token.top, token):
        assert each.logprob is not None
        top.setdefault(each.text, shown_logprob(each.logprob))
    return top


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.num_cached_tokens,
            "route": usage.route.value,
            **approximations(usage),
        },
        "completion_tokens_details": {
            "reasoning_tokens": usage.num_reasoning_tokens,
            "accepted_prediction_tokens": usage.num_accepted_tokens,
            "rejected_prediction_tokens": usage.num_drafted_tokens - usage.num_accepted_tokens,
        },
    }


def prompt_logprobs_body(logprobs: Sequence[DecodedLogprob]) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` in vLLM's form: per token a mapping by id, null for the first token."""
    return [
        None if token.logprob is None else {str(each.token_id): _decoded(each) for each in (*token.top, token)}
        for token in logprobs
    ]


def _decoded(token: DecodedLogprob) -> dict[str, Any]:
    assert token.logprob is not None
    return {"logprob": shown_logprob(token.logprob), "rank": token.rank, "decoded_token": token.text}
