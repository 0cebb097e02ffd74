"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.session.concurrency import merge_streams


class Source:
    """A stream that waits a number of turns of the event loop before each item."""

    def __init__(self, name: int, waits: Sequence[int], error: Exception | None = None) -> None:
        self.closed = False
        self._name = name
        self._waits = waits
        self._error = error

    async def stream(self) -> AsyncGenerator[tuple[int, int], None]:
        try:
            for index, num_turns in enumerate(self._waits):
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                yield self._name, index
            if self._error is not None:
                raise self._error
        finally:
            self.closed = True


async def collect(sources: Sequence[Source]) -> list[tuple[int, int]]:
    return [item async for item in merge_streams([source.stream() for source in sources])]


@given(st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=4))
@settings(max_examples=60, deadline=None)
def test_all_items_come_once_and_those_of_a_stream_in_order(waits: list[list[int]]) -> None:
    sources = [Source(name, each) for name, each in enumerate(waits)]
    items = asyncio.run(collect(sources))
    assert len(items) == sum(map(len, waits))
    for name, each in enumerate(waits):
        assert [index for owner, index in items if owner == name] == list(range(len(each)))
    assert all(source.closed for source in sources)


def test_a_slow_stream_holds_up_no_other() -> None:
    items = asyncio.run(collect([Source(0, [50]), Source(1, [0, 0, 0])]))
    assert items == [(1, 0), (1, 1), (1, 2), (0, 0)]


@pytest.mark.parametrize("num_others", [0, 2])
def test_an_error_of_one_ends_all(num_others: int) -> None:
    broken = Source(0, [0], ValueError("broken"))
    others = [Source(name, [1] * 50) for name in range(1, 1 + num_others)]
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(collect([broken, *others]))
    assert all(source.closed for source in others)


@pytest.mark.parametrize("num_streams", [1, 3])
def test_closing_it_closes_every_stream_that_has_begun(num_streams: int) -> None:
    sources = [Source(name, [0, 10_000]) for name in range(num_streams)]

    async def leave() -> None:
        merged = merge_streams([source.stream() for source in sources])
        await anext(merged)
        await merged.aclose()

    asyncio.run(leave())
    assert all(source.closed for source in sources)


class EndlessStream:
    """Gives one item; after that a reader waits, unless the stream was ended before."""

    def __init__(self) -> None:
        self.is_over = False
        self._has_given = False

    def __aiter__(self) -> EndlessStream:
        return self

    async def __anext__(self) -> int:
        if self.is_over:
            raise StopAsyncIteration
        if self._has_given:
            await asyncio.Event().wait()
        self._has_given = True
        return 1

    async def aclose(self) -> None:
        self.is_over = True


@pytest.mark.parametrize("num_streams", [1, 3])
def test_a_reader_may_end_the_stream_that_an_item_comes_from(num_streams: int) -> None:
    streams = [EndlessStream() for _ in range(num_streams)]

    async def read() -> int:
        num_items = 0
        async with aclosing(merge_streams(streams)) as items:
            async for item in items:
                num_items += item
                streams[num_items - 1].is_over = True
        return num_items

    assert asyncio.run(asyncio.wait_for(read(), 60)) == num_streams
