"""Output processing: token ids to text to events, per choice of each prompt, with all token counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from headrace.session.logprobs import LogprobDecoder, LogprobQueue, TextLogprobs
from headrace.text.detokenize import Detokenizer
from headrace.text.emitter import ParsedEvent
from headrace.text.stream_parser import StreamParser
from headrace.tool_calls.calls import CallFault
from headrace.types.events import (
    DecodedLogprob,
    DecodedPromptLogprobs,
    Event,
    Finished,
    FinishReason,
    HiddenLogprobs,
    OutputTimes,
    PrefillProgress,
    Reasoning,
    SparseUsage,
    Text,
    TokenOutput,
    ToolArguments,
    ToolCallStart,
    Usage,
)
from headrace.types.media import Route
from headrace.types.request import GenerationRequest

ChoiceEvent = Text | Reasoning | HiddenLogprobs | ToolCallStart | ToolArguments
"""The events of a choice before its end."""


class ChoiceOutputProcessor:
    """Processes the output of one choice.

    Takes tokens one by one, so that counts don't depend on how many a step delivered. A token whose text is withheld
    (a marker, half a character) is counted with the text that comes out after it.

    choice: its number in the whole request.
    logprob_decoder: None if no log-probabilities were requested.
    stop_string: the one that ended it, or None.
    token_ids: the output without a final stop token; text, reasoning: what it decoded to.
    num_tokens: generated tokens, a final stop token included.
    """

    def __init__(
        self, choice: int, detokenizer: Detokenizer, parser: StreamParser, logprob_decoder: LogprobDecoder | None
    ) -> None:
        self.choice = choice
        self.reason: FinishReason | None = None
        self.token_ids: list[int] = []
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self._detokenizer = detokenizer
        self._parser = parser
        self._logprob_decoder = logprob_decoder
        self._logprob_queue = LogprobQueue()
        self._num_undecided = 0
        self._num_faults_taken = 0
        self._events: list[ChoiceEvent] = []
        self._parsed: dict[type[Text | Reasoning], list[str]] = {Text: [], Reasoning: []}

    @property
    def stop_string(self) -> str | None:
        return self._parser.stop_string

    @property
    def text(self) -> str:
        return "".join(self._parsed[Text])

    @property
    def reasoning(self) -> str:
        return "".join(self._parsed[Reasoning])

    @property
    def num_calls(self) -> int:
        return self._parser.num_calls

    def take_call_faults(self) -> tuple[CallFault, ...]:
        """Those since the last call."""
        new = tuple(self._parser.faults[self._num_faults_taken :])
        self._num_faults_taken += len(new)
        return new

    def push(self, output: TokenOutput) -> list[ChoiceEvent]:
        """Events of one engine output, adjacent ones of a kind joined; sets `reason` at the choice's end."""
        for index, token_id in enumerate(output.token_ids):
            self.token_ids.append(token_id)
            self.num_tokens += 1
            self._num_undecided += 1
            text = self._detokenizer.push_token(token_id)
            if self._logprob_decoder is not None:
                self._logprob_queue.push(self._logprob_decoder.decode(output.logprobs[index]), text)
            self._parse(text)
            if self._parser.stopped:
                self.reason = FinishReason.STOP
                return self._taken_events()
        if output.finish_reason is not None:
            self._end(output, output.finish_reason)
        return self._taken_events()

    def _end(self, output: TokenOutput, reason: FinishReason) -> None:
        text = self._detokenizer.finish()
        self._logprob_queue.push(None, text)
        self._parse(text)
        self._add_all(self._parser.finish(cut=reason is FinishReason.LENGTH))
        if output.stop_token_id is not None:
            self.num_tokens += 1
            if self._logprob_decoder is not None:
                # Its bytes are not part of the answer, even if it is an ordinary token.
                self._logprob_queue.push(replace(self._logprob_decoder.decode(output.logprobs[-1]), data=None), "")
        self.reason = self._reason(reason)

    def _reason(self, reason: FinishReason) -> FinishReason:
        if self._parser.stopped:
            return FinishReason.STOP
        called = reason is FinishReason.STOP and self._parser.num_calls
        return FinishReason.TOOL_CALLS if called else reason

    def echo_events(self, text: str, logprobs: tuple[DecodedLogprob, ...]) -> list[ChoiceEvent]:
        if text:
            return [Text(text, self.choice, logprobs)]
        return [HiddenLogprobs(logprobs, self.choice)] if logprobs else []

    def rest_of_logprobs(self) -> tuple[DecodedLogprob, ...]:
        """Those of tokens that no event has carried, after the last event."""
        return self._logprob_queue.rest()

    def _parse(self, text: str) -> None:
        if text:
            self._add_all(self._parser.push(text))

    def _add_all(self, events: Sequence[ParsedEvent]) -> None:
        logprobs: Iterator[TextLogprobs] | None = None
        if self._logprob_decoder is not None and events:
            texts = [event.text for event in events if isinstance(event, (Text, Reasoning))]
            logprobs = iter(self._logprob_queue.take(texts, self._parser.num_held))
        for event in events:
            if isinstance(event, Reasoning):
                self.num_reasoning_tokens += self._num_undecided
            self._num_undecided = 0
            if isinstance(event, (Text, Reasoning)):
                self._parsed[type(event)].append(event.text)
                if logprobs is not None:
                    event = self._with_logprobs(event, next(logprobs))
            self._emit(event)

    def _with_logprobs(self, event: Text | Reasoning, logprobs: TextLogprobs) -> Text | Reasoning:
        if logprobs.hidden:
            self._emit(HiddenLogprobs(logprobs.hidden))
        return replace(event, logprobs=logprobs.own) if logprobs.own else event

    def _emit(self, event: ChoiceEvent) -> None:
        """Join an event to the previous one if possible: each event becomes a message on the wire."""
        joined = _joined(self._events[-1], event) if self._events else None
        if joined is None:
            self._events.append(event if event.choice == self.choice else replace(event, choice=self.choice))
        else:
            self._events[-1] = joined

    def _taken_events(self) -> list[ChoiceEvent]:
        events, self._events = self._events, []
        return events


