"""A whole measurement: servers found, warmed up, measured."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from datetime import UTC, datetime
from typing import Any

from headrace.bench.answer import TokenCounter, TokenSource, estimate_tokens, tokenizer_counter
from headrace.bench.client import BenchClient
from headrace.bench.plan import Plan
from headrace.bench.report import report
from headrace.bench.rounds import OnDone, PlayedLevel, play, warm_up


async def measure(plan: Plan, command: Sequence[str], on_done: OnDone) -> tuple[list[PlayedLevel], dict[str, Any]]:
    """What was played, and the report of it.

    command: how it was called, for the report; without keys. The plan must have passed `check`. Raises ConfigError for
    a server that can't be reached and for a first request that fails; what fails later is in the answers.
    """
    when = datetime.now(UTC)
    count_tokens, counted_by = _counter(plan)
    async with AsyncExitStack() as exits:
        clients, servers = [], {}
        for target in plan.targets:
            client = BenchClient(target, plan.timeout_s, count_tokens, counted_by)
            await exits.enter_async_context(aclosing(client))
            servers[target.label] = await client.prepare()
            await warm_up(plan, client)
            clients.append(client)
        levels = await play(plan, clients, on_done)
    return levels, report(plan, command, when, servers, clients, levels)


def _counter(plan: Plan) -> tuple[TokenCounter, TokenSource]:
    if plan.tokenizer is None:
        return estimate_tokens, "estimate"
    return tokenizer_counter(plan.tokenizer), "tokenizer"
