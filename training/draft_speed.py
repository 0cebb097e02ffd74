"""What drafts are worth: tokens per second with and without them, by job and by the number of rows.

    python -m training.draft_speed [--jobs talk random] [--rows 1 4 8] [--tokens 96] [--repeats 3] [--model FOLDER]

Each figure is the median of ratios within one run: the same requests without drafts and with them, in turn. Text of the
miniature's own jobs is easy to draft for; random prompts give text that is hard to. Of a larger model's costs tells
what `training.widened` makes of the miniature, as --model.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

import headrace
from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.types.request import GenerationRequest, SamplingParams
from training.chat import encode
from training.jobs import copying, recall, talk, thinking, tools
from training.sample import Sample

JOBS: dict[str, Callable[[random.Random], Sample]] = {
    "recall": lambda stream: recall.make(stream, True, 440, stream.random()),
    "tools": lambda stream: tools.make(stream, True, "call"),
    "thinking": lambda stream: thinking.make(stream, True, True),
    "copying": lambda stream: copying.make(stream, True),
    "talk": lambda stream: talk.make(stream, True),
}
FOLDER = Path(headrace.__file__).parent / "miniature"


def prompt(job: str, tokenizer: Tokenizer, stream: random.Random) -> tuple[int, ...]:
    """A held-out conversation up to its last learned turn; for the job `random` 200 tokens drawn at random."""
    if job == "random":
        return tuple(stream.randrange(4000) for _ in range(200))
    encoded = encode(JOBS[job](stream), tokenizer, random.Random(0))
    last = int(np.flatnonzero(encoded.learned)[-1])
    first = int(np.flatnonzero(~encoded.learned[:last])[-1]) + 1
    return tuple(encoded.ids[:first].tolist())


class Round:
    """One batch of answers: its decoding time, tokens, and what was drafted of them."""

    def __init__(self) -> None:
        self.num_tokens = self.num_drafted = self.num_accepted = self.num_outputs = 0
        self.first_s = self.last_s = 0.0

    @property
    def tokens_per_s(self) -> float:
        """From the first token of the batch to its last."""
        return self.num_tokens / (self.last_s - self.first_s)


async def answer(engine: Engine, request: GenerationRequest, told: Round) -> None:
    """Decode one request, counted into `told` from its second output on."""
    is_first = True
    async for output in await engine.submit(request):
        now = time.perf_counter()
        if is_first:
            is_first, told.first_s = False, max(told.first_s, now)
            continue
        told.num_tokens += len(output.token_ids)
        told.num_drafted += output.num_drafted
        told.num_accepted += output.num_accepted
        told.num_outputs += 1
        told.last_s = max(told.last_s, now)


async def run(engine: Engine, prompts: list[tuple[int, ...]], name: str, depth: int | None, num_tokens: int) -> Round:
    """All prompts at once, greedy, to the same length."""
    sampling = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0)
    told = Round()
    await asyncio.gather(
        *(
            answer(engine, GenerationRequest(f"{name} {n}", each, sampling, num_tokens, max_draft_tokens=depth), told)
            for n, each in enumerate(prompts)
        )
    )
    return told


async def measure(engine: Engine, jobs: list[str], rows: list[int], num_tokens: int, repeats: int) -> None:
    """Print a line for each job and number of rows."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    print(f"{'job':9} rows  plain tok/s  drafted tok/s  ratio  accepted  tokens a round")
    for job in jobs:
        for num_rows in rows:
            stream = random.Random(f"draft speed {job}")
            prompts = [prompt(job, tokenizer, stream) for _ in range(num_rows)]
            for warm in (0, None, 0, None):
                await run(engine, prompts, f"warm {warm}", warm, num_tokens)
            pairs = [
                (
                    await run(engine, prompts, "plain", 0, num_tokens),
                    await run(engine, prompts, "drafted", None, num_tokens),
                )
                for _ in range(repeats)
            ]
            ratio = statistics.median(drafted.tokens_per_s / plain.tokens_per_s for plain, drafted in pairs)
            plain_s = statistics.median(plain.tokens_per_s for plain, _ in pairs)
            drafted_s = statistics.median(drafted.tokens_per_s for _, drafted in pairs)
            last = pairs[-1][1]
            accepted = last.num_accepted / last.num_drafted if last.num_drafted else float("nan")
            each = last.num_tokens / last.num_outputs
            print(
                f"{job:9} {num_rows:4}  {plain_s:11.1f}  {drafted_s:13.1f}  {ratio:5.2f}  {accepted:8.2f}  {each:6.2f}",
                flush=True,
            )


def main() -> None:
    """Read the options and measure on the device that MLX has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*JOBS, "random"]
    parser.add_argument("--jobs", nargs="+", default=names, choices=names)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", default="miniature")
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args()
    engine = Engine.launch(Config(given.model, ModelConfig(dtype=given.dtype), EngineConfig()))
    print("\n".join(engine.model.report))
    asyncio.run(measure(engine, given.jobs, given.rows, given.tokens, given.repeats))
    engine.stop()


if __name__ == "__main__":
    main()