def _joined(first: ChoiceEvent, second: ChoiceEvent) -> ChoiceEvent | None:
    match first, second:
        case (Text() as earlier, Text() as later) | (Reasoning() as earlier, Reasoning() as later):
            return type(earlier)(earlier.text + later.text, earlier.choice, earlier.logprobs + later.logprobs)
        case HiddenLogprobs(logprobs), HiddenLogprobs(more):
            return replace(first, logprobs=logprobs + more)
        case ToolArguments(index, text), ToolArguments(same, more) if index == same:
            return replace(first, text=text + more)
    return None


class PromptOutputProcessor:
    """Processes the output of one prompt and all of its choices.

    request: as submitted to the engine.
    choices: in order.
    logprob_decoder: for the prompt's own tokens.
    num_prompt_logprobs: alternatives in the event of the prompt's own log-probabilities, None for no such
    event.
    echo: the prompt's text if answers begin with it.
    num_echo_logprobs: alternatives for the echoed tokens, None for no log-probabilities.
    times: None before the first output.
    """

    def __init__(
        self,
        request: GenerationRequest,
        choices: Sequence[ChoiceOutputProcessor],
        logprob_decoder: LogprobDecoder,
        *,
        num_prompt_logprobs: int | None = None,
        echo: str | None = None,
        num_echo_logprobs: int | None = None,
        kv_bits: int | None = None,
    ) -> None:
        self.request = request
        self.choices = choices
        self.kv_bits = kv_bits
        self.num_cached_tokens = 0
        self.num_drafted_tokens = 0
        self.num_accepted_tokens = 0
        self.sparse: SparseUsage | None = None
        self.times: OutputTimes | None = None
        self._logprob_decoder = logprob_decoder
        self._num_prompt_logprobs = num_prompt_logprobs
        self._echo = echo
        self._num_echo_logprobs = num_echo_logprobs
        self._has_begun = False
        self._num_open = len(choices)
        self._num_open_in_engine = len(choices)

    @property
    def is_over(self) -> bool:
        return self._num_open == 0

    @property
    def is_over_in_engine(self) -> bool:
        return self._num_open_in_engine == 0

    def push(self, output: TokenOutput) -> list[Event]:
        """Events of one engine output; their usage is this prompt's.

        Ignores output of a choice that has already ended (the engine does not know stop strings).
        """
        if output.num_processed is not None:
            return [self._progress(output, output.num_processed)]
        self._num_open_in_engine -= output.finish_reason is not None
        self.num_cached_tokens = output.num_cached_tokens or self.num_cached_tokens
        self.num_drafted_tokens += output.num_drafted
        self.num_accepted_tokens += output.num_accepted
        self.sparse = self.sparse or output.sparse
        events: list[Event] = [] if self._has_begun else self._begin(output)
        choice = self.choices[output.choice]
        if choice.reason is None:
            self.times = output.times or self.times
            events += choice.push(output)
            if choice.reason is not None:
                events.append(self._finished(choice))
        return events

    def _progress(self, output: TokenOutput, num_processed: int) -> PrefillProgress:
        num_tokens, num_cached = len(self.request.prompt), output.num_cached_tokens
        seconds = 0.0 if output.times is None else output.times.last_s - output.times.began_s
        return PrefillProgress(self.choices[0].choice, num_tokens, num_cached, num_processed, seconds)

    def _begin(self, output: TokenOutput) -> list[Event]:
        self._has_begun = True
        events: list[Event] = []
        logprobs: tuple[DecodedLogprob, ...] = ()
        if output.prompt_logprobs is not None:
            logprobs = self._logprob_decoder.decode_prompt(self.request.prompt, output.prompt_logprobs)
        if self._num_prompt_logprobs is not None:
            events.append(DecodedPromptLogprobs(self.choices[0].choice, _cut_top(logprobs, self._num_prompt_logprobs)))
        if self._echo is not None:
            logprobs = () if self._num_echo_logprobs is None else _cut_top(logprobs, self._num_echo_logprobs)
            for choice in self.choices:
                events += choice.echo_events(self._echo, logprobs)
        return events

    def _finished(self, choice: ChoiceOutputProcessor) -> Finished:
        assert choice.reason is not None
        self._num_open -= 1
        return Finished(choice.reason, usage_of((self,)), choice.choice, choice.rest_of_logprobs(), choice.stop_string)


