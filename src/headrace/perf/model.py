"""`headrace bench model`: prefill and decode of a shape, ours and mlx-lm's on the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx

from headrace.backend.device import device_kind
from headrace.backend.kernels import Kernels
from headrace.engine.engine import PREFILL_CHUNK
from headrace.engine.memory import state_cost
from headrace.models.install import choose_levels
from headrace.models.packed import PackedModel
from headrace.perf.ours import OurSteps
from headrace.perf.peer import PeerSteps
from headrace.perf.shapes import config_of, random_model
from headrace.perf.timing import Figure, Side
from headrace.perf.traffic import state_bytes, weight_bytes

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
    cost = state_cost(packed, None)
    say(f"weights: {weight_bytes(model, {**config, 'num_experts': None}, 1) / 1e9:.2f} GB")
    for line in packed.layer_lines:
        say(line)
    figures: list[Figure] = []

    def take(figure: Figure, num_rows: int, context: int) -> None:
        num_bytes = weight_bytes(model, config, num_rows) + state_bytes(cost, num_rows, context)
        figures.append(replace(figure, num_bytes=num_bytes) if context else figure)
        on_figure(figures[-1])

    for side in plan.sides:
        if side == "headrace":
            steps: OurSteps | PeerSteps = OurSteps(
                packed, config["vocab_size"], PREFILL_CHUNK[kind], runs_ahead=packed.is_compiled
            )
        else:
            packed.restore()
            is_slow = kind == "cuda" and "linear_num_value_heads" in config
            steps = PeerSteps(model, config["vocab_size"], _SLOW_PEER_TOKENS if is_slow else None)
        for num_tokens in plan.prefill:
            take(steps.prefill(num_tokens, plan.num_repeats), 1, 0)
        for num_rows, context in plan.decode:
            take(steps.decode(num_rows, context, plan.num_steps), num_rows, context)
    return figures
