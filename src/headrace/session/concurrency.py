"""Several streams as one, and limits on how much work waits and runs at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar

from headrace.cancellation import run_in_pool, run_in_thread
from headrace.engine.engine import Engine, OutputStream
from headrace.errors import Overloaded
from headrace.long_work import run_exclusively
from headrace.text.encoder import LONG_TEXT
from headrace.types.request import GenerationRequest

Item = TypeVar("Item")
Yielded = TypeVar("Yielded", covariant=True)


class ItemStream(AsyncIterable[Yielded], Protocol):
    def __anext__(self) -> Awaitable[Yielded]: ...

    def aclose(self) -> Awaitable[object]: ...


def merge_streams(streams: Sequence[ItemStream[Item]]) -> ItemStream[Item]:
    """The items of all streams as they come, those of each in order. Closing it closes them.

    The first error of a stream ends everything.
    """
    return streams[0] if len(streams) == 1 else _merge_streams(streams)


async def _merge_streams(streams: Sequence[ItemStream[Item]]) -> AsyncGenerator[Item, None]:
    pending: dict[asyncio.Task[Item], ItemStream[Item]] = {}
    try:
        pending = {_next(stream): stream for stream in streams}
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream = pending.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                yield item  # may end the stream
                pending[_next(stream)] = stream
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


def _next(stream: ItemStream[Item]) -> asyncio.Task[Item]:
    async def step() -> Item:
        return await anext(stream)

    return asyncio.ensure_future(step())


async def submit_all(
    engine: Engine, requests: Sequence[GenerationRequest], open_streams: AsyncExitStack
) -> list[OutputStream]:
    """Submit all requests at once, so that the engine accepts them together between two steps.

    Accepted ones are closed with `open_streams`, even if others are refused.
    """
    submitting = [asyncio.ensure_future(engine.submit(request)) for request in requests]
    try:
        await asyncio.wait(submitting)
    finally:
        for task in submitting:
            task.cancel()
        settled = await asyncio.gather(*submitting, return_exceptions=True)
        for each in settled:
            if not isinstance(each, BaseException):
                open_streams.push_async_callback(each.aclose)
    return [task.result() for task in submitting]


Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")

MAX_CALLS = 128
"""Waiting and running ones."""


class BoundedExecutor:
    """Runs a limited number of calls at once, in its own threads. Belongs to one event loop.

    name: of the threads. refusal: message for calls beyond MAX_CALLS; None to let any number wait.
    """

    def __init__(self, num_threads: int, name: str, refusal: str | None = None) -> None:
        self._free = asyncio.Semaphore(num_threads)
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._refusal = refusal
        self._num_calls = 0
        self._started: set[asyncio.Task[Any]] = set()

    async def run(
        self, function: Callable[..., Result], *args: object, unless: Callable[[], Result | None] = lambda: None
    ) -> Result:
        """The function's result, or what `unless` gives once a thread is free. Raises Overloaded."""
        if self._refusal is not None and self._is_full:
            raise Overloaded(self._refusal, retry_after_s=10)
        self._num_calls += 1
        try:
            async with self._free:
                known = unless()
                return await run_in_pool(self._threads, function, *args) if known is None else known
        finally:
            self._num_calls -= 1

    def start_in_background(self, function: Callable[..., object], *args: object) -> bool:
        """Run a function in the background. Returns False if there are too many calls."""
        if self._is_full:
            return False
        task = asyncio.create_task(self.run(function, *args))
        self._started.add(task)
        task.add_done_callback(self._started.discard)
        return True

    def close(self) -> None:
        """No call may be in progress or come later."""
        self._threads.shutdown(wait=False)

    @property
    def _is_full(self) -> bool:
        return self._num_calls >= MAX_CALLS


_SHORT_TEXT = 32 * 1024
"""Characters up to which a prompt takes a few milliseconds to render; longer ones are rendered one at a time."""

# While one is rendered others may be encoded; the longest are encoded in helper processes and wait for these.
_NUM_LONG_PROMPTS = 16
_NUM_LONGEST_PROMPTS = 4


class TextExecutor:
    """Runs work on texts in threads: rendering and encoding a long one takes up to a second."""

    def __init__(self) -> None:
        self._long = BoundedExecutor(_NUM_LONG_PROMPTS, "long-prompt")
        self._longest = BoundedExecutor(_NUM_LONGEST_PROMPTS, "longest-prompt")

    def close(self) -> None:
        self._long.close()
        self._longest.close()

    async def run(
        self,
        texts: Sequence[str],
        work: Callable[Arguments, Result],
        /,
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Run work on texts in a thread, which ends soon after the caller is cancelled."""
        num_chars = sum(map(len, texts))
        if num_chars <= _SHORT_TEXT:
            return await run_in_thread(work, *args, **kwargs)
        executor = self._long if num_chars <= LONG_TEXT else self._longest
        return await executor.run(partial(run_exclusively, work, *args, **kwargs))
