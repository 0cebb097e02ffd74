"""Time to the first token of long prompts, with and without sparse prefill; how near sparse_options comes to its bound.

    python -m training.sparse_ttft [--lengths 8192 32768] [--keep 0.1 0.2] [--repeats 3] [--models tiny] [--clock cpu]

Times don't depend on what weights hold, so they are random: of the shapes of Qwen3.5-4B and, as its draft model,
Qwen3.5-0.8B, text models only, stored in bfloat16 and held as the engine holds such weights. Or they are the
bundled models', with `--models miniature`; with `--models tiny` all of it is tried in seconds. Requests go through the
engine, with its defaults, but without a prefix cache: each prompt is new to it. The bound is the share of
the whole prompt's time that the draft model takes to compute it when it is served alone, plus the share of the prompt
that the served model computes. SparseOptions asks for each prompt twice: the second time the draft model's work is
remembered, and the difference is what that work really takes, its continuation and the scores too.

Every time is printed when it is measured; the last lines are the medians, and from what length on sparse_options pays.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.qwen3_5 import Model, ModelArgs

from benchmarks.shapes import SHAPES as PUBLISHED
from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.types.request import GenerationRequest, SamplingParams, SparseOptions

_QWEN3_5_4B: Mapping[str, Any] = {
    **PUBLISHED["qwen3.5-4b"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
}

_TINY: Mapping[str, Any] = {**_QWEN3_5_4B, "vocab_size": 160, "head_dim": 16, "linear_num_key_heads": 2}
_TINY_TARGET = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_value_heads": 4}

SHAPES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "qwen3.5": (
        _QWEN3_5_4B,
        # https://huggingface.co/Qwen/Qwen3.5-0.8B
        {
            **_QWEN3_5_4B,
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 16,
        },
    ),
    "tiny": (
        {**_TINY, **_TINY_TARGET, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8},
        {**_TINY, **_TINY_TARGET, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4},
    ),
}
"""config.json of the served model and of the draft model."""


def save_random(config: Mapping[str, Any], folder: Path) -> Path:
    """A checkpoint of random weights in bfloat16, as mlx-lm draws them; gives the folder, which is made."""
    folder.mkdir()
    model = Model(ModelArgs.from_dict(dict(config)))
    parameters: Any = tree_flatten(model.parameters())
    weights = {name: array if name.endswith("A_log") else array.astype(mx.bfloat16) for name, array in parameters}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    # the two models have the same tokens, and nothing else is asked of them
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    return folder


def launch(model: str, draft: str | None) -> Engine:
    """An engine that thins whatever asks for it, by the draft model if there is one."""
    knobs: dict[str, Any] = {} if draft is None else {"sparse_draft": draft, "sparse_threshold": 1}
    engine = EngineConfig(prefix_cache="off", mtp="off", **knobs)
    # a check against mlx-lm's own forward says nothing of times, and takes long at these sizes
    return Engine.launch(Config(model, ModelConfig(self_check=False), engine))


@dataclass(frozen=True, slots=True)
class SelectedTokens:
    """One prompt: seconds to its first token, the same without the draft model's work, and the share computed."""

    first_s: float
    known_s: float
    computed: float


class Clock:
    """Asks an engine for first tokens, each time of a new prompt."""

    def __init__(self, engine: Engine, now: Callable[[], float]) -> None:
        self._engine = engine
        self._now = now
        self._random = np.random.default_rng(0)
        self._num_asked = 0

    async def whole(self, length: int) -> float:
        """Seconds to the first token behind a prompt that is computed whole."""
        return (await self._ask(self._prompt(length), None))[0]

    async def thinned(self, length: int, keep: float) -> SelectedTokens:
        """The same with sparse prefill. Raises RuntimeError if it was not applied."""
        prompt, sparse_options = self._prompt(length), SparseOptions(keep)
        first_s, num_kept = await self._ask(prompt, sparse_options)
        known_s, num_again = await self._ask(prompt, sparse_options)
        if num_kept != num_again or num_kept == length:
            raise RuntimeError(f"of {length} tokens {num_kept} were computed, and then {num_again}")
        return SelectedTokens(first_s, known_s, num_kept / length)

    def _prompt(self, length: int) -> tuple[int, ...]:
        return tuple(self._random.integers(0, self._engine.model.tokens.end, length).tolist())

    async def _ask(self, prompt: tuple[int, ...], sparse_options: SparseOptions | None) -> tuple[float, int]:
        """Seconds, and the tokens of the prompt that were computed."""
        self._num_asked += 1
        sampling = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0)
        request = GenerationRequest(str(self._num_asked), prompt, sampling, max_tokens=1, sparse_options=sparse_options)
        started = self._now()
        outputs = [output async for output in await self._engine.submit(request)]
        told_s = self._now() - started
        sparse = outputs[0].sparse
        return told_s, len(prompt) if sparse is None else sparse.num_kept


