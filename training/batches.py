"""Batches of a fixed token budget from seeded worker processes, with a memory for when the workers fall behind."""

import multiprocessing
import os
import queue
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from training.chat import Encoded, encode
from training.mixture import samples
from training.packing import frame_groups, pack

BUDGET = 49_152  # tokens of a batch: 3 * 2^14, so that every row length below divides it
LENGTHS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
MEMORY = 160  # batches of a kind that may be shown again


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one length. ids, learned: [rows, T]; positions: [3, rows, T]; drawings: [groups, 2, 7, 5] or None."""

    kind: str
    ids: np.ndarray
    learned: np.ndarray
    positions: np.ndarray
    drawings: np.ndarray | None
    size: tuple[int, int]


def row_length(num_tokens: int) -> int | None:
    """The shortest row that holds so many tokens; None if none does."""
    return next((length for length in LENGTHS if length >= num_tokens), None)


def collate(kind: str, rows: list[tuple[Encoded, Any]], length: int, num_rows: int, size: tuple[int, int]) -> Batch:
    """Right-padded rows (padding is token 0 and never learned); missing rows stay empty."""
    ids = np.zeros((num_rows, length), np.int32)
    learned = np.zeros((num_rows, length), bool)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (3, num_rows, length)).copy()
    for index, (encoded, _) in enumerate(rows):
        num_tokens = len(encoded.ids)
        ids[index, :num_tokens], learned[index, :num_tokens] = encoded.ids, encoded.learned
        positions[:, index, :num_tokens] = encoded.positions
    groups = [pair for _, sample in rows for pair in frame_groups(sample)]
    drawings = np.stack([np.stack([pack(a), pack(b)]) for a, b in groups]) if groups else None
    return Batch(kind, ids, learned, positions, drawings, size)


def grouped(rows: list[tuple[Encoded, Any]], budget: int) -> Iterator[tuple[int, list[tuple[Encoded, Any]]]]:
    """Rows of one picture size and similar length, `budget` tokens at a time, with their common padded length."""

    def key(row: tuple[Encoded, Any]) -> tuple[tuple[int, int], int]:
        return row[1].size, -(-len(row[0].ids) // 64) * 64

    batch: list[tuple[Encoded, Any]] = []
    for row in sorted(rows, key=key):
        if batch and (key(row)[0] != key(batch[0])[0] or (len(batch) + 1) * key(row)[1] > budget):
            yield key(batch[-1])[1], batch
            batch = []
        batch.append(row)
    if batch:
        yield key(batch[-1])[1], batch


def batches(kind: str, seed: str, tokenizer_path: Path) -> Iterator[Batch]:
    """An endless stream of full batches of one kind; rows of a batch share length and picture size."""
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    stream = random.Random(f"layout {kind} {seed}")
    waiting: dict[tuple[int, tuple[int, int]], list[tuple[Encoded, Any]]] = {}
    for sample in samples(kind, seed):
        encoded = encode(sample, tokenizer, stream)
        length = row_length(len(encoded.ids))
        if length is None:
            continue  # a log that came out too long; the next one will fit
        key = (length, sample.size)
        rows = waiting.setdefault(key, [])
        rows.append((encoded, sample))
        if len(rows) == BUDGET // length:
            yield collate(kind, rows, length, len(rows), sample.size)
            del waiting[key]


def _work(kind: str, seed: str, tokenizer_path: Path, out: Any) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for batch in batches(kind, seed, tokenizer_path):
        out.put(batch)


class Feed:
    """Worker processes that fill one queue per kind; `take` never waits once a kind has a memory."""

    def __init__(self, workers: dict[str, int], seed: str, tokenizer_path: Path) -> None:
        context = multiprocessing.get_context("fork")
        self._stream = random.Random(f"feed {seed}")
        self._queues = {kind: context.Queue(maxsize=24) for kind in workers}
        self._memory: dict[str, deque[Batch]] = {kind: deque(maxlen=MEMORY) for kind in workers}
        self.num_fresh = dict.fromkeys(workers, 0)
        self.num_repeated = dict.fromkeys(workers, 0)
        self._processes = [
            context.Process(
                target=_work, args=(kind, f"{seed} {index}", tokenizer_path, self._queues[kind]), daemon=True
            )
            for kind, count in workers.items()
            for index in range(count)
        ]
        for process in self._processes:
            process.start()

    def take(self, kind: str) -> Batch:
        memory = self._memory[kind]
        try:
            batch: Batch = self._queues[kind].get(timeout=0.001 if len(memory) >= 32 else 60)
        except queue.Empty:
            if not memory:
                raise TimeoutError(f"no {kind} batch came within a minute: the workers are too slow or dead") from None
            self.num_repeated[kind] += 1
            return self._stream.choice(memory)
        self.num_fresh[kind] += 1
        memory.append(batch)
        return batch

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
