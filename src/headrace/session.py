"""One chat request from end to end, without HTTP.

    ChatRequest → render → GenerationRequest → engine → token ids → text → events

The engine sees token ids only and the APIs see events only; everything between them is here. Defaults are merged
in this order, the later one winning: neutral values, the model's generation_config.json, the request.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

from headrace.errors import ContextTooLong, EngineDead, GenerationFailed, InvalidRequest, ModelError
from headrace.families.family import ModelFamily
from headrace.families.registry import explain, find_family
from headrace.text.detokenize import Detokenizer
from headrace.text.stream_parser import StreamParser
from headrace.text.template import ChatTemplate, RenderedPrompt
from headrace.text.tokenizer import Tokenizer
from headrace.types.chat import ChatRequest, RequestedSampling, RequestedStop
from headrace.types.events import Event, Finished, FinishReason, Reasoning, Started, Text, TokenOutput, Usage
from headrace.types.model import ModelDescription
from headrace.types.request import GenerationRequest, SamplingParams

# Penalties that a generation_config.json may ask for and that are not built; the value that means "off".
_UNBUILT_DEFAULTS = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}

_LARGEST_SEED = 2**63 - 1


class TokenSource(Protocol):
    """What a session needs of an engine."""

    @property
    def model(self) -> ModelDescription:
        """The loaded model, as data."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenOutput, None]:
        """Outputs of one request. Closing the generator, or cancelling its task, aborts the request."""

    def health(self) -> str | None:
        """None while all is well, else what is wrong."""


class Session:
    """Serves chat requests with one engine. Holds no state of any request."""

    def __init__(self, engine: TokenSource, tokenizer: Tokenizer, template: ChatTemplate, family: ModelFamily) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._template = template
        self._family = family
        self._defaults = sampling_defaults(engine.model.generation_config)

    @classmethod
    def over(cls, engine: TokenSource) -> Session:
        """A session with the tokenizer and the template that lie in the model's folder. Raises ModelError."""
        tokenizer = Tokenizer.load(engine.model.directory)
        family = find_family(engine.model.model_type, tokenizer.chat_template)
        return cls(engine, tokenizer, ChatTemplate(tokenizer, family), family)

    @property
    def model(self) -> ModelDescription:
        """The loaded model, as data."""
        return self._engine.model

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for start-up: how the model's family is served, and what the model asks for and doesn't get."""
        wanted = self.model.generation_config
        unbuilt = tuple(
            f"generation_config.json asks for {name} {wanted[name]}, which is not built: it is not applied"
            for name, neutral in _UNBUILT_DEFAULTS.items()
            if wanted.get(name) not in (None, neutral)
        )
        return (*explain(self._family), *unbuilt)

    def health(self) -> str | None:
        """None while the engine is well, else what is wrong."""
        return self._engine.health()

    async def chat(self, request: ChatRequest) -> AsyncGenerator[Event, None]:
        """Events of one answer: Started, then text and reasoning as they come, then Finished once.

        Closing the generator aborts the request in the engine. Raises RequestError before Started when the request
        can't be served, EngineDead, and GenerationFailed.
        """
        if (reason := self._engine.health()) is not None:
            raise EngineDead(f"the engine is not running: {reason}")
        check_sampling(request.sampling)
        check_stop(request.stop, self.model.vocab_size)
        # A long prompt takes a good part of a second to render and encode; other streams go on meanwhile.
        prompt = await asyncio.to_thread(self._template.render, request)
        if not prompt.token_ids:
            raise InvalidRequest("the messages come to an empty prompt", param="messages")
        generation = self._generation(request, prompt)
        yield Started(len(prompt.token_ids))
        answer = _Answer(
            len(prompt.token_ids),
            self._tokenizer.detokenizer(self._family.keep_special_tokens),
            StreamParser(self._family, thinking_open=prompt.thinking_open, stop_strings=request.stop.strings),
        )
        async with aclosing(self._engine.generate(generation)) as outputs:
            async for output in outputs:
                for event in answer.push(output):
                    yield event
                if answer.reason is not None:
                    break
        if answer.reason is None:
            raise GenerationFailed("the engine ended the answer without a reason")
        yield Finished(answer.reason, answer.usage)

    def _generation(self, request: ChatRequest, prompt: RenderedPrompt) -> GenerationRequest:
        stop_token_ids = frozenset(request.stop.token_ids)
        if not request.stop.ignore_eos:
            # Many a config.json names the end of a document only, and the tokenizer the end of a turn.
            end = self._tokenizer.eos_token_id
            stop_token_ids |= frozenset(self.model.eos_token_ids) | ({end} if end is not None else set())
        return GenerationRequest(
            request_id=request.request_id,
            prompt=prompt.token_ids,
            sampling=resolve_sampling(request.sampling, self._defaults),
            max_tokens=fit_max_tokens(len(prompt.token_ids), request.stop.max_tokens, self.model.max_model_len),
            stop_token_ids=stop_token_ids,
            boundaries=prompt.boundaries,
        )


class _Answer:
    """The way back of one request: token ids to text to events, and what is counted on the way.

    Tokens are taken one by one, so that counts don't depend on how many of them a step delivered. A token whose text
    is held back (a marker, half a character) is counted with the kind of text that comes out after it.
    """

    def __init__(self, num_prompt_tokens: int, detokenizer: Detokenizer, parser: StreamParser) -> None:
        self.reason: FinishReason | None = None
        self.usage = Usage(num_prompt_tokens, 0)
        self._detokenizer = detokenizer
        self._parser = parser
        self._num_undecided = 0

    def push(self, output: TokenOutput) -> tuple[Event, ...]:
        """Events of one output of the engine, neighbours of a kind joined; sets `reason` at the answer's end."""
        return _joined(self._events(output))

    def _events(self, output: TokenOutput) -> Iterator[Event]:
        self.usage = replace(self.usage, num_cached_tokens=output.num_cached_tokens or self.usage.num_cached_tokens)
        for token_id in output.token_ids:
            self.usage = replace(self.usage, num_output_tokens=self.usage.num_output_tokens + 1)
            self._num_undecided += 1
            yield from self._counted(self._parser.push(self._detokenizer.push((token_id,))))
            if self._parser.stopped:
                self.reason = FinishReason.STOP
                return
        if output.finish_reason is None:
            return
        yield from self._counted(self._parser.push(self._detokenizer.finish()))
        yield from self._counted(self._parser.finish())
        self.reason = FinishReason.STOP if self._parser.stopped else output.finish_reason

    def _counted(self, events: tuple[Event, ...]) -> tuple[Event, ...]:
        for event in events:
            if isinstance(event, Reasoning):
                num_reasoning_tokens = self.usage.num_reasoning_tokens + self._num_undecided
                self.usage = replace(self.usage, num_reasoning_tokens=num_reasoning_tokens)
            if isinstance(event, Reasoning | Text):
                self._num_undecided = 0
        return events


