"""Tokens per second with and without drafts, by job and by the number of rows.

    python -m training.draft_speed [--jobs talk random] [--rows 1 4 8] [--tokens 256] [--repeats 5] [--model FOLDER]
        [--draft-model miniature-draft]

Each row asks for one answer after another, each to its own end, so that only text that the model has learned counts,
until the rows have `--tokens` tokens each. Each answer is timed from its first token to its last. Each figure is the
median of ratios within one run: the same requests without drafts and with them, in turn, after rounds of both as
warm-up. Text of the miniature's own jobs is easy to draft for; text after random prompts is hard, and goes on to the
full length. The drafts are the prediction head's, or with --draft-model that model's. --model can be what
`training.widened` makes of the miniature, which costs as much as a large model.
"""

import argparse
import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer

from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.models.built_in import MINIATURE
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
_PROMPTS = 6
"""Of each row, again and again: so they are in the prefix cache by the time that counts."""

_WARM_ROUNDS = 2


def prompt(job: str, tokenizer: Tokenizer, stream: random.Random) -> tuple[int, ...]:
    """A held-out conversation up to its last learned turn; for the job `random` 200 tokens drawn at random."""
    if job == "random":
        return tuple(stream.randrange(4000) for _ in range(200))
    encoded = encode(JOBS[job](stream), tokenizer, random.Random(0))
    return tuple(encoded.ids[: encoded.last_turn[0]].tolist())


class Round:
    """One round of answers: their decoding time, tokens behind the first ones, and what was drafted of them."""

    def __init__(self) -> None:
        self.num_tokens = self.num_drafted = self.num_accepted = self.num_outputs = 0
        self.seconds = 0.0

    @property
    def tokens_per_row_s(self) -> float:
        """Of a row while it decodes."""
        return self.num_tokens / self.seconds


async def answer(engine: Engine, request: GenerationRequest, total: Round) -> None:
    """Decode one request, counted into `total` from its second output on."""
    last: float | None = None
    async for output in await engine.submit(request):
        now = time.perf_counter()
        if last is not None:
            total.seconds += now - last
            total.num_tokens += len(output.token_ids)
            total.num_drafted += output.num_drafted
            total.num_accepted += output.num_accepted
            total.num_outputs += 1
        last = now


async def run(
    engine: Engine, prompts: Sequence[Sequence[tuple[int, ...]]], depth: int | None, num_tokens: int, stop: int
) -> Round:
    """Each row's prompts one after another, greedy, until all rows together have enough. stop: what ends an answer."""
    sampling = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0)
    total = Round()

    async def row(number: int) -> None:
        for turn, each in enumerate(itertools.cycle(prompts[number])):
            if total.num_tokens >= num_tokens * len(prompts):
                return
            name = f"{depth} {number} {turn}"
            await answer(
                engine,
                GenerationRequest(name, each, sampling, num_tokens, frozenset([stop]), max_draft_tokens=depth),
                total,
            )

    await asyncio.gather(*(row(number) for number in range(len(prompts))))
    return total


async def measure(engine: Engine, jobs: list[str], rows: list[int], num_tokens: int, repeats: int) -> None:
    """Print a line for each job and number of rows."""
    tokenizer = Tokenizer.from_file(str(MINIATURE / "tokenizer.json"))
    stop = tokenizer.token_to_id("<|im_end|>") or 0
    print(f"{'job':9} rows  plain tok/s  drafted tok/s  ratio  accepted  tokens a round")
    for job in jobs:
        for num_rows in rows:
            stream = random.Random(f"draft speed {job}")
            prompts = [[prompt(job, tokenizer, stream) for _ in range(_PROMPTS)] for _ in range(num_rows)]
            for depth in (0, None) * _WARM_ROUNDS:
                await run(engine, prompts, depth, num_tokens, stop)
            pairs = [
                (await run(engine, prompts, 0, num_tokens, stop), await run(engine, prompts, None, num_tokens, stop))
                for _ in range(repeats)
            ]
            ratio = statistics.median(drafted.tokens_per_row_s / plain.tokens_per_row_s for plain, drafted in pairs)
            plain_s = num_rows * statistics.median(plain.tokens_per_row_s for plain, _ in pairs)
            drafted_s = num_rows * statistics.median(drafted.tokens_per_row_s for _, drafted in pairs)
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
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", default="miniature")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--draft-model", default=None)
    given = parser.parse_args()
    engine = Engine.launch(
        Config(given.model, ModelConfig(dtype=given.dtype), EngineConfig(draft_model=given.draft_model))
    )
    print("\n".join(engine.model.report))
    asyncio.run(measure(engine, given.jobs, given.rows, given.tokens, given.repeats))
    engine.stop()


if __name__ == "__main__":
    main()
