"""`python -m benchmarks.model`: prefill and decode of a published shape, ours and mlx-lm's on the same weights."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import mlx.core as mx

from benchmarks.command import add_json, exit_code, write_report
from benchmarks.figures import Figure, Side, as_json, line, table
from benchmarks.shapes import SHAPES, config_of, copy_bytes_per_s, random_model, state_bytes, weight_bytes
from benchmarks.steps import OurSteps, PeerSteps
from headrace.backend.device import current, device_kind
from headrace.backend.kernels import Kernels
from headrace.bench.report import versions
from headrace.cli.bench import make_folder
from headrace.config_loading import Parser
from headrace.engine.memory import sample_state
from headrace.engine.prepare import PREFILL_CHUNK
from headrace.models.levels import choose_levels
from headrace.models.packed import PackedModel

_SLOW_PEER_TOKENS = 512
"""mlx-lm 0.32 has no kernel for gated delta nets on CUDA and goes through them token by token, at some 400 tokens/s."""


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What is measured.

    prefill: lengths of prompts. decode: rows and the tokens behind each of them. num_repeats: of each prefill.
    num_steps: of each decode measure. sides: ours before the other, which needs the model without our adapters.
    """

    shape: str
    num_layers: int | None = None
    dtype: str = "bfloat16"
    bits: int | None = None
    prefill: tuple[int, ...] = (2048, 8192)
    decode: tuple[tuple[int, int], ...] = ((1, 1024), (8, 1024), (32, 1024), (8, 8192))
    num_repeats: int = 3
    num_steps: int = 20
    sides: tuple[Side, ...] = ("headrace", "mlx-lm")


def measure(plan: ModelPlan, on_figure: Callable[[Figure], None], say: Callable[[str], None]) -> list[Figure]:
    """Build the model and measure it. on_figure: gets each figure as soon as it is there.

    Raises ConfigError for a shape or a number of layers that don't exist.
    """
    config = config_of(plan.shape, plan.num_layers)
    mx.random.seed(0)
    model = random_model(config, dtype=plan.dtype, bits=plan.bits)
    kind = device_kind()
    packed = PackedModel(model, choose_levels(model), Kernels("fast", kind))
    cost = sample_state(packed).cost()
    say(f"weights: {weight_bytes(model, {**config, 'num_experts': None}, 1) / 1e9:.2f} GB")
    for words in packed.layer_lines:
        say(words)
    figures: list[Figure] = []

    def take(figure: Figure, num_rows: int, context: int) -> None:
        num_bytes = weight_bytes(model, config, num_rows) + state_bytes(cost, num_rows, context)
        figures.append(replace(figure, num_bytes=num_bytes) if context else figure)
        on_figure(figures[-1])

    for side in plan.sides:
        if side == "headrace":
            steps: OurSteps | PeerSteps = OurSteps(
                packed, config["vocab_size"], PREFILL_CHUNK[kind], runs_ahead=packed.launches_ahead
            )
        else:
            packed.restore()
            is_slow = kind == "cuda" and "linear_num_value_heads" in config
            steps = PeerSteps(model, config["vocab_size"], _SLOW_PEER_TOKENS if is_slow else None)
        for figure, num_rows, context in figures_of(steps, plan):
            take(figure, num_rows, context)
    return figures


def figures_of(steps: OurSteps | PeerSteps, plan: ModelPlan) -> Iterator[tuple[Figure, int, int]]:
    """With the rows and their context; 1 and 0 for a prefill."""
    for num_tokens in plan.prefill:
        yield steps.prefill(num_tokens, plan.num_repeats), 1, 0
    for num_rows, context in plan.decode:
        yield steps.decode(num_rows, context, plan.num_steps), num_rows, context


_ABOUT = """Measure prefill and decode of a published shape on this device, without a server: ours and mlx-lm's in one
process, on the same weights. Figures are medians, with the smallest and the largest."""