def _joined(events: Iterable[Event]) -> tuple[Event, ...]:
    """The same events with as few pieces of text as possible: each becomes a message on the wire."""
    joined: list[Event] = []
    for event in events:
        match joined[-1:], event:
            case [Text(before)], Text(text):
                joined[-1] = Text(before + text)
            case [Reasoning(before)], Reasoning(text):
                joined[-1] = Reasoning(before + text)
            case _:
                joined.append(event)
    return tuple(joined)


def sampling_defaults(generation_config: Mapping[str, Any]) -> RequestedSampling:
    """The model's own sampling out of its generation_config.json. Raises ModelError when a value makes no sense."""
    names = ("temperature", "top_p", "top_k", "min_p")
    defaults = RequestedSampling(**{name: generation_config.get(name) for name in names})
    try:
        check_sampling(defaults)
    except (InvalidRequest, TypeError) as error:
        raise ModelError(f"generation_config.json: {error}") from error
    if generation_config.get("do_sample") is False:
        # Greedy until a request brings a temperature; the other values then hold.
        defaults = replace(defaults, temperature=0.0)
    return defaults


def resolve_sampling(requested: RequestedSampling, defaults: RequestedSampling) -> SamplingParams:
    """The request's values, else the model's, else the neutral ones; without a seed, draws differ each time."""
    seed = secrets.randbits(63) if requested.seed is None else requested.seed & _LARGEST_SEED
    return SamplingParams(
        temperature=_first(requested.temperature, defaults.temperature, 1.0),
        top_p=_first(requested.top_p, defaults.top_p, 1.0),
        # Clients of other servers say "off" with -1.
        top_k=int(max(0, _first(requested.top_k, defaults.top_k, 0))),
        min_p=_first(requested.min_p, defaults.min_p, 0.0),
        seed=seed,
    )


def _first(requested: float | None, default: float | None, neutral: float) -> float:
    if requested is not None:
        return requested
    return neutral if default is None else default


def check_sampling(sampling: RequestedSampling) -> None:
    """Raises InvalidRequest for the first value out of its range."""
    _check("temperature", sampling.temperature, 0.0, 2.0)
    _check("top_p", sampling.top_p, 0.0, 1.0)
    if sampling.top_p == 0:
        raise InvalidRequest("top_p must be in (0, 1], not 0; a temperature of 0 is greedy", param="top_p")
    _check("top_k", sampling.top_k, -1, 2**31 - 1)
    _check("min_p", sampling.min_p, 0.0, 1.0)
    _check("seed", sampling.seed, -(2**63), _LARGEST_SEED)


def check_stop(stop: RequestedStop, vocab_size: int) -> None:
    """Raises InvalidRequest for the first value that can't end anything."""
    if stop.max_tokens is not None and stop.max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, not {stop.max_tokens}", param="max_tokens")
    if not all(stop.strings):
        raise InvalidRequest("stop must not hold an empty string", param="stop")
    for token_id in stop.token_ids:
        if not 0 <= token_id < vocab_size:
            message = f"stop_token_ids must be in [0, {vocab_size}), not {token_id}"
            raise InvalidRequest(message, param="stop_token_ids")


def _check(name: str, value: float | None, low: float, high: float) -> None:
    # The comparison is false for NaN, which is refused like any other value out of range.
    if value is not None and not low <= value <= high:
        raise InvalidRequest(f"{name} must be in [{low}, {high}], not {value}", param=name)


def fit_max_tokens(num_prompt_tokens: int, requested: int | None, max_model_len: int) -> int:
    """How many tokens the answer may have: what was asked, at most what the context leaves.

    Clients ask for far more than the context holds as a matter of course, so that is no error. A prompt that leaves
    no room raises ContextTooLong in the wording that agents act on.
    """
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextTooLong(
            f"This model's maximum context length is {max_model_len} tokens. However, your messages resulted in "
            f"{num_prompt_tokens} tokens. Please reduce the length of the messages.",
            param="messages",
        )
    return room if requested is None else min(requested, room)
