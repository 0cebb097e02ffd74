"""Answers of /v1/completions: events as chunks of a stream, or as one object."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.api.answer_encoder import AnswerHeading
from headrace.api.openai_answer import prompt_logprobs_body, shown_logprob, usage_body
from headrace.types.events import Event, Finished, HiddenScores, PromptScores, Started, Text, TokenScore, Usage

_KIND = "text_completion"


class CompletionAnswer:
    """Encodes one answer.

    num_prompts: prompts, each with num_choices consecutive choices. includes_logprobs: whether they were requested.
    """

    def __init__(
        self, heading: AnswerHeading, num_prompts: int = 1, num_choices: int = 1, *, includes_logprobs: bool = False
    ) -> None:
        self._heading = heading
        self._num_choices = num_choices
        self._includes_logprobs = includes_logprobs
        self._open = list(range(num_prompts * num_choices))
        self._offsets = [_Offsets() for _ in self._open]

    def chunks(self, event: Event) -> Iterator[dict[str, Any]]:
        match event:
            case Started():
                pass
            case Text(text, choice, scores):
                yield self._chunk(choice, text, scores)
            case HiddenScores(scores, choice):
                yield self._chunk(choice, "", scores)
            case Finished(reason, _, choice, scores):
                self._open.remove(choice)
                yield self._chunk(choice, "", scores, reason.value)
            case _:
                raise TypeError(f"a completion's stream has no form for {type(event).__name__}")

    def ping(self) -> dict[str, Any]:
        """A chunk with an empty text, of an unfinished choice."""
        return self._chunk(self._open[0] if self._open else 0, "")

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The usage chunk, which has no choices."""
        return {**self._heading.of(_KIND), "choices": [], "usage": usage_body(usage)}

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """The answer as one object. Raises ValueError if a choice has not finished."""
        written = [_Choice() for _ in self._open]
        usage: Usage | None = None
        for event in events:
            match event:
                case Started():
                    pass
                case PromptScores(choice, scores):
                    for each in written[choice : choice + self._num_choices]:
                        each.prompt_scores = scores
                case Text() | HiddenScores() | Finished():
                    written[event.choice].take(event)
                    usage = event.usage if isinstance(event, Finished) else usage
                case _:
                    raise TypeError(f"a completion's answer has no form for {type(event).__name__}")
        if usage is None or None in [choice.finish_reason for choice in written]:
            raise ValueError("each choice of an answer ends with Finished")
        choices = [self._whole_choice(index, choice) for index, choice in enumerate(written)]
        return {**self._heading.of(_KIND), "choices": choices, "usage": usage_body(usage)}

    def _whole_choice(self, index: int, written: _Choice) -> dict[str, Any]:
        choice = _choice(index, "".join(written.text), written.finish_reason)
        if self._includes_logprobs:
            choice["logprobs"] = _logprobs(written.scores, self._offsets[index])
        if written.prompt_scores is not None:
            choice["prompt_logprobs"] = prompt_logprobs_body(written.prompt_scores)
        return choice

    def _chunk(
        self, index: int, text: str, scores: Sequence[TokenScore] = (), finish_reason: str | None = None
    ) -> dict[str, Any]:
        choice = _choice(index, text, finish_reason)
        if scores:
            choice["logprobs"] = _logprobs(scores, self._offsets[index])
        return {**self._heading.of(_KIND), "choices": [choice]}


@dataclass(slots=True)
class _Choice:
    """One choice so far."""

    text: list[str] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    prompt_scores: tuple[TokenScore, ...] | None = None
    finish_reason: str | None = None

    def take(self, event: Text | HiddenScores | Finished) -> None:
        self.scores += event.scores
        match event:
            case Finished(reason):
                self.finish_reason = reason.value
            case Text(text):
                self.text.append(text)


class _Offsets:
    """Where a choice's tokens begin in its text, in characters; the parts of one character share its offset."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def next(self, score: TokenScore) -> int:
        offset = self._length
        self._length += len(self._utf8.decode(score.data or b""))
        return offset


def _choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _logprobs(scores: Sequence[TokenScore], offsets: _Offsets) -> dict[str, Any]:
    return {
        "tokens": [score.text for score in scores],
        "token_logprobs": [None if score.logprob is None else shown_logprob(score.logprob) for score in scores],
        "top_logprobs": [_top(score) for score in scores],
        "text_offset": [offsets.next(score) for score in scores],
    }


def _top(score: TokenScore) -> dict[str, float] | None:
    """The most likely tokens and the sampled one. Of tokens with the same text, the most likely one is kept."""
    if score.logprob is None:
        return None
    top: dict[str, float] = {}
    for each in (*score.top, score):
        assert each.logprob is not None
        top.setdefault(each.text, shown_logprob(each.logprob))
    return top
