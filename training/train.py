"""The training loop: one long, one short and one media batch per step; resumable; stops by the clock.

    python -m training.train OUT_FOLDER --total-minutes 20 --stop-after-s 560 [--resume FOLDER] [--draft]

The learning rate follows the share of `--total-minutes` trained so far, over all calls.
"""

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training import checkpoint
from training.batches import Feed
from training.export import load_exported, new_model
from training.forward import place
from training.model import Miniature, compile_layers, initialise
from training.optimizer import Optimizer
from training.step import GradientStep

WARMUP_STEPS, STEADY_SHARE, LAST_SHARE = 150, 0.55, 0.01
WORKERS = {"long": 4, "short": 4, "media": 7}
DRAFT_WORKERS = {"long": 6, "short": 9}
POLISH_WORKERS = {"long": 3, "short": 9, "media": 3}
KIND_WEIGHTS = {"long": 1.0, "short": 1.0, "media": 0.8}
LOG_EVERY = 100


def rate_share(step: int, trained_share: float) -> float:
    """Warm up over the first steps, hold, then fall linearly to `LAST_SHARE` at the end."""
    falling = (1 - trained_share) / (1 - STEADY_SHARE)
    return min(1.0, (step + 1) / WARMUP_STEPS, max(LAST_SHARE, falling))


def kinds_of_step(arguments: argparse.Namespace, step: int) -> tuple[str, ...]:
    """The batches of a step. Polishing takes two short ones, and long and media ones by turns."""
    if arguments.draft:
        return "long", "short"
    return ("short", "short", ("long", "media")[step % 2]) if arguments.polish else ("long", "short", "media")


@dataclass(slots=True)
class Log:
    """Running means between two lines of the log, kept on the device until printed."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)

    def add(self, kind: str, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            key = f"{kind}.{name}"
            self.sums[key] = self.sums.get(key, torch.zeros_like(value)) + value.detach()
            self.counts[key] = self.counts.get(key, 0) + 1

    def line(self, **facts: Any) -> None:
        means = {key: round(float(value) / self.counts[key], 4) for key, value in self.sums.items()}
        self.lines.append({**facts, **means})
        print(" ".join(f"{key} {value}" for key, value in self.lines[-1].items()), flush=True)
        self.sums, self.counts = {}, {}


def train(arguments: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workers = DRAFT_WORKERS if arguments.draft else POLISH_WORKERS if arguments.polish else WORKERS
    feed = Feed(workers, f"{arguments.seed} {arguments.piece}", arguments.tokenizer)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(arguments.seed)
    model = new_model(arguments.draft)
    initialise(model, arguments.seed)
    if arguments.start:
        model.load_state_dict(load_exported(arguments.start).state_dict())
    model.to(device)
    optimizer, log = Optimizer(model), Log()
    trained_s = arguments.from_share * arguments.total_minutes * 60
    if arguments.resume:
        moments, progress = checkpoint.load(arguments.resume, model)
        optimizer.restore(moments, progress["num_steps"])
        trained_s, log.lines = progress["trained_s"], progress["log"]
    if device.type == "cuda" and not arguments.eager:
        compile_layers()
    try:
        trained_s = loop(arguments, model, optimizer, feed, log, device, trained_s)
    finally:
        feed.close()
    progress = {
        "num_steps": optimizer.num_steps,
        "trained_s": trained_s,
        "seed": arguments.seed,
        "fresh": feed.num_fresh,
        "repeated": feed.num_repeated,
        "log": log.lines,
    }
    checkpoint.save(arguments.out, model, optimizer.moments(), progress)


def loop(
    arguments: argparse.Namespace,
    model: Miniature,
    optimizer: Optimizer,
    feed: Feed,
    log: Log,
    device: torch.device,
    trained_s: float,
) -> float:
    """Steps until the clock runs out; returns the seconds trained in all calls (compiling not counted)."""
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    pads = (tokenizer.token_to_id("<|image_pad|>"), tokenizer.token_to_id("<|video_pad|>"))
    generator = torch.Generator(device).manual_seed(arguments.seed + optimizer.num_steps)
    total_s, started, before = arguments.total_minutes * 60, arguments.started, trained_s
    gradient_step = GradientStep(model, device, use_graphs=device.type == "cuda" and not arguments.no_graphs)
    clock = None
    while time.monotonic() - started < arguments.stop_after_s and trained_s < total_s:
        kinds = kinds_of_step(arguments, optimizer.num_steps)
        for kind in kinds:
            placed = place(feed.take(kind), device, pads, generator)
            found = gradient_step(placed, KIND_WEIGHTS[kind] / len(kinds))
            log.add(kind, found)
        optimizer.step(rate_share(optimizer.num_steps, trained_s / total_s))
        torch._foreach_zero_([parameter.grad for parameter in model.parameters()])
        if optimizer.num_steps % LOG_EVERY == 0 or clock is None:
            if device.type == "cuda":
                torch.cuda.synchronize()
            clock = clock or time.monotonic()
            trained_s = before + time.monotonic() - clock
            log.line(
                step=optimizer.num_steps,
                trained_s=round(trained_s, 1),
                share=round(rate_share(optimizer.num_steps, trained_s / total_s), 3),
                repeated=sum(feed.num_repeated.values()),
            )
        else:
            trained_s = before + time.monotonic() - clock
    return trained_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--total-minutes", type=float, required=True)
    parser.add_argument("--stop-after-s", type=float, required=True, help="seconds from the program's start")
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--start", type=Path, help="begin with the weights of this exported folder (no moments)")
    parser.add_argument("--from-share", type=float, default=0.0, help="where in the schedule to begin with --start")
    parser.add_argument("--draft", action="store_true")
    parser.add_argument("--polish", action="store_true", help="a finishing run with more of the short jobs")
    parser.add_argument("--eager", action="store_true", help="do not compile the layers")
    parser.add_argument("--no-graphs", action="store_true", help="do not replay text batches as CUDA graphs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--piece", default="a", help="names the data stream of this call, so that no piece repeats another"
    )
    parser.add_argument("--tokenizer", type=Path, default=Path("src/headrace/miniature/tokenizer.json"))
    arguments = parser.parse_args()
    arguments.started = time.monotonic()
    train(arguments)


if __name__ == "__main__":
    main()