def usage_of(prompts: Sequence[PromptOutputProcessor]) -> Usage:
    """Token counts of a request so far; each prompt counts once."""
    choices = [choice for prompt in prompts for choice in prompt.choices]
    times = [prompt.times for prompt in prompts if prompt.times is not None]
    first_s = [each.first_s for each in times]
    began_s, last_s = [each.began_s for each in times], [each.last_s for each in times]
    return Usage(
        num_prompt_tokens=sum(len(prompt.request.prompt) for prompt in prompts),
        num_output_tokens=sum(choice.num_tokens for choice in choices),
        num_cached_tokens=sum(prompt.num_cached_tokens for prompt in prompts),
        num_drafted_tokens=sum(prompt.num_drafted_tokens for prompt in prompts),
        num_accepted_tokens=sum(prompt.num_accepted_tokens for prompt in prompts),
        num_reasoning_tokens=sum(choice.num_reasoning_tokens for choice in choices),
        route=Route.MEDIA if any(prompt.request.route is Route.MEDIA for prompt in prompts) else Route.TEXT,
        sparse=_sparse_usage([prompt.sparse for prompt in prompts if prompt.sparse is not None]),
        kv_bits=next((prompt.kv_bits for prompt in prompts), None),
        prompt_s=max(first_s) - min(began_s) if times else 0.0,
        output_s=max(last_s) - min(first_s) if times else 0.0,
        times=OutputTimes(min(began_s), max(first_s), max(last_s)) if times else None,
    )


def _sparse_usage(parts: Sequence[SparseUsage]) -> SparseUsage | None:
    if not parts:
        return None
    reasons = dict.fromkeys(reason for part in parts for reason in part.bypasses)
    return SparseUsage(sum(part.num_kept for part in parts), sum(part.num_dropped for part in parts), tuple(reasons))


def _cut_top(logprobs: Sequence[DecodedLogprob], num_top: int) -> tuple[DecodedLogprob, ...]:
    return tuple(replace(token, top=token.top[:num_top]) for token in logprobs)
