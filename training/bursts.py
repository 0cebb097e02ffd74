"""Requests at once, straight at the engine: where the time of a served step goes, without HTTP.

    python -m training.bursts [--model FOLDER] [--mtp off] [--rounds 2] [REQUESTS:PROMPT:TOKENS ...]

Greedy, prompts of random tokens. Each round asks new prompts of the same sizes; the first one builds what its steps
need. Prints tokens per second, the time to the first token, and the steps by kind: how many, median and sum.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.engine.runner import Runner
from headrace.types.request import GenerationRequest, SamplingParams
from headrace.types.step import StepPlan, StepResult

GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0)
Burst = tuple[int, int, int]
"""Requests, tokens of each prompt and of each answer."""


async def answer(engine: Engine, name: str, prompt: tuple[int, ...], num_tokens: int) -> float:
    """Seconds to the first token."""
    started, first = time.perf_counter(), 0.0
    async for _ in await engine.submit(GenerationRequest(name, prompt, GREEDY, num_tokens)):
        first = first or time.perf_counter() - started
    return first


async def run(engine: Engine, bursts: Sequence[Burst], num_rounds: int, steps: list[tuple[bool, float]]) -> None:
    """Print a line for each burst of each round, and its steps."""
    for turn in range(num_rounds):
        for num_requests, num_prompt, num_tokens in bursts:
            steps.clear()
            stream, started = random.Random(f"{turn} {num_requests} {num_prompt}"), time.perf_counter()
            prompts = [tuple(stream.randrange(4000) for _ in range(num_prompt)) for _ in range(num_requests)]
            names = [f"{turn} {num_prompt} {number}" for number in range(num_requests)]
            asked = (answer(engine, name, prompt, num_tokens) for name, prompt in zip(names, prompts, strict=True))
            firsts = await asyncio.gather(*asked)
            seconds = time.perf_counter() - started
            print(
                f"round {turn}: {num_requests} at once, {num_prompt} + {num_tokens} tokens: "
                f"{num_requests * num_tokens / seconds:.0f} tokens/s, first token after {max(firsts) * 1e3:.0f} ms"
            )
            by_kind: dict[bool, list[float]] = defaultdict(list)
            for has_prompts, step_s in steps:
                by_kind[has_prompts].append(step_s)
            for has_prompts, times in sorted(by_kind.items()):
                kind = "with prompts" if has_prompts else "decoding"
                median = statistics.median(times) * 1e3
                print(f"  {len(times)} steps {kind}: median {median:.1f} ms, {sum(times):.2f} s", flush=True)


def main() -> None:
    """Read the options and measure on the device that MLX has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bursts", nargs="*", default=["1:30:128", "8:30:128", "32:30:128"], metavar="BURST")
    parser.add_argument("--model", default="miniature")
    parser.add_argument("--mtp", default="auto")
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    bursts = [(requests, prompt, tokens) for requests, prompt, tokens in (map(int, b.split(":")) for b in given.bursts)]
    steps: list[tuple[bool, float]] = []
    execute = Runner.execute

    def timed(self: Runner, plan: StepPlan, requests: Mapping[str, GenerationRequest]) -> StepResult:
        started = time.perf_counter()
        result = execute(self, plan, requests)
        steps.append((plan.num_prompt_tokens > 0, time.perf_counter() - started))
        return result

    setattr(Runner, "execute", timed)  # noqa: B010
    knobs = EngineConfig(mtp=given.mtp, max_num_seqs=max(32, *(burst[0] for burst in bursts)))
    engine = Engine.launch(Config(given.model, ModelConfig(), knobs))
    while not engine.warm_up_status().is_over and engine.health() is None:
        time.sleep(0.1)
    print("\n".join(engine.model.report))
    asyncio.run(run(engine, bursts, given.rounds, steps))
    engine.stop()


if __name__ == "__main__":
    main()
