"""Delivery of outputs from the engine's thread: all of them, in order, in few calls, with pauses for the engine."""

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from headrace.engine.delivery import (
    LONGEST_PAUSE_S,
    Accepted,
    EventLoopReceiver,
    Item,
    OutputQueue,
    deliver,
)
from headrace.engine.engine import OutputStream
from headrace.errors import GenerationFailed
from headrace.types.events import FinishReason, OutputTimes, TokenLogprobs, TokenOutput
from headrace.types.request import GenerationRequest, SamplingParams


class SteppedLoop:
    """An event loop whose callbacks and timers run when the test says so; a callback costs what it adds to `cpu_s`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.cpu_s = 0.0
        self.ready: list[Callable[[], None]] = []
        self.timers: list[tuple[float, Callable[[], None]]] = []
        patch.setattr(time, "thread_time", lambda: self.cpu_s)

    def call_soon(self, callback: Callable[..., None], *given: object) -> None:
        self.ready.append(lambda: callback(*given))

    call_soon_threadsafe = call_soon

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self.timers.append((delay_s, callback))

    def is_closed(self) -> bool:
        return False

    def run_ready(self) -> None:
        while self.ready:
            self.ready.pop(0)()


def output(*token_ids: int, choice: int = 0, finish: FinishReason | None = None) -> TokenOutput:
    return TokenOutput("one", token_ids, finish, choice=choice)


def test_items_that_come_during_a_pause_are_delivered_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = SteppedLoop(monkeypatch)
    taken: list[Item] = []

    def put(item: Item) -> None:
        taken.append(item)
        loop.cpu_s += 0.002

    outputs = OutputQueue(EventLoopReceiver(loop), put, "one")  # type: ignore[arg-type]
    deliver([(outputs, output(1))])
    loop.run_ready()
    assert [(delay_s, taken) for delay_s, _ in loop.timers] == [(0.014, [output(1)])], "seven times the delivery"
    deliver([(outputs, output(2))])
    deliver([(outputs, output(3))])
    loop.run_ready()
    assert taken == [output(1)], "the engine has the interpreter"
    loop.timers.pop()[1]()
    assert taken == [output(1), output(2), output(3)]
    loop.run_ready()
    ((delay_s, resume),) = loop.timers
    assert delay_s == pytest.approx(0.028)
    resume()
    deliver([(outputs, output(4))])
    loop.run_ready()
    assert taken[-1] == output(4), "no pause is left when none is due"


def test_a_long_delivery_has_a_pause_that_readers_hardly_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = SteppedLoop(monkeypatch)

    def put(item: Item) -> None:
        loop.cpu_s += 0.5

    deliver([(OutputQueue(EventLoopReceiver(loop), put, "one"), output(1))])  # type: ignore[arg-type]
    loop.run_ready()
    assert [delay_s for delay_s, _ in loop.timers] == [LONGEST_PAUSE_S]
    assert LONGEST_PAUSE_S <= 0.033, "thirty times a second"


def test_a_short_delivery_has_no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = SteppedLoop(monkeypatch)
    taken: list[Item] = []
    outputs = OutputQueue(EventLoopReceiver(loop), taken.append, "one")  # type: ignore[arg-type]
    for token_id in range(5):
        deliver([(outputs, output(token_id))])
        loop.run_ready()
        assert len(taken) == token_id + 1
    assert not loop.timers


def test_nothing_is_lost_or_reordered_between_threads() -> None:
    async def read() -> list[Item]:
        taken: list[Item] = []
        outputs = OutputQueue(EventLoopReceiver(asyncio.get_running_loop()), taken.append, "one")

        def hand_over() -> None:
            for token_id in range(20_000):
                deliver([(outputs, output(token_id))])

        engine = threading.Thread(target=hand_over)
        engine.start()
        async with asyncio.timeout(30):
            while len(taken) < 20_000:
                await asyncio.sleep(0.001)
        engine.join()
        return taken

    assert asyncio.run(read()) == [output(token_id) for token_id in range(20_000)]


def test_requests_of_a_closed_event_loop_are_named() -> None:
    taken: list[Item] = []
    closed, open_ = asyncio.new_event_loop(), asyncio.new_event_loop()
    queues = [
        OutputQueue(EventLoopReceiver(closed), taken.append, "gone"),
        OutputQueue(EventLoopReceiver(open_), taken.append, "here"),
    ]
    closed.close()
    for _ in range(2):
        assert deliver([(outputs, output(1)) for outputs in queues]) == ["gone"]
    open_.run_until_complete(asyncio.sleep(0))
    assert taken == [output(1), output(1)]
    open_.close()


def test_outputs_that_have_arrived_are_joined_by_choice() -> None:
    scores = tuple(TokenLogprobs(token_id, -0.5, 1) for token_id in range(6))
    arrived: list[Item] = [
        Accepted(),
        TokenOutput("one", (1,), num_cached_tokens=7, reuse="all", logprobs=scores[1:2], num_drafted=2),
        TokenOutput("one", (2, 3), logprobs=scores[2:4], num_drafted=3, num_accepted=1),
        TokenOutput("one", (8,), choice=1),
        TokenOutput("one", (4,), FinishReason.STOP, logprobs=scores[4:6], stop_token_id=5),
        GenerationFailed("the device failed"),
    ]

    async def read() -> tuple[list[TokenOutput], str]:
        stream = OutputStream(
            GenerationRequest("one", (0,), SamplingParams(), max_tokens=9, num_choices=2),
            lambda _: None,
            EventLoopReceiver(asyncio.get_running_loop()),
        )
        for item in arrived:
            stream.outputs.put(item)
        await stream.accepted()
        taken = []
        try:
            async for one in stream:
                taken.append(one)
        except GenerationFailed as error:
            return taken, str(error)
        raise AssertionError("the error is lost")

    first = TokenOutput(
        "one", (1, 2, 3), num_cached_tokens=7, reuse="all", logprobs=scores[1:4], num_drafted=5, num_accepted=1
    )
    assert asyncio.run(read()) == ([first, arrived[3], arrived[4]], "the device failed")


def test_progress_of_a_prompt_is_not_joined_and_the_latest_time_stays() -> None:
    arrived: list[Item] = [
        Accepted(),
        TokenOutput("one", (), num_processed=5, times=OutputTimes(1.0, 2.0, 2.0)),
        TokenOutput("one", (), num_processed=9, times=OutputTimes(1.0, 3.0, 3.0)),
        TokenOutput("one", (1,), times=OutputTimes(1.0, 3.0, 3.0)),
        TokenOutput("one", (2,), FinishReason.LENGTH, times=OutputTimes(1.0, 3.0, 4.0)),
    ]

    async def read() -> list[TokenOutput]:
        receiver = EventLoopReceiver(asyncio.get_running_loop())
        stream = OutputStream(GenerationRequest("one", (0,), SamplingParams(), max_tokens=9), lambda _: None, receiver)
        for item in arrived:
            stream.outputs.put(item)
        await stream.accepted()
        return [one async for one in stream]

    *progress, last = asyncio.run(read())
    assert progress == arrived[1:3]
    assert (last.token_ids, last.times) == ((1, 2), OutputTimes(1.0, 3.0, 4.0))
