"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


async def interleaved(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """The items of all streams as they come, those of each in order. Closes the streams at the end.

    The first error of a stream ends everything.
    """
    pending: dict[asyncio.Task[Item], AsyncGenerator[Item, None]] = {}
    try:
        if len(streams) == 1:  # the usual case: no task per item
            async for item in streams[0]:
                yield item
            return
        pending = {_next(stream): stream for stream in streams}
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream = pending.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                pending[_next(stream)] = stream
                yield item
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


def _next(stream: AsyncGenerator[Item, None]) -> asyncio.Task[Item]:
    async def step() -> Item:
        return await anext(stream)

    return asyncio.ensure_future(step())
