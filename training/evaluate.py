"""Measures the shipped files: the jobs, recall, MTP acceptance, the draft model's recall and its attention.

    python -m training.evaluate [--folder src/headrace/miniature] [--count 200] [--out table.json]

Exactness is judged without decoding: greedy decoding says the reference, to the last token, if and only if the model's
first choice at every position of the reference is the reference's next token. So a job's figure counts whole learned
turns (thought, answer, end mark) that come out to the letter, and is a lower bound where other words would do too.
Drafts are counted twice: along the references, and ("loop") in a real draft-verify loop over the model's own answers.
"""

import argparse
import itertools
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from training.batches import collate, grouped
from training.chat import Encoded, encode
from training.export import load_exported
from training.forward import following, place, run
from training.importance import kept
from training.jobs import clips, copying, pictures, recall, talk, thinking, tools
from training.model import Miniature
from training.sample import Sample
from training.speculation import speculation_counts

RECALL_LENGTHS, RECALL_DEPTHS = (512, 1024, 2048, 4096, 8192), (0.0, 0.1, 0.5, 0.9, 1.0)
DRAFT_LENGTHS = (2048, 4096)
JOBS: dict[str, Callable[[random.Random], Sample]] = {
    "tools: call": lambda stream: tools.make(stream, True, "call"),
    "tools: parallel calls": lambda stream: tools.make(stream, True, "parallel"),
    "tools: use the result": lambda stream: tools.make(stream, True, "result"),
    "tools: decline": lambda stream: tools.make(stream, True, "decline"),
    "thinking: on": lambda stream: thinking.make(stream, True, True),
    "thinking: off": lambda stream: thinking.make(stream, True, False),
    "images": lambda stream: pictures.make(stream, True),
    "video": lambda stream: clips.make(stream, True),
    "copying": lambda stream: copying.make(stream, True),
    "plain talk": lambda stream: talk.make(stream, True),
}
PARTS = ("jobs", "recall", "loop", "draft")
ROWS_TOKENS = {"cuda": 65_536, "cpu": 4_096}  # tokens of one forward pass


def held_out(name: str, count: int) -> list[Sample]:
    """The fixed held-out set of a job."""
    stream = random.Random(f"evaluation {name}")
    return [JOBS[name](stream) for _ in range(count)]


def held_out_logs(length: int, depth: float, count: int, thinking: bool | None = None) -> list[Sample]:
    """Logs of nearly `length` tokens (never more) with one question at a depth; half of them think if None."""
    stream = random.Random(f"evaluation recall {length} {depth}")
    return [recall.make(stream, True, int(length * 0.86), depth, thinking) for _ in range(count)]


def _last_turn_learned(encoded: Encoded) -> Encoded:
    begin, _ = encoded.last_turn
    return replace(encoded, learned=encoded.learned & (np.arange(len(encoded.ids)) >= begin))


class Judge:
    """One model on one device, and the counts it gives for samples."""

    def __init__(self, model: Miniature, tokenizer: Tokenizer, device: torch.device) -> None:
        self.model, self.tokenizer, self.device = model.to(device), tokenizer, device
        self.pads = (tokenizer.token_to_id("<|image_pad|>"), tokenizer.token_to_id("<|video_pad|>"))

    @torch.no_grad()
    def judge(self, samples: list[Sample]) -> dict[str, int]:
        """Counts: last turns and exact ones; drafts tried and accepted at depth 1 and 2 on the exact turns."""
        stream = random.Random(0)
        rows = [(_last_turn_learned(encode(sample, self.tokenizer, stream)), sample) for sample in samples]
        totals = dict.fromkeys(("samples", "exact", "tried_1", "accepted_1", "tried_2", "accepted_2"), 0)
        for length, batch in grouped(rows, ROWS_TOKENS[self.device.type]):
            packed = collate("judged", batch, length, len(batch), batch[0][1].size)
            for key, value in self._counts(place(packed, self.device, self.pads, None)).items():
                totals[key] += value
        return totals

    def _counts(self, placed: Any) -> dict[str, int]:
        hidden, layout = run(self.model, placed)
        shape = (placed.num_rows, -1)
        choice = self.model.logits(hidden.trunk).argmax(-1)
        learned = following(placed.learned, 1, layout)
        hit = (choice == following(placed.ids, 1, layout)) | ~learned
        exact = hit.reshape(shape).all(1)
        counts = {"samples": len(exact), "exact": int(exact.sum())}
        if hidden.first is None:
            return counts
        # A draft made at token t is for t + 2; it is accepted if it is what the trunk will choose there.
        tried = learned & following(placed.learned, 2, layout)
        accepted = tried & (self.model.logits(hidden.first).argmax(-1) == following(choice, 1, layout))
        counts |= {"tried_1": int(tried.sum()), "accepted_1": int(accepted.sum())}
        if hidden.second is not None:
            reached = accepted & following(placed.learned, 3, layout)
            second = reached & (self.model.logits(hidden.second).argmax(-1) == following(choice, 2, layout))
            counts |= {"tried_2": int(reached.sum()), "accepted_2": int(second.sum())}
        return counts


