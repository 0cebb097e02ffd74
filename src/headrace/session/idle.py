"""Computes finished turns while the server is idle, as the next prompt will render them.

A template may render an earlier answer differently from the model's output (without its thinking). The state of that
output is then useless for the next turn, which would have to compute the answer again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

from headrace.common_prefix import common_length
from headrace.engine.engine import Engine
from headrace.errors import HeadraceError
from headrace.text.template import PromptPrefix
from headrace.types.chat import ChatMessage, ChatRequest
from headrace.types.request import IDLE_PRIORITY, GenerationRequest

log = logging.getLogger("headrace.session")

SESSION = "idle"
"""The session name of this work."""

PAUSE_S = 0.25
"""An agent's next request comes at once, and its rendering should not have to share the processor with this work."""

_MAX_WAITING = 8


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """A chat's request, its answer as the client will send it back, and the engine's request and output.

    output: token ids of the answer, without a final stop token.
    """

    request: ChatRequest
    answer: ChatMessage
    generation: GenerationRequest
    output: tuple[int, ...]


class IdleTurns:
    """Finished turns waiting for an idle moment, latest first; the oldest are dropped.

    render: how a request and its answer begin the next prompt.
    """

    def __init__(self, engine: Engine, render: Callable[[ChatRequest, ChatMessage], Awaitable[PromptPrefix]]) -> None:
        self._engine = engine
        self._render = render
        self._waiting: deque[FinishedTurn] = deque(maxlen=_MAX_WAITING)
        self._num_busy = 0
        self._work: asyncio.Task[None] | None = None

    def add(self, turn: FinishedTurn) -> None:
        """Add a turn; earlier ones of the same conversation are dropped."""
        for earlier in list(self._waiting):
            messages = earlier.request.messages
            if turn.request.messages[: len(messages)] == messages:
                self._waiting.remove(earlier)
        self._waiting.append(turn)

    @asynccontextmanager
    async def paused(self) -> AsyncGenerator[None, None]:
        """While inside, nothing is prepared; work in progress is aborted."""
        self._num_busy += 1
        try:
            await self._cancel()
            yield
        finally:
            self._num_busy -= 1
        # Not after an error or a cancellation: the event loop may be about to close.
        if self._num_busy == 0 and self._waiting:
            self._work = asyncio.create_task(self._prepare_all())

    async def close(self) -> None:
        self._waiting.clear()
        await self._cancel()

    async def _cancel(self) -> None:
        work, self._work = self._work, None
        if work is not None and not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _prepare_all(self) -> None:
        await asyncio.sleep(PAUSE_S)
        while self._waiting:
            turn = self._waiting.pop()
            try:
                await self._prepare(turn)
            except HeadraceError as error:  # only the next turn becomes slower
                log.debug("%s is not prepared for its next turn: %s", turn.generation.request_id, error)

    async def _prepare(self, turn: FinishedTurn) -> None:
        head = await self._render(turn.request, turn.answer)
        held = (*turn.generation.prompt, *turn.output)
        num_held = common_length(head.token_ids, held)
        if num_held >= min(len(head.token_ids), len(held)):
            return
        request = replace(
            turn.generation,
            request_id=f"{turn.generation.request_id}-next",
            prompt=head.token_ids,
            max_tokens=0,
            boundaries=head.boundaries,
            num_choices=1,
            num_logprobs=None,
            num_prompt_logprobs=None,
            constraint=None,
            sparse_options=None,
            session=SESSION,
            priority=IDLE_PRIORITY,
        )
        async with aclosing(await self._engine.submit(request)) as outputs:
            async for _ in outputs:
                pass
        log.debug("%s: tokens %d to %d are prepared", request.request_id, num_held, len(request.prompt))
