"""While nobody asks for anything: compute finished turns as the next prompt will show them.

A template may show an answer otherwise than the model wrote it (without its thinking). What the engine holds of the
answer is then of no use to the next turn, and the answer would be computed again while somebody waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

from headrace.errors import HeadraceError
from headrace.session.source import TokenSource
from headrace.text.boundaries import common_length
from headrace.text.template import PromptHead
from headrace.types.chat import ChatMessage, ChatRequest
from headrace.types.request import IDLE_PRIORITY, GenerationRequest

log = logging.getLogger("headrace.session")

SESSION = "idle"
"""Whose turn this work is."""

PAUSE_S = 0.25
"""An agent's next request comes at once: its rendering should not have to share the processor with ours."""

_MAX_WAITING = 8


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """A chat's request, the answer as its client will send it back, and what the engine worked with.

    output: token ids of the answer, without the one that ended it.
    """

    request: ChatRequest
    answer: ChatMessage
    generation: GenerationRequest
    output: tuple[int, ...]


class IdleTurns:
    """Finished turns that wait for a quiet moment, the latest first; of many, the oldest are forgotten.

    render: how a request and its answer begin the next prompt; called in a thread.
    """

    def __init__(self, engine: TokenSource, render: Callable[[ChatRequest, ChatMessage], PromptHead]) -> None:
        self._engine = engine
        self._render = render
        self._waiting: deque[FinishedTurn] = deque(maxlen=_MAX_WAITING)
        self._num_busy = 0
        self._work: asyncio.Task[None] | None = None

    def add(self, turn: FinishedTurn) -> None:
        """A turn has finished; the same conversation's earlier ones are of no more use."""
        for earlier in list(self._waiting):
            messages = earlier.request.messages
            if turn.request.messages[: len(messages)] == messages:
                self._waiting.remove(earlier)
        self._waiting.append(turn)

    @asynccontextmanager
    async def put_off(self) -> AsyncGenerator[None, None]:
        """Nothing is prepared while somebody is inside; what was in progress is given up."""
        self._num_busy += 1
        try:
            await self._give_up()
            yield
        finally:
            self._num_busy -= 1
        # Not after an error or a cancellation: the event loop may be about to end.
        if self._num_busy == 0 and self._waiting:
            self._work = asyncio.create_task(self._prepare_all())

    async def _give_up(self) -> None:
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
            except HeadraceError as error:  # nobody waits for it: the next turn is slower, that's all
                log.debug("%s is not prepared for its next turn: %s", turn.generation.request_id, error)

    async def _prepare(self, turn: FinishedTurn) -> None:
        head = await asyncio.to_thread(self._render, turn.request, turn.answer)
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
            thinning=None,
            session=SESSION,
            priority=IDLE_PRIORITY,
        )
        async with aclosing(await self._engine.submit(request)) as outputs:
            async for _ in outputs:
                pass
        log.debug("%s: tokens %d to %d are prepared", request.request_id, num_held, len(request.prompt))
