"""Pieces of an answer on their way to Ray's proxy."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from headrace.replicas.pacing import OpenAnswers, PacedAnswer

START = {"type": "http.response.start", "status": 200, "headers": []}
ENDLESS_PAUSE = 10**9
"""As a number of replicas: nothing but an answer's first piece and its end is sent."""


def body(piece: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": piece, "more_body": more}


class Proxy:
    def __init__(self) -> None:
        self.messages: list[Message] = []

    async def send(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def pieces(self) -> list[bytes]:
        return [each["body"] for each in self.messages if each["type"] == "http.response.body"]


def test_the_first_piece_is_sent_at_once_and_what_comes_during_the_pause_with_the_last() -> None:
    async def main() -> None:
        proxy, answers = Proxy(), OpenAnswers(ENDLESS_PAUSE)
        async with PacedAnswer(proxy.send, answers) as answer:
            await answer.send(START)
            await answer.send(body(b"a"))
            assert proxy.messages == [START, body(b"a")]
            for piece in (b"b", b"", b"c"):
                await answer.send(body(piece))
            assert proxy.pieces == [b"a"]
            await answer.send(body(b"d", more=False))
        assert proxy.messages == [START, body(b"a"), body(b"bcd", more=False)]
        assert answers.num == 0
        assert len(asyncio.all_tasks()) == 1 + 1  # this one, and the pause, which is cancelled
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_pieces_are_sent_after_the_pause_though_the_answer_goes_on() -> None:
    async def main() -> None:
        proxy = Proxy()
        async with PacedAnswer(proxy.send, OpenAnswers(10)) as answer:
            for piece in (b"a", b"b", b"c"):
                await answer.send(body(piece))
            async with asyncio.timeout(30):
                while len(proxy.pieces) < 2:
                    await asyncio.sleep(0.001)
        assert proxy.pieces == [b"a", b"bc"]

    asyncio.run(main())


def test_the_pause_grows_with_the_open_answers_of_all_replicas() -> None:
    async def main() -> None:
        answers = OpenAnswers(2)
        assert answers.pause_s == 0
        async with PacedAnswer(Proxy().send, answers):
            one = answers.pause_s
            async with PacedAnswer(Proxy().send, answers), PacedAnswer(Proxy().send, answers):
                assert answers.pause_s == pytest.approx(3 * one)
        # a proxy that has one message of each of 2 replicas in a pause has time for twice as many
        assert one == pytest.approx(2 * 0.0003)

    asyncio.run(main())


PIECES = st.lists(st.tuples(st.binary(max_size=3), st.integers(0, 2)), max_size=20)


@given(PIECES, st.booleans(), st.sampled_from([0, 1, 3]))
def test_every_byte_arrives_once_and_in_order(pieces: list[tuple[bytes, int]], ends: bool, num_on_host: int) -> None:
    """pieces: with how often other tasks run after each. ends: as a complete answer; otherwise it breaks off."""

    async def main() -> None:
        proxy = Proxy()
        async with PacedAnswer(proxy.send, OpenAnswers(num_on_host)) as answer:
            for piece, num_turns in pieces:
                await answer.send(body(piece))
                for _ in range(num_turns):
                    await asyncio.sleep(0)
            if ends:
                await answer.send(body(b"!", more=False))
        sent = b"".join(piece for piece, _ in pieces) + (b"!" if ends else b"")
        if ends:
            assert b"".join(proxy.pieces) == sent
            assert [each["more_body"] for each in proxy.messages] == [True] * (len(proxy.messages) - 1) + [False]
        else:
            assert sent.startswith(b"".join(proxy.pieces))

    asyncio.run(main())