@dataclass(frozen=True, slots=True)
class Line:
    """Medians of one length and share. ratio: of the time with sparse prefill to that without, like the draft model's.

    alone: its time for the prompt when it is served alone. draft: what it takes to choose.
    """

    length: int
    keep: float
    whole_s: float
    thinned_s: float
    alone: float
    draft: float
    computed: float
    ratio: float

    @property
    def bound(self) -> float:
        return self.alone + self.computed

    def __str__(self) -> str:
        return (
            f"{self.length:6} {self.keep:5g} {self.whole_s:9.3f} {self.thinned_s:10.3f} {self.alone:11.3f} "
            f"{self.draft:9.3f} {self.computed:9.3f} {self.ratio:16.3f} {self.bound:6.3f} "
            f"{self.bound / self.ratio:9.2f}"
        )


HEADINGS = "length  keep   whole s  thinned s  draft alone  choosing  computed  thinned / whole  bound  of bound"


def median_line(length: int, keep: float, alone_s: float, wholes: list[float], rounds: list[SelectedTokens]) -> Line:
    """Ratios are taken within a round, in which one prompt was computed whole and one by sparse prefill."""
    pairs = list(zip(wholes, rounds, strict=True))
    return Line(
        length,
        keep,
        whole_s=statistics.median(wholes),
        thinned_s=statistics.median(one.first_s for one in rounds),
        alone=alone_s / statistics.median(wholes),
        draft=statistics.median((one.first_s - one.known_s) / whole for whole, one in pairs),
        computed=statistics.median(one.computed for one in rounds),
        ratio=statistics.median(one.first_s / whole for whole, one in pairs),
    )


def pays_from(lines: list[Line]) -> int | None:
    """The shortest length from which on sparse_options takes less time, at one share; None if it does at none."""
    found = None
    for line in sorted(lines, key=lambda line: -line.length):
        if line.ratio >= 1.0:
            break
        found = line.length
    return found


async def measure_whole(clock: Clock, lengths: list[int], repeats: int) -> dict[int, float]:
    """Medians of the seconds to the first token by length, printed as they come; the first of a length warms up."""
    medians = {}
    for length in lengths:
        medians[length] = statistics.median([await clock.whole(length) for _ in range(repeats + 1)][1:])
        print(f"{length} by the draft model alone: {medians[length]:.3f} s", flush=True)
    return medians


async def measure(
    clock: Clock, lengths: list[int], keeps: list[float], repeats: int, alone_s: Mapping[int, float]
) -> list[Line]:
    """Print every time as it comes; the first round of a length warms up. alone_s: the draft model's, by length."""
    lines = []
    for length in lengths:
        wholes: list[float] = []
        rounds: dict[float, list[SelectedTokens]] = {keep: [] for keep in keeps}
        for repeat in range(repeats + 1):
            whole_s = await clock.whole(length)
            print(f"{length} whole: {whole_s:.3f} s" + ("" if repeat else " (warm-up)"), flush=True)
            found = {}
            for keep in keeps:
                one = found[keep] = await clock.thinned(length, keep)
                print(f"{length} keep {keep:g}: {one.first_s:.3f} s, {one.known_s:.3f} s without the draft", flush=True)
            if repeat:
                wholes.append(whole_s)
                for keep, one in found.items():
                    rounds[keep].append(one)
        told = [median_line(length, keep, alone_s[length], wholes, rounds[keep]) for keep in keeps]
        print(HEADINGS, *told, sep="\n", flush=True)
        lines += told
    return lines


def main() -> None:
    """Read the options and measure on the device that MLX has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 32768, 65536])
    parser.add_argument("--keep", type=float, nargs="+", default=[0.1, 0.2, 0.3])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", default="qwen3.5", choices=[*SHAPES, "miniature"])
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: time of this process alone")
    parser.add_argument("--folder", help="where the weights are written, 11 GB; the system's for temporary files")
    given = parser.parse_args()
    now = time.process_time if given.clock == "cpu" else time.perf_counter
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        names = ["miniature", "miniature-draft"]
        if given.models in SHAPES:
            places = zip(names, SHAPES[given.models], strict=True)
            names = [str(save_random(shape, Path(folder) / name)) for name, shape in places]
            mx.clear_cache()
        engine = launch(names[1], None)
        alone_s = asyncio.run(measure_whole(Clock(engine, now), given.lengths, given.repeats))
        engine.stop()
        engine = launch(names[0], names[1])
    print("\n".join(engine.model.report), flush=True)
    lines = asyncio.run(measure(Clock(engine, now), given.lengths, given.keep, given.repeats, alone_s))
    engine.stop()
    print("\n" + HEADINGS, *lines, sep="\n")
    for keep in given.keep:
        length = pays_from([line for line in lines if line.keep == keep])
        print(f"keep {keep:g} pays " + ("at no length" if length is None else f"from {length} tokens on"))


if __name__ == "__main__":
    main()
