"""`python tests/ranks/program.py KERNELS MODEL SEED NUM_REQUESTS`: a random program on two ranks and on one, as JSON.

KERNELS: `cpu`, or `cuda` for its layers with operations instead of kernels, whose steps are launched ahead.

A separate process, because MLX connects a process to others only once.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from dataclasses import dataclass, replace
from typing import Any

from ranks.fused_rank import use_cudas_layers

from headrace.cli.configured import configured_text_pipeline
from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine import memory, prepare
from headrace.engine.engine import Engine
from headrace.ranks import start
from headrace.ranks.channel import Ranks
from headrace.ranks.layout import read_layout
from headrace.types.request import (
    GREEDY,
    Boundary,
    BoundaryKind,
    ConstraintSpec,
    GenerationRequest,
    SamplingParams,
)

STATE_BYTES = 12_000_000
"""So little that sequences are preempted and cached prefixes are evicted."""

WARM = SamplingParams(temperature=0.8, top_p=0.95, top_k=40, seed=3)
PENALISED = replace(GREEDY, repetition_penalty=1.2, presence_penalty=0.3)
WORDS = "start: /[a-z]{1,5}( [a-z]{1,5}){2,9}\\./"


@dataclass(frozen=True)
class Planned:
    """A request, when it comes, and after how many outputs its client leaves; None if it stays."""

    request: GenerationRequest
    after_s: float
    leaves_after: int | None


def plan(seed: int, number: int, vocab_size: int, stops: frozenset[int]) -> list[Planned]:
    """Requests of a few conversations, which share what they begin with."""
    chance = random.Random(seed)
    stems = [[chance.randrange(200, vocab_size) for _ in range(300)] for _ in range(3)]
    planned = []
    for index in range(number):
        stem, length = chance.choice(stems), chance.randrange(20, 260)
        prompt = (*stem[:length], *[chance.randrange(200, vocab_size) for _ in range(chance.randrange(1, 30))])
        spec = ConstraintSpec(WORDS, path="structured_outputs") if chance.random() < 0.2 else None
        request = GenerationRequest(
            f"r{index}",
            prompt,
            replace(chance.choice((GREEDY, WARM, PENALISED)), seed=index),
            chance.randrange(1, 40),
            frozenset() if spec is None else stops,
            boundaries=(Boundary(length, BoundaryKind.MESSAGE),),
            num_choices=1 if spec is not None else chance.choice((1, 1, 1, 2)),
            num_logprobs=chance.choice((None, None, 2)),
            constraint=spec,
            max_draft_tokens=chance.choice((None, None, 0, 2)),
            priority=chance.choice((0, 0, 1)),
        )
        leaves_after = chance.randrange(1, 5) if chance.random() < 0.2 else None
        planned.append(Planned(request, chance.uniform(0.0, 0.3), leaves_after))
    return planned


async def answer(engine: Engine, request: GenerationRequest, leaves_after: int | None) -> list[list[int]] | None:
    """The tokens of each choice; None for a client that leaves."""
    stream = await engine.submit(request)
    said: list[list[int]] = [[] for _ in range(request.num_choices)]
    num_outputs = 0
    try:
        async for output in stream:
            said[output.choice] += output.token_ids
            num_outputs += 1
            if num_outputs == leaves_after:
                return None
    finally:
        await stream.aclose()
    return said


async def run(split: Engine, whole: Engine, planned: list[Planned]) -> dict[str, object]:
    tasks = []
    for number, each in enumerate(planned):
        await asyncio.sleep(each.after_s)
        if number % 15 == 14:
            await split.clear_cache()
        tasks.append(asyncio.create_task(answer(split, each.request, each.leaves_after)))
    answers = await asyncio.gather(*tasks)
    expected = [await answer(whole, each.request, None) for each in planned]
    staying = [number for number, each in enumerate(planned) if answers[number] is not None]
    status = await split.status()
    assert status.cache is not None
    return {
        "num_compared": len(staying),
        "different": [number for number in staying if answers[number] != expected[number]],
        "num_running": status.num_running,
        "num_preemptions": status.counters.num_preemptions,
        "num_cached": status.cache.num_hit_tokens,
        "num_drafted": status.counters.drafts.num_drafted,
        "kernels": [line for line in split.model.report if line.startswith("kernels: ")],
    }


def sizes(sent: list[tuple[tuple[str, Any], int]]) -> dict[str, int]:
    """The most bytes that rank 0 sent for a step and for a request, besides 4 for each token of a step's chunks that
    is not of the prompt, and 5 for each of a request's prompt."""
    steps = [0]
    requests = []
    for (method, args), num_bytes in sent:
        if method == "request":
            requests.append(num_bytes - 5 * len(args[1].prompt))
            continue
        if method == "execute":
            steps.append(0)
        steps[-1] += num_bytes
    return {"most_step_bytes": max(steps[1:]), "most_request_bytes": max(requests)}


def record(ranks: Ranks) -> list[tuple[tuple[str, Any], int]]:
    """What rank 0 sends from now on, with its bytes."""
    sent: list[tuple[tuple[str, Any], int]] = []
    tell = ranks.tell

    def recorded(message: tuple[str, Any]) -> None:
        before = ranks.traffic.num_bytes
        tell(message)
        sent.append((message, ranks.traffic.num_bytes - before))

    ranks.tell = recorded  # type: ignore[method-assign]
    return sent


def main(kernels: str, model: str, seed: int, number: int) -> None:
    if kernels == "cuda":
        use_cudas_layers()
        start.RANK_MODULE = "ranks.fused_rank"
    config = Config(
        model,
        ModelConfig(vision="off", self_check=False),
        EngineConfig(max_num_seqs=4, prefill_chunk=64, gpu_memory_utilization=0.5),
    )
    ranks = start.start_ranks(read_layout("2", "ring"))
    ranks.tell(config)
    text = configured_text_pipeline(config)
    whole = Engine.launch(replace(config, engine=replace(config.engine, prefix_cache="off")), text.constraints)
    memory.state_budget = lambda memory_bytes, utilization: STATE_BYTES  # type: ignore[assignment]
    # drafts seem to cost nothing, on all ranks, so that there are always some
    prepare.LeadingRunner.step_s = property(lambda runner: 1.0)  # type: ignore[assignment]
    split = Engine.launch(config, text.constraints, ranks=ranks)
    sent = record(ranks)
    planned = plan(seed, number, whole.model.tokens.end, frozenset(whole.model.eos_token_ids))
    found = asyncio.run(run(split, whole, planned))
    found |= sizes(sent)
    split.stop()
    whole.stop()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