def run(argv: Sequence[str]) -> None:
    """Prints each figure as soon as it is there, and a table in the end. Raises ConfigError."""
    parser = plan_parser("benchmarks.model", _ABOUT)
    sides = parser.add_mutually_exclusive_group()
    for flag, side in (("--ours-only", "headrace"), ("--peer-only", "mlx-lm")):
        sides.add_argument(flag, dest="sides", action="store_const", const=(side,), help=f"measure {side} alone")
    given = parser.parse_args(list(argv))
    plan = plan_of(given)
    config_of(plan.shape, plan.num_layers)
    if given.json is not None:
        make_folder(given.json)
    here = current()
    copied = copy_bytes_per_s()
    library_versions = versions()
    copies = f"copies {copied / 1e9:.0f} GB/s"
    print(f"{here.name} ({here.kind}), MLX {library_versions['mlx']}, mlx-lm {library_versions['mlx-lm']}, {copies}")
    figures: list[Figure] = []

    def take(figure: Figure) -> None:
        figures.append(figure)
        print(line(figure, copied), flush=True)

    try:
        measure(plan, take, lambda words: print(words, flush=True))
    finally:
        if figures:
            print(f"\n{table(figures, copied)}", flush=True)
        if given.json is not None:
            found = {"copy_bytes_per_s": copied, "figures": [as_json(figure, copied) for figure in figures]}
            write_report(given.json, "benchmarks.model", argv, device=here.name, **found)


def plan_parser(module: str, about: str) -> argparse.ArgumentParser:
    """For a command that measures a `ModelPlan`."""
    defaults = ModelPlan("")
    parser = Parser(prog=f"python -m {module}", description=about, allow_abbrev=False)
    parser.add_argument("--shape", metavar="NAME", required=True, help=f"one of {', '.join(SHAPES)}")
    parser.add_argument(
        "--random", action="store_true", required=True, help="draw the weights at random, the only kind there is"
    )
    parser.add_argument(
        "--layers", metavar="N", dest="num_layers", type=int, help="as many layers of the shape (default: all)"
    )
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default=defaults.dtype, help="default: %(default)s"
    )
    parser.add_argument(
        "--quantize", metavar="BITS", dest="bits", type=int, choices=(2, 3, 4, 5, 6, 8), help="in groups of 64"
    )
    shown = ",".join(map(str, defaults.prefill))
    parser.add_argument(
        "--prefill",
        metavar="N,…",
        type=_numbers,
        default=defaults.prefill,
        help=f"tokens of prompts, or none (default: {shown})",
    )
    shown = ",".join(f"{rows}@{context}" for rows, context in defaults.decode)
    parser.add_argument(
        "--decode",
        metavar="ROWS@CONTEXT,…",
        type=_rows_at_context,
        default=defaults.decode,
        help=f"rows and the tokens behind each of them, or none (default: {shown})",
    )
    for flag, name, text in (
        ("--repeats", "num_repeats", "timed repeats of each prefill"),
        ("--steps", "num_steps", "timed steps of each decode measure"),
    ):
        default = getattr(defaults, name)
        parser.add_argument(
            flag, metavar="N", dest=name, type=_positive, default=default, help=f"{text} (default: {default})"
        )
    add_json(parser)
    return parser


def plan_of(given: argparse.Namespace) -> ModelPlan:
    names = [each.name for each in fields(ModelPlan)]
    return ModelPlan(**{name: value for name, value in vars(given).items() if name in names and value is not None})


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number over 0")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    return () if text == "none" else tuple(map(_positive, text.split(",")))


def _rows_at_context(text: str) -> tuple[tuple[int, int], ...]:
    if text == "none":
        return ()
    pairs = [part.partition("@") for part in text.split(",")]
    return tuple((_positive(rows), _positive(context)) for rows, _, context in pairs)


main = partial(exit_code, run)


if __name__ == "__main__":
    sys.exit(main())
