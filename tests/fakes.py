"""Stand-ins for tests of the rooms above the wall: no arrays, no model files, no clock."""

from __future__ import annotations

import asyncio
import codecs
import dataclasses
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from starlette.applications import Starlette

from headrace.config import ServerConfig
from headrace.engine.host import ThisProcess
from headrace.errors import EngineDead, RequestCancelled
from headrace.families.family import ModelFamily
from headrace.families.registry import find_family
from headrace.server.app import build_app
from headrace.session.models import Models
from headrace.session.session import Session
from headrace.text.template import PromptPrefix, RenderedPrompt
from headrace.types.chat import ChatMessage, ChatRequest, GenerationOptions, TextPart
from headrace.types.events import FinishReason, Forecast, TokenLogprobs, TokenOutput
from headrace.types.media import Route
from headrace.types.memory import ModelMemory
from headrace.types.model import ModelDescription, TokenIds
from headrace.types.request import GenerationRequest
from headrace.types.status import (
    CacheStatus,
    Counters,
    DraftCounters,
    EngineStatus,
    Histogram,
    MemoryStatus,
    Phase,
    RequestStatus,
    WarmUpStatus,
)

END = 256
"""Token id that ends an answer; ids below it are bytes."""

BEGIN = 257
"""Token id that begins a document."""

_SPECIAL = {END: "<end>", BEGIN: "<begin>"}

THINKING_TEMPLATE = "{% if enable_thinking %}<think>\n{% endif %}{{ '</think>' }}"


