"""The whole tool job over HTTP: `python tests/end_to_end/measure_tool_job.py [PROMPTS]` (200 without a number).

First how many of half as many held-out requests are answered to the letter, each of the APIs in turn; then how many
answers are valid where they have to be: at temperature 1, with and without thinking and a budget for it, streamed and
not, draft tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from typing import Any

from end_to_end.tool_job import APIS, Choice, Job, Judged, held_out, running_job

CHOICES: tuple[Choice, ...] = ("strict", "required", "named")
THINKING: dict[str, dict[str, Any]] = {
    "no thinking": {"thinks": False},
    "thinking": {"thinks": True},
    "thinking, 8 tokens": {"thinks": True, "budget": 8},
}
LIMIT = {"chat": "max_tokens", "responses": "max_output_tokens", "messages": "max_tokens"}
MAX_TOKENS = 800


async def tell_accuracy(job: Job, number: int) -> None:
    samples = held_out(number)
    for at, api in enumerate(APIS):
        own = samples[at::3]
        tell(f"auto, {api}", f"{await job.num_right(api, own)} of {len(own)} right")


async def tell_validity(job: Job, number: int) -> None:
    """Each prompt once, the ways of asking in turn."""
    samples = held_out(number)
    ways = list(itertools.product(APIS, CHOICES, THINKING, (False, True)))
    asked = [
        job.judged(api, [sample], choice, streams=streams, **THINKING[thinking], **{LIMIT[api]: MAX_TOKENS})
        for sample, (api, choice, thinking, streams) in zip(samples, itertools.cycle(ways), strict=False)
    ]
    judged = await asyncio.gather(*asked)
    named: dict[str, list[Judged]] = {}
    for each, way in zip(judged, itertools.cycle(ways), strict=False):
        for name in (way[0], way[1], way[2], "streamed" if way[3] else "whole", "all"):
            named.setdefault(name, []).append(each)
    for name, of_name in named.items():
        num_broken = sum(len(each.broken) for each in of_name)
        num_cut = sum(each.num_cut for each in of_name)
        num_calls = sum(len(answer.calls) for each in of_name for answer in each.answers)
        tell(name, f"{len(of_name)} answers, {num_calls} calls, {num_broken} not valid, {num_cut} cut")
    for each, way in zip(judged, itertools.cycle(ways), strict=False):
        for answer in each.broken:
            tell("not valid", f"{way}: {answer}")


def tell(name: str, what: str) -> None:
    sys.stdout.write(f"{name:22} {what}\n")
    sys.stdout.flush()


async def main(number: int) -> None:
    async with running_job() as job:
        await tell_accuracy(job, number // 2)
        await tell_validity(job, number)
        drafts = (await job.session.status()).counters.drafts
        tell("guessed tokens", f"{drafts.num_accepted} of {drafts.num_drafted} right")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if sys.argv[1:] else 200))
