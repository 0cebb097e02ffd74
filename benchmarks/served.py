"""Measures a served model under load: `python -m benchmarks.served MODEL [options of headrace serve]`.

Starts `headrace serve`, or `headrace ray serve` where `--replicas` is given, waits until it is warmed up, and prints a
table: bursts, arrivals, the next turn of a long conversation, streams beside such turns, whether answers are the same
from the cache and in company, and whether conversations stay on their replica. Greedy, streamed, exact numbers of
tokens. The client runs on the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.command import exit_code
from benchmarks.servers import serving
from headrace.bench.workloads import WORDS
from headrace.errors import HeadraceError

_LONG_PROMPT_WORDS = 730
_NUM_EQUAL = 32
_EQUAL_TOKENS = 48
_NUM_SESSIONS, _NUM_TURNS = 8, 6
_POLL_S = 0.2


@dataclass(slots=True)
class Answer:
    """Times are those of `time.perf_counter`. arrivals: of each piece of text."""

    started: float
    arrivals: list[float] = field(default_factory=list)
    text: str = ""
    num_tokens: int = 0
    num_prompt: int = 0
    num_cached: int = 0
    ended: float = 0.0
    replica: str | None = None

    @property
    def first_s(self) -> float:
        return self.arrivals[0] - self.started


def words(count: int, seed: str) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def question(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


class Client:
    """Asks one server."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def ask(self, messages: Sequence[dict[str, str]], num_tokens: int, answer: Answer | None = None) -> Answer:
        """answer: filled while it arrives. Raises HeadraceError where the server refuses or breaks off."""
        fields = {"messages": messages, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        body = json.dumps({**fields, "stream": True, "stream_options": {"include_usage": True}})
        answer = answer or Answer(0.0)
        answer.started = time.perf_counter()
        headers = {"content-type": "application/json"}
        async with self._http.stream("POST", "/v1/chat/completions", content=body, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                raise HeadraceError(f"status {response.status_code}: {(await response.aread())[:300]!r}")
            answer.replica = response.headers.get("x-headrace-replica")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    take(answer, json.loads(line.removeprefix("data: ")))
        answer.ended = time.perf_counter()
        if answer.num_tokens != num_tokens:
            raise HeadraceError(f"an answer has {answer.num_tokens} tokens instead of {num_tokens}")
        return answer

    async def ask_all(self, prompts: Sequence[str], num_tokens: int) -> list[Answer]:
        return await asyncio.gather(*(self.ask(question(prompt), num_tokens) for prompt in prompts))

    async def metric(self, name: str) -> str:
        """The sum over its labels."""
        lines = (await self._http.get("/metrics")).text.splitlines()
        found = [float(line.split()[-1]) for line in lines if re.match(rf"{name}[ {{]", line)]
        return f"{sum(found):g}" if found else "not reported"

    async def warmed_up(self) -> None:
        """Raises HeadraceError if the server can't serve."""
        while (health := (await self._http.get("/health")).json()).get("status") != "ok":
            if error := health.get("error"):
                raise HeadraceError(str(error))
            await asyncio.sleep(_POLL_S)


def take(answer: Answer, event: dict[str, Any]) -> None:
    if error := event.get("error"):
        raise HeadraceError(str(error))
    if usage := event.get("usage"):
        answer.num_tokens, answer.num_prompt = usage["completion_tokens"], usage["prompt_tokens"]
        answer.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    for choice in event.get("choices") or ():
        delta = choice["delta"]
        if text := (delta.get("reasoning_content") or "") + (delta.get("content") or ""):
            answer.arrivals.append(time.perf_counter())
            answer.text += text


def tokens_per_s(answers: Sequence[Answer]) -> float:
    elapsed = max(each.ended for each in answers) - min(each.started for each in answers)
    return sum(each.num_tokens for each in answers) / elapsed


def spread(values: Sequence[float], form: str = ",.0f", scale: float = 1.0) -> str:
    """Their median, and the smallest and the largest."""
    found = [format(value * scale, form) for value in (statistics.median(values), min(values), max(values))]
    return found[0] if len(values) < 2 else f"{found[0]} ({found[1]} to {found[2]})"


def share(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


async def burst(client: Client, count: int, num_words: int, num_tokens: int, repeats: int) -> None:
    speeds, firsts = [], []
    for repeat in range(repeats):
        prompts = [words(num_words, f"burst {count} {num_words} {repeat} {n}") for n in range(count)]
        answers = await client.ask_all(prompts, num_tokens)
        speeds.append(tokens_per_s(answers))
        firsts.append(statistics.median(each.first_s for each in answers))
    row(f"{count} at once, {num_words} words, {num_tokens} tokens: tokens/s", spread(speeds))
    row("its first text, median of each burst: ms", spread(firsts, scale=1e3))


async def arrivals(client: Client, rate: float, seconds: float, num_tokens: int, repeats: int) -> None:
    late, middle, slow = [], [], []
    for repeat in range(repeats):
        gaps, began = random.Random(f"{rate} {repeat}"), time.perf_counter()
        tasks: list[asyncio.Task[Answer]] = []
        due = began
        while due < began + seconds:
            await asyncio.sleep(due - time.perf_counter())
            prompt = words(20, f"arrival {rate} {repeat} {len(tasks)}")
            tasks.append(asyncio.create_task(client.ask(question(prompt), num_tokens)))
            due += gaps.expovariate(rate)
        answers = await asyncio.gather(*tasks)
        late.append(max(each.ended for each in answers) - began - seconds)
        firsts = [each.first_s for each in answers]
        middle.append(statistics.median(firsts))
        slow.append(share(firsts, 0.95))
    row(f"{rate:g} a second for {seconds:g} s, {num_tokens} tokens: first text p50, ms", spread(middle, scale=1e3))
    row("its p95, ms", spread(slow, scale=1e3))
    row("seconds late", spread(late, ".1f"))


class Conversation:
    """One whose next turn has few new tokens."""

    def __init__(self, client: Client, num_words: int, seed: str) -> None:
        self._client = client
        self._messages = question(words(num_words, seed))

    async def turn(self, num_tokens: int) -> Answer:
        answer = await self._client.ask(self._messages, num_tokens)
        self._messages.append({"role": "assistant", "content": answer.text.strip() or "Yes."})
        self._messages.append({"role": "user", "content": f"And then, after {len(self._messages)}?"})
        return answer


async def turns(client: Client, num_words: int, num_turns: int) -> None:
    conversation = Conversation(client, num_words, "turns")
    for _ in range(2):  # the first is new, and the second may build what such turns need
        await conversation.turn(8)
    answers = [await conversation.turn(8) for _ in range(num_turns)]
    new = statistics.median(each.num_prompt - each.num_cached for each in answers)
    label = f"next turn of {answers[-1].num_prompt:,} tokens, {new:g} new, {num_turns} turns: first text, ms"
    row(label, spread([each.first_s for each in answers], ".1f", 1e3))


async def beside(client: Client, num_words: int, num_turns: int, num_tokens: int) -> None:
    """Four streams' speed during such turns, as a share of their speed before."""
    conversation = Conversation(client, num_words, f"beside {num_tokens}")
    for _ in range(2):
        await conversation.turn(num_tokens)
    streams = [Answer(0.0) for _ in range(4)]
    asked = [
        asyncio.create_task(client.ask(question(words(20, f"stream {num_tokens} {n}")), 8_000, stream))
        for n, stream in enumerate(streams)
    ]
    await asyncio.sleep(1.0)
    began = time.perf_counter()
    await asyncio.sleep(2.0)
    turned = time.perf_counter()
    answers = [await conversation.turn(num_tokens) for _ in range(num_turns)]
    ended = time.perf_counter()
    for task in asked:
        if task.done():
            raise task.exception() or HeadraceError("a stream has ended before the turns did")
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    alone, kept = pieces_per_s(streams, began, turned), pieces_per_s(streams, turned, ended)
    label = (
        f"four streams beside {num_turns} turns of {answers[-1].num_prompt:,} tokens and {num_tokens} of answer keep"
    )
    row(label, f"{kept / alone:.0%} of {alone:,.0f}")
    row("first text of these turns, ms", spread([each.first_s for each in answers], ".1f", 1e3))


def pieces_per_s(streams: Sequence[Answer], start: float, end: float) -> float:
    """Of text; a token makes a piece, but for rare ones."""
    return sum(start <= each < end for stream in streams for each in stream.arrivals) / (end - start)


async def equality(client: Client) -> None:
    """Each question alone, again with its prompt in the cache, and from the cache with the others beside it."""
    prompts = [words(12, f"equal {n}") for n in range(_NUM_EQUAL)]
    first, again = [[await client.ask(question(each), _EQUAL_TOKENS) for each in prompts] for _ in range(2)]
    together = await client.ask_all(prompts, _EQUAL_TOKENS)
    for label, others in (("alone, first and again", first), ("again, alone and together", together)):
        num_equal = sum(one.text == other.text for one, other in zip(again, others, strict=True))
        row(f"the same greedy answers {label}", f"{num_equal} of {_NUM_EQUAL}")


async def sessions(client: Client) -> None:
    """Conversations of several turns, all at once."""

    async def session(number: int) -> list[Answer]:
        conversation = Conversation(client, 2_000, f"session {number}")
        return [await conversation.turn(32) for _ in range(_NUM_TURNS)]

    found = await asyncio.gather(*(session(number) for number in range(_NUM_SESSIONS)))
    num_kept = sum(len({answer.replica for answer in answers}) == 1 for answers in found)
    replicas = {answer.replica for answers in found for answer in answers}
    row(
        f"conversations of {_NUM_TURNS} turns that stay on one of {len(replicas)} replicas",
        f"{num_kept} of {len(found)}",
    )
    pairs = [pair for answers in found for pair in zip(answers, answers[1:], strict=False)]
    reused = [after.num_cached / before.num_prompt for before, after in pairs]
    row("of a former turn's prompt, reused", spread(reused, ".1%"))


def row(label: str, value: str) -> None:
    print(f"| {label} | {value} |", flush=True)


async def measure(url: str, given: argparse.Namespace) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits, trust_env=False) as http:
        client = Client(http)
        await client.warmed_up()
        for part in given.parts:
            if part == "bursts":
                for count in given.at_once or (1, 8, 32, 64):
                    await burst(client, count, 20, 256, given.repeats)
            elif part == "long-prompts":
                for count in given.at_once or (32,):
                    await burst(client, count, _LONG_PROMPT_WORDS, 128, given.repeats)
            elif part == "arrivals":
                await arrivals(client, 8, given.seconds, 64, given.repeats)
                await arrivals(client, 30, given.seconds, 64, given.repeats)
            elif part == "turns":
                await turns(client, given.turn_words, 8)
                for num_tokens in (2, 64):
                    await beside(client, given.turn_words, 25, num_tokens)
            elif part == "sessions":
                await sessions(client)
            else:
                await equality(client)
        row("compiled variants built since ready", await client.metric("headrace:step_forms_since_ready_total"))


_PARTS = ("bursts", "long-prompts", "arrivals", "turns", "equality", "sessions")


def run(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Measure a served model under load.")
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--at-once", type=int, nargs="+", metavar="N", help="requests of a burst (default: several)")
    parser.add_argument("--seconds", type=float, default=16.0, help="of arrivals (default: %(default)s)")
    parser.add_argument("--turn-words", type=int, default=40_000, help="of a long conversation (default: %(default)s)")
    given, options = parser.parse_known_args(argv)
    row("load", " ".join(options) or "default options")
    row("---", "---")
    command = ["ray", "serve"] if any(each.startswith("--replicas") for each in options) else ["serve"]
    with serving([*command, given.model, *options]) as url:
        asyncio.run(measure(url, given))


if __name__ == "__main__":
    sys.exit(exit_code(run))