class ByteTokenizer:
    """One token a byte, END, and BEGIN, which stands before every document."""

    token_ids = TokenIds(258)
    eos_token_id = END
    special_ids = frozenset(_SPECIAL)
    added_tokens = MappingProxyType({text: token_id for token_id, text in _SPECIAL.items()})
    chat_template = THINKING_TEMPLATE
    template_variables = MappingProxyType({"bos_token": "<begin>", "eos_token": "<end>"})

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_document(self, text: str) -> list[int]:
        return [BEGIN, *text.encode()]

    def least_num_tokens(self, texts: Iterable[str]) -> int:
        # As if a token could be eight bytes long: the bound of a real vocabulary is far from the truth too.
        return -(-sum(len(text.encode()) for text in texts) // 8)

    def decode_all(self, token_ids: Sequence[int]) -> str:
        texts = [bytes([each]) if each < END else _SPECIAL[each].encode() for each in token_ids]
        return b"".join(texts).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes | None:
        return bytes([token_id]) if token_id < END else None

    def token_text(self, token_id: int) -> str:
        return bytes([token_id]).decode(errors="replace") if token_id < END else _SPECIAL.get(token_id, "")

    def detokenizer(self, keep_special: frozenset[str] = frozenset()) -> ByteDetokenizer:
        return ByteDetokenizer()


class ByteDetokenizer:
    """Bytes to text as soon as a character is whole."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def follow_prompt(self, token_ids: Sequence[int]) -> None:
        self.push(token_ids)

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self.push_token(token_id) for token_id in token_ids])

    def push_token(self, token_id: int) -> str:
        return self._decoder.decode(bytes([token_id])) if token_id < END else ""

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class PlainTemplate:
    """Every message as `role: text`, a line each; raises what it is told to."""

    exists = True

    def __init__(self, *, thinking_open: bool = False, error: Exception | None = None) -> None:
        self.requests: list[ChatRequest] = []
        self._thinking_open = thinking_open
        self._error = error

    def render(
        self, request: ChatRequest, *, max_model_len: int | None = None, finds_boundaries: bool = True
    ) -> RenderedPrompt:
        self.requests.append(request)
        if self._error is not None:
            raise self._error
        lines = []
        for message in request.messages:
            text = "".join(part.text for part in message.content if isinstance(part, TextPart))
            lines.append(f"{message.role}: {text}\n")
        rendered = "".join(lines)
        return RenderedPrompt(
            token_ids=tuple(rendered.encode()), boundaries=(), thinking_open=self._thinking_open, text=rendered
        )

    def render_answered(self, request: ChatRequest, answer: ChatMessage) -> PromptPrefix:
        prompt = self.render(replace(request, messages=(*request.messages, answer)))
        return PromptPrefix(prompt.token_ids, prompt.boundaries)


Step = Sequence[int] | Exception | asyncio.Event | str
"""What a fake engine does next: give tokens (text is its bytes), raise, or wait until an event is set."""


def fake_logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities that tell which token they belong to; the alternatives are the ids that follow it."""
    top = tuple((token_id + index, -(token_id + index) / 64) for index in range(num_top))
    return TokenLogprobs(token_id, -token_id / 64, rank=token_id + 1, top=top)


class FakeStream:
    """Outputs of one request; ends early when it is closed, finished or cancelled."""

    def __init__(self, engine: FakeEngine, request: GenerationRequest) -> None:
        self.request = request
        self.is_over = False
        self._engine = engine
        self._outputs = engine.play(request)
        self._num_open = request.num_choices
        self._cancelled = asyncio.get_running_loop().create_future()

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> TokenOutput:
        if self.is_over:
            raise StopAsyncIteration
        step = asyncio.ensure_future(self._next())
        try:
            await asyncio.wait({step, self._cancelled}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            step.cancel()
            await asyncio.gather(step, return_exceptions=True)
        if self.is_cancelled:
            self.is_over = True
            raise RequestCancelled(f"request {self.request.request_id} was cancelled")
        output = step.result()
        if isinstance(output, Exception):
            self.is_over = True
            raise output
        self._num_open -= output.finish_reason is not None
        self.is_over = self._num_open == 0
        return output

    async def _next(self) -> TokenOutput | Exception:
        try:
            return await anext(self._outputs)
        except Exception as error:
            return error

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.done()

    def cancel(self) -> None:
        self._cancelled.set_result(None)

    def finish(self, reason: FinishReason) -> None:
        self.is_over = True
        self._engine.finished.append((self.request.request_id, reason))

    async def aclose(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._engine.aborted.append(self.request.request_id)
            self._engine.on_abort()
        await self._outputs.aclose()


class FakeProcess(ThisProcess):
    """Stands for the engines' process."""

    def close(self) -> None:
        pass


class FakeEngine:
    """Plays a script for every choice of every request, one step an output, within max_tokens and stop ids.

    requests: all that were made. aborted: ids of those that were closed before their end; finished: ids and reasons
    of those that their reader ended; cancelled: ids that abort() ended. refusal: what every request is refused with.
    wait_s: what a forecast says. num_forecasts: how often one was asked for.
    """

    def __init__(self, *script: Step, model: ModelDescription | None = None, num_cached_tokens: int = 0) -> None:
        self.model = model or describe()
        self.requests: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.finished: list[tuple[str, FinishReason]] = []
        self.cancelled: list[str] = []
        self.refusal: Exception | None = None
        self.wait_s: float | None = None
        self.num_forecasts = 0
        self.sick: str | None = None
        self.warmth = WarmUpStatus()
        self.held: CacheStatus | None = None
        self.stopped = False
        self.memory = ModelMemory(weights_bytes=500, least_bytes=100, most_bytes=10_000)
        self.budget_bytes = 0
        self.on_start: Callable[[], None] = lambda: None
        self.on_abort: Callable[[], None] = lambda: None
        self._script = script
        self._num_cached_tokens = num_cached_tokens
        self._streams: list[FakeStream] = []

    def health(self) -> str | None:
        return self.sick

    def warm_up_status(self) -> WarmUpStatus:
        return self.warmth

    async def set_budget(self, num_bytes: int) -> int:
        self.budget_bytes = num_bytes
        return num_bytes

    def stop(self, timeout_s: float | None = None) -> bool:
        self.stopped = True
        return True

    async def submit(self, request: GenerationRequest) -> FakeStream:
        await asyncio.sleep(0)
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        self._streams.append(FakeStream(self, request))
        self.on_start()
        return self._streams[-1]

    async def forecast(self, requests: Sequence[GenerationRequest]) -> Forecast:
        self.num_forecasts += 1
        lengths = [len(request.prompt) for request in requests]
        return Forecast(sum(lengths), max(lengths) - self._num_cached_tokens, self.wait_s)

    async def abort(self, request_id: str) -> bool:
        found = [stream for stream in self._live() if stream.request.request_id == request_id]
        for stream in found:
            stream.cancel()
            self.cancelled.append(request_id)
        return bool(found)

    def _refuse_if_dead(self) -> None:
        if self.sick is not None:
            raise EngineDead(f"the engine is not running: {self.sick}")

    async def status(self) -> EngineStatus:
        self._refuse_if_dead()
        histogram = Histogram((1.0,), (0, 0), 0.0)
        return EngineStatus(
            num_running=len(self._live()),
            num_waiting=0,
            requests=tuple(_status_of(stream.request) for stream in self._live()),
            memory=MemoryStatus(1000, 500, 20, 10, 0, 5, 0, 515, 0),
            counters=Counters(1, 2, 3, 0, 4, (("stop", 1),), DraftCounters(), *[histogram] * 4, ((Route.TEXT, 1),)),
            cache=self.held,
            warm_up=self.warmth,
        )

    async def clear_cache(self) -> int:
        self._refuse_if_dead()
        freed, self.held = self.held.num_bytes if self.held is not None else 0, None
        return freed

    def _live(self) -> list[FakeStream]:
        return [stream for stream in self._streams if not (stream.is_over or stream.is_cancelled)]

    async def play(self, request: GenerationRequest) -> AsyncGenerator[TokenOutput, None]:
        rooms = dict.fromkeys(range(request.num_choices), request.max_tokens)
        told = request.num_prompt_logprobs
        prompt = None if told is None else (None, *(fake_logprobs(token_id, told) for token_id in request.prompt[1:]))
        script = self._script if request.max_tokens else ()
        for step in (*script, None):
            await asyncio.sleep(0)
            if isinstance(step, Exception):
                raise step
            if isinstance(step, asyncio.Event):
                await step.wait()
                continue
            for choice, room in list(rooms.items()):
                token_ids, reason, stop = _end(step, request, room)
                rooms[choice] -= len(token_ids)
                if reason is not None:
                    del rooms[choice]
                sampled = token_ids if stop is None else (*token_ids, stop)
                scores = _scores(sampled, request.num_logprobs)
                cached, prompt_scores, prompt = self._num_cached_tokens, prompt, None
                yield TokenOutput(
                    request.request_id, token_ids, reason, cached, choice, scores, prompt_scores, stop_token_id=stop
                )


def _end(
    step: Sequence[int] | str | None, request: GenerationRequest, room: int
) -> tuple[tuple[int, ...], FinishReason | None, int | None]:
    """Tokens of a step, why they end the answer, and the stop token that does."""
    if step is None:
        return (), FinishReason.STOP if request.max_tokens else FinishReason.LENGTH, None
    return _cut(step.encode() if isinstance(step, str) else step, request, room)


def _scores(token_ids: Iterable[int], num_logprobs: int | None) -> tuple[TokenLogprobs, ...]:
    if num_logprobs is None:
        return ()
    return tuple(fake_logprobs(token_id, num_logprobs) for token_id in token_ids)


def _status_of(request: GenerationRequest) -> RequestStatus:
    num_prompt_tokens = len(request.prompt)
    return RequestStatus(
        request.request_id, Phase.DECODE, num_prompt_tokens, num_prompt_tokens, 0, 1, 0.0, 0.5, request.session,
        request.priority,
    )  # fmt: skip


def _cut(
    token_ids: Iterable[int], request: GenerationRequest, room: int
) -> tuple[tuple[int, ...], FinishReason | None, int | None]:
    taken: list[int] = []
    for token_id in token_ids:
        if token_id in request.stop_token_ids:
            return tuple(taken), FinishReason.STOP, token_id
        taken.append(token_id)
        if len(taken) == room:
            return tuple(taken), FinishReason.LENGTH, None
    return tuple(taken), None, None


def describe(
    name: str = "fake-model", *, max_model_len: int = 1000, generation_config: Mapping[str, Any] | None = None
) -> ModelDescription:
    """A model that is nowhere on disk."""
    return ModelDescription(
        name=name,
        directory=Path("nowhere"),
        model_type="fake",
        config={},
        text_config={},
        generation_config=generation_config or {},
        max_model_len=max_model_len,
        tokens=ByteTokenizer.token_ids,
        eos_token_ids=(END,),
    )


def in_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a request, those of GenerationOptions gathered in `options`."""
    names = {each.name for each in dataclasses.fields(GenerationOptions)}
    options = {name: value for name, value in fields.items() if name in names}
    others = {name: value for name, value in fields.items() if name not in names}
    return {**others, "options": GenerationOptions(**options)}


def thinking_family() -> ModelFamily:
    """A family with `<think>` and `</think>`."""
    return find_family("fake", THINKING_TEMPLATE)


def fake_session(engine: FakeEngine, template: PlainTemplate | None = None, *, prepares_turns: bool = False) -> Session:
    """A session over a fake engine; text and tokens are bytes of each other."""
    words = ByteTokenizer(), template or PlainTemplate(), thinking_family()
    return Session(engine, *words, prepares_turns=prepares_turns)


def models_of(session: Session, config: ServerConfig | None = None) -> Models:
    """One loaded model, under the configured names or any other."""
    config = config or ServerConfig()
    return Models.of(session, config.served_model_name, takes_any_name=not config.strict_model_name)


def app_over(session: Session, config: ServerConfig | None = None) -> Starlette:
    config = config or ServerConfig()
    return build_app(models_of(session, config), config)
