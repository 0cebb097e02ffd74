"""Answers of /v1/chat/completions: events as chunks of a stream, or as one object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.api.answer_encoder import AnswerHeading
from headrace.api.openai_answer import prompt_logprobs_body, shown_logprob, usage_body
from headrace.types.events import (
    Event,
    Finished,
    HiddenScores,
    PromptScores,
    Reasoning,
    Started,
    Text,
    TokenScore,
    ToolArguments,
    ToolCallStart,
    Usage,
)

_CHUNK = "chat.completion.chunk"


class ChatAnswer:
    """Encodes one answer.

    num_choices: its choices.
    includes_logprobs: whether they were requested.
    reasoning_field: the name of the thinking text's field.
    """

    def __init__(
        self,
        heading: AnswerHeading,
        num_choices: int = 1,
        *,
        includes_logprobs: bool = False,
        reasoning_field: str = "reasoning_content",
    ) -> None:
        self._heading = heading
        self._num_choices = num_choices
        self._includes_logprobs = includes_logprobs
        self._reasoning_field = reasoning_field
        self._open = list(range(num_choices))

    def chunks(self, event: Event) -> Iterator[dict[str, Any]]:
        """Chunks for one event; a choice begins with the role."""
        match event:
            case Started():
                for choice in range(self._num_choices):
                    yield self._chunk(choice, {"role": "assistant", "content": ""})
            case Text(text, choice, scores):
                yield self._chunk(choice, {"content": text}, scores)
            case Reasoning(text, choice, scores):
                yield self._chunk(choice, {self._reasoning_field: text}, scores)
            case HiddenScores(scores, choice):
                yield self._chunk(choice, {}, scores)
            case ToolCallStart(index, id, name, choice):
                function = {"name": name, "arguments": ""}
                yield self._chunk(choice, _call_delta(index, {"id": id, "type": "function", "function": function}))
            case ToolArguments(index, text, choice):
                yield self._chunk(choice, _call_delta(index, {"function": {"arguments": text}}))
            case Finished(reason, _, choice, scores):
                self._open.remove(choice)
                yield self._chunk(choice, {}, scores, reason.value)
            case _:
                raise TypeError(f"a chat's stream has no form for {type(event).__name__}")

    def ping(self) -> dict[str, Any]:
        """A chunk with an empty delta, of an unfinished choice."""
        return self._chunk(self._open[0] if self._open else 0, {})

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The usage chunk, which has no choices."""
        return {**self._heading.of(_CHUNK), "choices": [], "usage": usage_body(usage)}

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """The answer as one object. Raises ValueError if a choice has not finished."""
        written = [_Choice() for _ in range(self._num_choices)]
        prompt_scores: tuple[TokenScore, ...] | None = None
        usage: Usage | None = None
        for event in events:
            match event:
                case Started():
                    pass
                case PromptScores(_, scores):
                    prompt_scores = scores
                case Text() | Reasoning() | HiddenScores() | ToolCallStart() | ToolArguments() | Finished():
                    written[event.choice].take(event)
                    usage = event.usage if isinstance(event, Finished) else usage
                case _:
                    raise TypeError(f"a chat's answer has no form for {type(event).__name__}")
        if usage is None or None in [choice.finish_reason for choice in written]:
            raise ValueError("each choice of an answer ends with Finished")
        choices = [self._whole_choice(index, choice) for index, choice in enumerate(written)]
        answer = {**self._heading.of("chat.completion"), "choices": choices, "usage": usage_body(usage)}
        if prompt_scores is not None:
            answer["prompt_logprobs"] = prompt_logprobs_body(prompt_scores)
        return answer

    def _whole_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        content: str | None = "".join(choice.content)
        if choice.calls and not content:
            content = None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.reasoning:
            message[self._reasoning_field] = "".join(choice.reasoning)
        if choice.calls:
            message["tool_calls"] = [_whole_call(start, pieces) for start, pieces in choice.calls]
        logprobs = _logprobs(choice.scores) if self._includes_logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        scores: Sequence[TokenScore] = (),
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        logprobs = _logprobs(scores) if scores else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._heading.of(_CHUNK), "choices": [choice]}


@dataclass(slots=True)
class _Choice:
    """One choice so far."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[ToolCallStart, list[str]]] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    finish_reason: str | None = None

    def take(self, event: Text | Reasoning | HiddenScores | ToolCallStart | ToolArguments | Finished) -> None:
        if not isinstance(event, ToolCallStart | ToolArguments):
            self.scores += event.scores
        match event:
            case ToolCallStart():
                self.calls.append((event, []))
            case ToolArguments(index, text):
                self.calls[index][1].append(text)
            case Text(text):
                self.content.append(text)
            case Reasoning(text):
                self.reasoning.append(text)
            case Finished(reason):
                self.finish_reason = reason.value


def _call_delta(index: int, call: dict[str, Any]) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, **call}]}


def _whole_call(start: ToolCallStart, pieces: Sequence[str]) -> dict[str, Any]:
    function = {"name": start.name, "arguments": "".join(pieces)}
    return {"id": start.id, "type": "function", "function": function}


def _logprobs(scores: Sequence[TokenScore]) -> dict[str, Any]:
    content = [{**_scored(score), "top_logprobs": [_scored(each) for each in score.top]} for score in scores]
    return {"content": content, "refusal": None}


def _scored(score: TokenScore) -> dict[str, Any]:
    assert score.logprob is not None, "an answer's tokens all have log-probabilities"
    # A special token is not part of the text, so it has no bytes.
    data = None if score.data is None else list(score.data)
    return {"token": score.text, "logprob": shown_logprob(score.logprob), "bytes": data}