def job_table(judge: Judge, count: int) -> dict[str, dict[str, int]]:
    """Every job but recall; a text-only model skips pictures and clips."""
    sees = hasattr(judge.model.model, "visual")
    return {name: judge.judge(held_out(name, count)) for name in JOBS if sees or name not in ("images", "video")}


def recall_table(judge: Judge, count: int, longest: int) -> dict[str, dict[str, int]]:
    return {
        f"recall {length} at {depth}": judge.judge(held_out_logs(length, depth, count))
        for length in RECALL_LENGTHS
        if length <= longest
        for depth in RECALL_DEPTHS
    }


def speculation_table(judge: Judge, count: int, longest: int) -> dict[str, dict[str, int]]:
    """The reference draft-verify loop over the jobs, and over logs of 2k and 4k tokens."""
    made = {name: held_out(name, count) for name in JOBS}
    made |= {
        f"recall {length}": [s for depth in RECALL_DEPTHS for s in held_out_logs(length, depth, -(-count // 10))]
        for length in DRAFT_LENGTHS
        if length <= longest
    }
    budget = ROWS_TOKENS[judge.device.type]
    table = {
        f"loop, {name}": speculation_counts(judge.model, judge.tokenizer, samples, judge.device, budget)
        for name, samples in made.items()
    }
    return table | {
        "loop, all": {key: sum(counts[key] for counts in table.values()) for key in table["loop, plain talk"]}
    }


def draft_table(judge: Judge, count: int, longest: int) -> dict[str, dict[str, int]]:
    """The draft model's own recall, and how often its attention keeps what was asked for."""
    table = {}
    lengths = [length for length in DRAFT_LENGTHS if length <= longest]
    for length, depth in itertools.product(lengths, RECALL_DEPTHS):
        table[f"draft recall {length} at {depth}"] = judge.judge(held_out_logs(length, depth, count))
        for thinks in (False, True):
            samples = held_out_logs(length, depth, count, thinks)
            found = [kept(judge.model, judge.tokenizer, sample, judge.device) for sample in samples]
            name = f"draft attention {length}, thinking {'on' if thinks else 'off'}, at {depth}"
            table[name] = {"samples": count} | {key: sum(row[key] for row in found) for key in found[0]}
    return table


def show(table: dict[str, dict[str, int]]) -> None:
    for name, counts in table.items():
        line = f"{name:40s}"
        for key in ("exact", "facts_kept", "names_and_facts_kept", "lines_kept"):
            if key in counts:
                line += f" {key} {counts[key]:4d} / {counts['samples']:4d}  {counts[key] / counts['samples']:6.1%}"
        for depth in (1, 2):
            if counts.get(f"tried_{depth}"):
                share = counts[f"accepted_{depth}"] / counts[f"tried_{depth}"]
                line += f"  draft {depth}: {counts[f'accepted_{depth}']} / {counts[f'tried_{depth}']} {share:6.1%}"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("src/headrace/miniature"))
    parser.add_argument("--count", type=int, default=200, help="held-out samples per job, and per length and depth")
    parser.add_argument("--recall-count", type=int, help="logs per length and depth, if not --count")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="measure only these parts")
    parser.add_argument("--longest", type=int, default=8192, help="longest log in tokens")
    parser.add_argument("--out", type=Path, help="also write the counts as JSON")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = Tokenizer.from_file(str(arguments.folder / "tokenizer.json"))
    judge = Judge(load_exported(arguments.folder), tokenizer, device)
    num_logs = arguments.recall_count or arguments.count
    table: dict[str, dict[str, int]] = {}
    if "jobs" in arguments.only:
        table |= job_table(judge, arguments.count)
    if "recall" in arguments.only:
        table |= recall_table(judge, num_logs, arguments.longest)
    if "loop" in arguments.only:
        table |= speculation_table(judge, arguments.count, arguments.longest)
    if "draft" in arguments.only:
        drafter = Judge(load_exported(arguments.folder / "draft"), tokenizer, device)
        table |= draft_table(drafter, num_logs, arguments.longest)
    show(table)
    if arguments.out:
        arguments.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
