"""What servers take to the first text of prompts that they have seen before, in time and in processor time.

    PYTHONPATH=src python tests/bench/measure_reuse.py LABEL=URL,MODEL,PID … [--tokens 640,2500] [--turns 12]

Asks what `headrace bench` asks (`repeated-prompt` at each length, then `growing-conversation` at the first), one
stream, the servers in turn, and reads the processor time of each server's process, which says more than the clock
where other work runs beside it. Linux only. PID: of a server on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.bench.answer import estimate_tokens
from headrace.bench.client import BenchClient, Message
from headrace.bench.plan import Plan, Target
from headrace.bench.workloads import Questions, build_round

MAX_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Server:
    """A server and its process."""

    client: BenchClient
    pid: int

    def cpu_s(self) -> float:
        """Processor time of all of its threads, those that have ended left out."""
        tasks = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


@dataclass(frozen=True, slots=True)
class First:
    """To the first text of an answer. num_tokens, num_cached: of the prompt, as the server says."""

    wall_s: float
    cpu_s: float
    num_tokens: int | None
    num_cached: int | None


async def converse(server: Server, conversation: Questions) -> list[First]:
    messages: list[Message] = []
    firsts = []
    for question in conversation.questions:
        messages.append({"role": "user", "content": question})
        began_s, before_s, spent_s = time.perf_counter(), server.cpu_s(), 0.0

        def on_text() -> None:
            nonlocal spent_s
            spent_s = server.cpu_s() - before_s  # noqa: B023 - called within this turn

        answer = await server.client.ask(messages, MAX_TOKENS, began_s, on_text)
        if answer.fault is not None:
            raise SystemExit(f"{server.client.target.label}: {answer.fault}")
        wall_s = answer.arrivals_s[0] - answer.started_s
        firsts.append(First(wall_s, spent_s, answer.num_prompt_tokens, answer.num_cached_tokens))
        messages.append({"role": "assistant", "content": answer.content})
    return firsts


async def measure(plan: Plan, workload: str, servers: list[Server]) -> None:
    """Prints a line for each kind of question: its medians on each server."""
    found: dict[tuple[str, str], list[First]] = defaultdict(list)
    for repeat in range(plan.num_repeats):
        (stream,) = build_round(plan, workload, 1, repeat)
        for server in servers:
            for conversation in stream.conversations:
                firsts = await converse(server, conversation)
                for kind, first in zip(conversation.kinds, firsts, strict=True):
                    found[kind, server.client.target.label].append(first)
    for (kind, label), firsts in found.items():
        wall_s, cpu_s = (
            statistics.median(values) for values in zip(*((f.wall_s, f.cpu_s) for f in firsts), strict=True)
        )
        last = firsts[-1]
        sys.stdout.write(
            f"{workload:<22} {kind:<8} {label:<10} prompt {last.num_tokens} cached {last.num_cached}  "
            f"first text {1000 * wall_s:8.0f} ms, processor {1000 * cpu_s:8.0f} ms  ({len(firsts)} runs)\n"
        )
        sys.stdout.flush()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("servers", nargs="+")
    parser.add_argument("--tokens", default="640,2500,5000")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    servers = []
    for said in given.servers:
        label, _, rest = said.partition("=")
        url, model, pid = rest.split(",")
        servers.append(Server(BenchClient(Target(label, url, model), 3600.0, estimate_tokens), int(pid)))
    lengths = [int(length) for length in given.tokens.split(",")]
    plan = Plan((), num_repeats=given.repeats, num_conversations=1, max_tokens=MAX_TOKENS, seed=given.seed)
    for server in servers:
        await converse(server, Questions(("Good morning.",), ("warm-up",), MAX_TOKENS))
    for length in lengths:
        await measure(replace(plan, num_prompt_tokens=length), "repeated-prompt", servers)
    if given.turns:
        grown = replace(plan, num_prompt_tokens=lengths[0], num_turns=given.turns)
        await measure(grown, "growing-conversation", servers)
    for server in servers:
        await server.client.aclose()


asyncio.run(main())
