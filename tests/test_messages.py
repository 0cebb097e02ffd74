"""Messages between processes: what arrives is what was sent, buffers included."""

from __future__ import annotations

import pickle
import socket
import threading
import time

import numpy as np
import pytest

from headrace.messages import OneWayCalls, reader, receive, send


def crossed(value: object) -> object:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sending = threading.Thread(target=send, args=(ours, value))
        sending.start()
        try:
            return receive(reader(theirs))
        finally:
            sending.join()


@pytest.mark.parametrize("kind", ["B", "f", "i"])
def test_views_keep_their_format_and_shape(kind: str) -> None:
    given = memoryview(bytes(range(240))).cast(kind, (2, 240 // 2 // memoryview(b"").cast(kind).itemsize))
    found = crossed((given, "between"))
    assert isinstance(found, tuple)
    assert (found[0].format, found[0].shape, found[0].tolist()) == (given.format, given.shape, given.tolist())


def test_arrays_of_any_size_arrive() -> None:
    given = [np.arange(2_000_003, dtype=np.int64), np.zeros(0), b"x" * 100_000, None]
    found = crossed(given)
    assert isinstance(found, list)
    assert all(np.array_equal(one, other) for one, other in zip(found[:2], given[:2], strict=True))
    assert found[2:] == given[2:]


def test_calls_are_made_in_order_until_the_other_side_is_gone() -> None:
    class Target:
        taken: list[object]

        def on_add(self, *values: object) -> None:
            self.taken.extend(values)

    ours, theirs = socket.socketpair()
    target = Target()
    target.taken = []
    here, there = OneWayCalls(ours, target), OneWayCalls(theirs, object())
    serving = threading.Thread(target=here.serve)
    serving.start()
    callers = [threading.Thread(target=lambda: [there.call("add", n) for n in range(500)]) for _ in range(3)]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    there.call("add", "last", b"y" * 300_000)
    until = time.monotonic() + 30
    while target.taken[-2:] != ["last", b"y" * 300_000] and time.monotonic() < until:
        time.sleep(0.01)
    there.close()
    serving.join(30)
    assert not serving.is_alive()
    assert target.taken[-2:] == ["last", b"y" * 300_000]
    assert sorted(target.taken[:-2]) == sorted([*range(500)] * 3)  # type: ignore[type-var]
    here.call("add", 1)  # the other side is gone: no error
    here.close()


class Unpicklable:
    """Fails to be pickled with any error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self) -> tuple[object, ...]:
        raise self._error


NESTED: list[object] = []
for _ in range(100_000):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    "value",
    [
        threading.Lock(),
        lambda: None,
        NESTED,
        pickle.PickleBuffer(memoryview(bytes(10))[::2]),
        Unpicklable(ValueError("no")),
        Unpicklable(OSError("no")),
        Unpicklable(MemoryError()),
    ],
    ids=["lock", "function", "nested", "gaps", "value", "os", "memory"],
)
def test_a_call_that_can_not_be_sent_ends_the_connection(value: object) -> None:
    ours, theirs = socket.socketpair()
    there = OneWayCalls(theirs, object())
    here = OneWayCalls(ours, object())
    serving = threading.Thread(target=here.serve, daemon=True)
    serving.start()
    there.call("add", value)
    serving.join(30)
    assert not serving.is_alive(), "the peer still waits"
    here.close()
