"""Rounds are played as planned: streams, turns, targets, and the second asking."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any

import pytest
from bench.fake_openai import Body, FakeOpenAI, question, running, spoken
from starlette.responses import JSONResponse, Response

from headrace.bench.answer import estimate_tokens
from headrace.bench.client import BenchClient
from headrace.bench.figures import sameness
from headrace.bench.plan import Plan, Target
from headrace.bench.rounds import PlayedLevel, PlayedRound, play, play_round, total_requests, warm_up
from headrace.bench.workloads import Questions, Round, Stream, build_round
from headrace.errors import ConfigError

PLAN = Plan((), num_prompt_tokens=40, max_tokens=4, num_repeats=2, streams=(2,))
PATIENCE_S = 20
REFUSED = JSONResponse({"error": {"message": "no"}}, 500)


def chat(*questions: str, kind: str = "a", system: str | None = None) -> Questions:
    return Questions(questions, (kind,) * len(questions), 4, system)


def play_one(fake: FakeOpenAI, made: Round, done: Callable[[int], None] = lambda count: None) -> PlayedRound:
    async def played(url: str) -> PlayedRound:
        async with aclosing(BenchClient(Target("it", url, "m"), 20.0, estimate_tokens)) as client:
            return await asyncio.wait_for(play_round(client, made, done), PATIENCE_S)

    with running(fake) as url:
        return asyncio.run(played(url))


def play_all(plan: Plan, *fakes: FakeOpenAI, done: Callable[[str, int], None] = lambda *_: None) -> list[PlayedLevel]:
    async def played(urls: Sequence[str]) -> list[PlayedLevel]:
        async with AsyncExitStack() as exits:
            clients = [BenchClient(Target(f"s{at}", url, "m"), 20.0, estimate_tokens) for at, url in enumerate(urls)]
            for client in clients:
                await exits.enter_async_context(aclosing(client))
            return await asyncio.wait_for(play(plan, clients, done), PATIENCE_S)

    if len(fakes) == 1:
        with running(fakes[0]) as url:
            return asyncio.run(played([url]))
    with running(fakes[0]) as url, running(fakes[1]) as other:
        return asyncio.run(played([url, other]))


def echo(body: Body) -> list[bytes]:
    return spoken(f"you said {question(body)}")


def test_turns_carry_the_real_answers_of_the_turns_before() -> None:
    fake = FakeOpenAI(lambda body: spoken("answer ", f"to {question(body)}"))
    found = play_one(fake, (Stream((chat("q1", "q2", "q3", system="be good"),)),))
    assert [body["messages"] for body in fake.bodies][-1] == [
        {"role": "system", "content": "be good"},
        {"role": "user", "content": "q1"},
        {"role": "assistant", "content": "answer to q1"},
        {"role": "user", "content": "q2"},
        {"role": "assistant", "content": "answer to q2"},
        {"role": "user", "content": "q3"},
    ]
    assert [outcome.turn for outcome in found.outcomes] == [0, 1, 2]


def test_a_conversation_whose_request_fails_ends_and_the_next_one_begins() -> None:
    fake = FakeOpenAI(lambda body: REFUSED if question(body) == "q2" else echo(body))
    counts: list[int] = []
    found = play_one(fake, (Stream((chat("q1", "q2", "q3"), chat("q4"))),), counts.append)
    assert [question(body) for body in fake.bodies] == ["q1", "q2", "q4"]
    assert [outcome.answer.fault for outcome in found.outcomes] == [None, "status 500: no", None]
    assert counts == [3, 1]


def test_streams_run_at_the_same_time_and_one_after_the_other_within() -> None:
    # Every answer waits until both streams have asked, so a player that runs them in turn would never end.
    together = threading.Barrier(2, timeout=20)

    class Meeting(FakeOpenAI):
        async def _chat(self, request: Any) -> Response:
            response = await super()._chat(request)
            await asyncio.to_thread(together.wait)
            return response

    fake = Meeting(echo)
    found = play_one(fake, (Stream((chat("a1"), chat("a2"))), Stream((chat("b1"), chat("b2")))))
    places = [(outcome.stream, outcome.conversation, outcome.answer.content) for outcome in found.outcomes]
    assert places == [(0, 0, "you said a1"), (0, 1, "you said a2"), (1, 0, "you said b1"), (1, 1, "you said b2")]
    assert {question(body) for body in fake.bodies[:2]} == {"a1", "b1"}
    assert found.wall_s == max(outcome.answer.ended_s for outcome in found.outcomes)


def test_a_late_stream_asks_once_all_others_have_text() -> None:
    fake = FakeOpenAI(echo, kind=question)
    play_one(fake, (Stream((chat("late"),), late=True), Stream((chat("a"),)), Stream((chat("b"),))))
    asked = fake.log.index("asked late")
    assert fake.log.index("spoke a") < asked
    assert fake.log.index("spoke b") < asked


def test_a_late_stream_does_not_wait_for_one_that_fails() -> None:
    fake = FakeOpenAI(lambda body: REFUSED if question(body) == "a" else echo(body), kind=question)
    found = play_one(fake, (Stream((chat("a"),)), Stream((chat("late"),), late=True)))
    assert [outcome.answer.fault for outcome in found.outcomes] == ["status 500: no", None]


def test_every_level_is_played_in_rounds_and_its_first_questions_come_again_at_the_end() -> None:
    fake = FakeOpenAI(echo)
    counts: list[int] = []
    (level,) = play_all(PLAN, fake, done=lambda title, count: counts.append(count))
    assert (level.workload, level.streams, level.target) == ("short-chat", 2, "s0")
    rounds = [{question(body) for body in fake.bodies[at : at + 4]} for at in (0, 4, 8)]
    expected = [
        {each.questions[0] for stream in build_round(PLAN, "short-chat", 2, repeat) for each in stream.conversations}
        for repeat in (0, 1, 0)
    ]
    assert rounds == expected
    assert len(level.rounds) == 2
    assert sum(counts) == total_requests(replace(PLAN, targets=(Target("s0", ""),))) == 12
    assert sameness(level.rounds[0], level.again).num_same == 4


def test_all_servers_are_asked_the_same_in_turn() -> None:
    order: list[str] = []

    def noting(name: str) -> FakeOpenAI:
        def answer(body: Body) -> list[bytes]:
            order.append(name)
            return echo(body)

        return FakeOpenAI(answer)

    fakes = noting("x"), noting("y")
    levels = play_all(PLAN, *fakes)
    assert "".join(order) == "xxxxyyyy" * 3
    assert [level.target for level in levels] == ["s0", "s1"]
    for start in (0, 4, 8):
        asked = [{question(body) for body in fake.bodies[start : start + 4]} for fake in fakes]
        assert asked[0] == asked[1]


def test_an_answer_that_is_another_one_the_second_time_is_found() -> None:
    seen: set[str] = set()

    def forgetful(body: Body) -> list[bytes]:
        said = question(body)
        again = said in seen
        seen.add(said)
        return spoken("changed" if again and len(seen) == 8 else "the same")

    (level,) = play_all(PLAN, FakeOpenAI(forgetful))
    found = sameness(level.rounds[0], level.again)
    assert (found.num_same, found.num_compared) == (0, 4)
    assert found.difference is not None
    assert (found.difference.first, found.difference.second) == ("the same", "changed")


@pytest.mark.parametrize("workload", ["shared-prefix", "growing-conversation", "mixed", "long-prompt"])
def test_every_workload_is_played_to_its_end(workload: str) -> None:
    plan = replace(PLAN, workloads=(workload,), num_repeats=1)
    fake = FakeOpenAI(echo)
    (level,) = play_all(plan, fake)
    assert len(fake.bodies) == total_requests(replace(plan, targets=(Target("s0", ""),)))
    assert all(outcome.answer.fault is None for outcome in (*level.rounds[0].outcomes, *level.again.outcomes))


def test_a_first_request_that_fails_ends_everything_with_its_reason() -> None:
    async def warmed(url: str) -> None:
        async with aclosing(BenchClient(Target("it", url, "m"), 20.0, estimate_tokens)) as client:
            await warm_up(PLAN, client)

    with (
        running(FakeOpenAI(lambda body: REFUSED)) as url,
        pytest.raises(ConfigError, match="it .*'m'.* status 500: no"),
    ):
        asyncio.run(warmed(url))
