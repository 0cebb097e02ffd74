"""Runs rounds: several streams at once, on every target in turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from headrace.bench.answer import Answer
from headrace.bench.client import BenchClient, Message
from headrace.bench.plan import Plan
from headrace.bench.workloads import Questions, Round, build_round, num_requests, random_text
from headrace.errors import ConfigError

_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """One answer and its position: the `turn`th question of a stream's `conversation`, all counted from 0."""

    stream: int
    conversation: int
    turn: int
    kind: str
    answer: Answer


@dataclass(frozen=True, slots=True)
class PlayedRound:
    """All answers, in order of stream, conversation and turn. wall_s: from the begin to the last answer's end."""

    wall_s: float
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class PlayedLevel:
    """A workload at a number of streams on one target.

    again: the first round repeated at the end: at temperature 0 its answers should be the same.
    """

    workload: str
    streams: int
    target: str
    rounds: tuple[PlayedRound, ...]
    again: PlayedRound


OnDone = Callable[[str, int], None]
"""Called with what is running and how many of its requests are done."""


def total_requests(plan: Plan) -> int:
    total = 0
    for workload, streams in plan.levels():
        for repeat in _repeats(plan):
            total += num_requests(build_round(plan, workload, streams, repeat))
    return total * len(plan.targets)


async def warm_up(plan: Plan, client: BenchClient) -> None:
    """One short uncounted request for the server's one-time work. Raises ConfigError."""
    question = random_text(Random(f"{plan.seed}/warm-up"), _WARM_UP_TOKENS)
    answer = await client.ask([{"role": "user", "content": question}], _WARM_UP_TOKENS, time.perf_counter())
    if answer.error is not None:
        raise ConfigError(f"{client.target.label} fails the first request to {client.model!r}: {answer.error}")


async def play(plan: Plan, clients: Sequence[BenchClient], on_done: OnDone) -> list[PlayedLevel]:
    """Run every level of the plan on every client.

    Clients take turns within each repeat, so that changes of the machine's speed affect all of them.
    """
    levels = []
    for workload, streams in plan.levels():
        rounds: list[list[PlayedRound]] = [[] for _ in clients]
        for repeat in _repeats(plan):
            made = build_round(plan, workload, streams, repeat)
            for client, played in zip(clients, rounds, strict=True):
                title = f"{workload}, {streams} streams, {client.target.label}"
                played.append(await play_round(client, made, partial(on_done, title)))
        for client, (*counted, again) in zip(clients, rounds, strict=True):
            levels.append(PlayedLevel(workload, streams, client.target.label, tuple(counted), again))
    return levels


def _repeats(plan: Plan) -> tuple[int, ...]:
    return (*range(plan.num_repeats), 0)


async def play_round(client: BenchClient, made: Round, on_done: Callable[[int], None]) -> PlayedRound:
    """Run all streams at once. on_done: called after each conversation with its number of requests."""
    performance = _Performance(client, made, on_done)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(performance.play_stream(index)) for index in range(len(made))]
    outcomes = tuple(outcome for task in tasks for outcome in task.result())
    return PlayedRound(max(outcome.answer.ended_s for outcome in outcomes), outcomes)


class _Performance:
    """A running round."""

    def __init__(self, client: BenchClient, made: Round, on_done: Callable[[int], None]) -> None:
        self._client = client
        self._made = made
        self._on_done = on_done
        self._speaks = [asyncio.Event() for _ in made]
        self._began_s = time.perf_counter()

    async def play_stream(self, index: int) -> list[Outcome]:
        stream = self._made[index]
        if stream.late:
            await self._others_speak()
        outcomes = []
        for number, conversation in enumerate(stream.conversations):
            answers = await self._converse(conversation, self._speaks[index].set)
            # At the latest now, for an answer without any text.
            self._speaks[index].set()
            for turn, answer in enumerate(answers):
                outcomes.append(Outcome(index, number, turn, conversation.kinds[turn], answer))
            self._on_done(len(conversation.questions))
        return outcomes

    async def _others_speak(self) -> None:
        for stream, speaks in zip(self._made, self._speaks, strict=True):
            if not stream.late:
                await speaks.wait()

    async def _converse(self, conversation: Questions, on_text: Callable[[], None]) -> list[Answer]:
        """The answers to all questions; a failed request ends the conversation, because the next turn needs it."""
        messages: list[Message] = []
        if conversation.system is not None:
            messages.append({"role": "system", "content": conversation.system})
        answers = []
        for question in conversation.questions:
            messages.append({"role": "user", "content": question})
            answer = await self._client.ask(messages, conversation.max_tokens, self._began_s, on_text)
            answers.append(answer)
            if answer.fault is not None:
                break
            messages.append({"role": "assistant", "content": answer.content})
        return answers
