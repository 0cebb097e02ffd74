"""Stand-ins for tests of the rooms above the wall: no arrays, no model files, no clock."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.families.family import ModelFamily
from headrace.families.registry import find_family
from headrace.session import Session
from headrace.text.template import RenderedPrompt
from headrace.types.chat import ChatRequest, TextPart
from headrace.types.events import FinishReason, TokenOutput
from headrace.types.model import ModelDescription
from headrace.types.request import GenerationRequest

END = 256
"""Token id that ends an answer; ids below it are bytes."""

THINKING_TEMPLATE = "{% if enable_thinking %}<think>\n{% endif %}{{ '</think>' }}"


class ByteTokenizer:
    """One token a byte, and END."""

    vocab_size = 257
    eos_token_id = END
    chat_template = THINKING_TEMPLATE

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def detokenizer(self, keep_special: frozenset[str] = frozenset()) -> ByteDetokenizer:
        return ByteDetokenizer()


class ByteDetokenizer:
    """Bytes to text as soon as a character is whole."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(bytes(token_id for token_id in token_ids if token_id < END))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class PlainTemplate:
    """Every message as `role: text`, a line each; raises what it is told to."""

    def __init__(self, *, thinking_open: bool = False, error: Exception | None = None) -> None:
        self.requests: list[ChatRequest] = []
        self._thinking_open = thinking_open
        self._error = error

    def render(self, request: ChatRequest) -> RenderedPrompt:
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


Step = Sequence[int] | Exception | asyncio.Event | str
"""What a fake engine does next: give tokens (text is its bytes), raise, or wait until an event is set."""


class FakeEngine:
    """Plays a script for every request, one step an output, within the request's max_tokens and stop ids.

    requests: all that were made. aborted: ids of those that were closed before their end.
    """

    def __init__(self, *script: Step, model: ModelDescription | None = None, num_cached_tokens: int = 0) -> None:
        self.model = model or describe()
        self.requests: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.sick: str | None = None
        self.stopped = False
        self.on_start: Callable[[], None] = lambda: None
        self.on_abort: Callable[[], None] = lambda: None
        self._script = script
        self._num_cached_tokens = num_cached_tokens

    def health(self) -> str | None:
        return self.sick

    def stop(self) -> None:
        self.stopped = True

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenOutput, None]:
        self.requests.append(request)
        self.on_start()
        ended = False
        try:
            async for token_ids, reason in self._steps(request):
                ended = reason is not None
                yield TokenOutput(request.request_id, token_ids, reason, self._num_cached_tokens)
                if ended:
                    return
        except Exception:
            ended = True
            raise
        finally:
            if not ended:
                self.aborted.append(request.request_id)
                self.on_abort()

    async def _steps(self, request: GenerationRequest) -> AsyncGenerator[tuple[tuple[int, ...], FinishReason | None]]:
        room = request.max_tokens
        for step in self._script:
            await asyncio.sleep(0)
            if isinstance(step, Exception):
                raise step
            if isinstance(step, asyncio.Event):
                await step.wait()
                continue
            token_ids, reason = _cut(step.encode() if isinstance(step, str) else step, request, room)
            room -= len(token_ids)
            yield token_ids, reason
        yield (), FinishReason.STOP


def _cut(
    token_ids: Iterable[int], request: GenerationRequest, room: int
) -> tuple[tuple[int, ...], FinishReason | None]:
    taken: list[int] = []
    for token_id in token_ids:
        if token_id in request.stop_token_ids:
            return tuple(taken), FinishReason.STOP
        taken.append(token_id)
        if len(taken) == room:
            return tuple(taken), FinishReason.LENGTH
    return tuple(taken), None


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
        vocab_size=ByteTokenizer.vocab_size,
        eos_token_ids=(END,),
    )


def thinking_family() -> ModelFamily:
    """A family with `<think>` and `</think>`."""
    return find_family("fake", THINKING_TEMPLATE)


def fake_session(engine: FakeEngine, template: PlainTemplate | None = None) -> Session:
    """A session over a fake engine; text and tokens are bytes of each other."""
    return Session(engine, ByteTokenizer(), template or PlainTemplate(), thinking_family())
