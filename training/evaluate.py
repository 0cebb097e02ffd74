"""Measures the shipped files: the table of jobs, MTP acceptance, the draft's recall and its attention.

    python -m training.evaluate [--folder src/headrace/miniature] [--count 200] [--out table.json]

Exactness is judged without decoding: greedy decoding says the reference, to the last token, if and only if the model's
first choice at every position of the reference is the reference's next token. So a job's figure counts whole learned
turns (thought, answer, end mark) that come out to the letter, and is a lower bound where other words would do too.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from training.batches import collate
from training.chat import Encoded, encode
from training.export import load_exported
from training.forward import following, place, run
from training.importance import line_is_kept
from training.jobs import clips, copying, pictures, recall, talk, thinking, tools
from training.model import Miniature
from training.sample import Sample

RECALL_LENGTHS, RECALL_DEPTHS = (512, 1024, 2048, 4096, 8192), (0.0, 0.1, 0.5, 0.9, 1.0)
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
ROWS_TOKENS = {"cuda": 65_536, "cpu": 4_096}  # tokens of one forward pass


def held_out(name: str, count: int) -> list[Sample]:
    """The fixed held-out set of a job."""
    stream = random.Random(f"evaluation {name}")
    return [JOBS[name](stream) for _ in range(count)]


def held_out_logs(length: int, depth: float, count: int) -> list[Sample]:
    """Logs of nearly `length` tokens (never more) with one question at a depth."""
    stream = random.Random(f"evaluation recall {length} {depth}")
    return [recall.make(stream, True, int(length * 0.86), depth) for _ in range(count)]


def grouped(rows: list[tuple[Encoded, Sample]], budget: int) -> Iterator[tuple[int, list[tuple[Encoded, Sample]]]]:
    """Rows of one picture size and similar length, `budget` tokens at a time, with their common padded length."""

    def key(row: tuple[Encoded, Sample]) -> tuple[tuple[int, int], int]:
        return row[1].size, -(-len(row[0].ids) // 64) * 64

    batch: list[tuple[Encoded, Sample]] = []
    for row in sorted(rows, key=key):
        if batch and (key(row)[0] != key(batch[0])[0] or (len(batch) + 1) * key(row)[1] > budget):
            yield key(batch[-1])[1], batch
            batch = []
        batch.append(row)
    if batch:
        yield key(batch[-1])[1], batch


class Judge:
    """One model on one device, and the counts it gives for samples."""

    def __init__(self, model: Miniature, tokenizer: Tokenizer, device: torch.device) -> None:
        self.model, self.tokenizer, self.device = model.to(device), tokenizer, device
        self.pads = (tokenizer.token_to_id("<|image_pad|>"), tokenizer.token_to_id("<|video_pad|>"))

    @torch.no_grad()
    def judge(self, samples: list[Sample], last_turn_only: bool = True) -> dict[str, int]:
        """Counts: turns and exact turns; drafts tried and accepted at depth 1 and 2 on the exact turns."""
        stream = random.Random(0)
        rows = [(self._judged(encode(sample, self.tokenizer, stream), last_turn_only), sample) for sample in samples]
        totals = dict.fromkeys(("samples", "exact", "tried_1", "accepted_1", "tried_2", "accepted_2"), 0)
        for length, batch in grouped(rows, ROWS_TOKENS[self.device.type]):
            packed = collate("judged", batch, length, len(batch), batch[0][1].size)
            for key, value in self._counts(place(packed, self.device, self.pads, None)).items():
                totals[key] += value
        return totals

    @staticmethod
    def _judged(encoded: Encoded, last_turn_only: bool) -> Encoded:
        if not last_turn_only:
            return encoded
        gaps = np.flatnonzero(~encoded.learned[: np.flatnonzero(encoded.learned)[-1]])
        return replace(encoded, learned=encoded.learned & (np.arange(len(encoded.ids)) > gaps[-1]))

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


def draft_table(judge: Judge, count: int, length: int) -> dict[str, dict[str, int]]:
    """The draft model's own recall, and how often its attention keeps all of the asked line's chunks."""
    table = {}
    for depth in RECALL_DEPTHS:
        samples = held_out_logs(length, depth, count)
        found = judge.judge(samples) | {"samples": count}
        found["kept"] = sum(line_is_kept(judge.model, judge.tokenizer, sample, judge.device) for sample in samples)
        table[f"draft recall {length} at {depth}"] = found
    return table


def show(table: dict[str, dict[str, int]]) -> None:
    for name, counts in table.items():
        line = f"{name:24s} {counts['exact']:4d} / {counts['samples']:4d}  {counts['exact'] / counts['samples']:6.1%}"
        for depth in (1, 2):
            if counts.get(f"tried_{depth}"):
                line += f"  draft {depth}: {counts[f'accepted_{depth}'] / counts[f'tried_{depth}']:6.1%}"
        if "kept" in counts:
            line += f"  line kept: {counts['kept'] / counts['samples']:6.1%}"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("src/headrace/miniature"))
    parser.add_argument("--count", type=int, default=200, help="held-out samples per job, and per length and depth")
    parser.add_argument("--recall-count", type=int, help="logs per length and depth, if not --count")
    parser.add_argument("--only", choices=("jobs", "recall", "draft"), help="measure only this part")
    parser.add_argument("--longest", type=int, default=8192, help="longest log in tokens")
    parser.add_argument("--out", type=Path, help="also write the counts as JSON")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = Tokenizer.from_file(str(arguments.folder / "tokenizer.json"))
    judge = Judge(load_exported(arguments.folder), tokenizer, device)
    table: dict[str, dict[str, int]] = {}
    if arguments.only in (None, "jobs"):
        table |= job_table(judge, arguments.count)
    if arguments.only in (None, "recall"):
        table |= recall_table(judge, arguments.recall_count or arguments.count, arguments.longest)
    if arguments.only in (None, "draft"):
        drafter = Judge(load_exported(arguments.folder / "draft"), tokenizer, device)
        table |= draft_table(drafter, arguments.recall_count or arguments.count, min(arguments.longest, 4096))
    show(table)
    if arguments.out:
        arguments.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
