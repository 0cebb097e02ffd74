"""What sparse prefill keeps: recall of single lines of long logs, by what chose the tokens that are computed.

    python -m training.sparse_recall [--lengths 2048 4096 8192] [--keep 0.2 0.3] [--count 20] [--by draft]

The bundled model is asked one question about each log, and whole answers are counted that are right to the letter, with
the prompt computed whole, and with a share of it: chosen by the bundled draft model (as `paper` by each chunk's own
importance alone), at random, and evenly. All choose whole chunks beside the same protected tokens: the last turn of the
user's, or its ends where the log is in it.
Questions come in rounds of one for each length and depth, and what has been counted is printed after each round.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from headrace.backend import blas, device
from headrace.engine.sparse.scoring import importance
from headrace.engine.sparse.select import CHUNK, NEIGHBOURS, select
from headrace.models.built_in import MINIATURE
from headrace.models.load import load
from headrace.models.packed import PackedModel
from headrace.models.positions import TokenPositions
from headrace.models.source import read_files
from headrace.models.step import QueryRecorder, Row
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool
from training.chat import encode
from training.jobs import recall

DEPTHS = (0.1, 0.5, 0.9)
CHOICES = ("whole", "draft", "paper", "random", "even")
NUM_LOOKAHEAD = 8
STEP_TOKENS = 512
LONG_TURN, TURN_EDGE = 1024, 128
"""A last turn is kept whole up to so many tokens; of a longer one so many at either end. As the server has it."""


@dataclass(frozen=True, slots=True)
class Question:
    """Token ids of a prompt and of its only answer, and what of the prompt is kept in any case."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    protected: tuple[range, ...]


def question(tokenizer: Tokenizer, length: int, depth: float, stream: random.Random) -> Question:
    """About a held-out line at a depth of a log, in a prompt of nearly `length` tokens."""
    encoded = encode(recall.make(stream, True, int(length * 0.86), depth, thinking=False), tokenizer)
    first, end = encoded.last_turn
    prompt = tuple(encoded.ids[:first].tolist())
    opening = [tokenizer.token_to_id("<|im_start|>"), *tokenizer.encode("user", add_special_tokens=False).ids]
    start = max(at for at in range(first) if list(prompt[at : at + len(opening)]) == opening)
    edges = (range(start, start + TURN_EDGE), range(first - TURN_EDGE, first))
    protected = edges if first - start > LONG_TURN else (range(start, first),)
    return Question(prompt, tuple(encoded.ids[first:end].tolist()), (*protected, range(first - CHUNK, first)))


class Reader:
    """One sequence of a model after the other."""

    def __init__(self, model: PackedModel) -> None:
        self.model = model
        self._pool = StatePool()

    def open(self, num_tokens: int) -> SequenceState:
        return SequenceState(self._pool, num_tokens)

    def read(
        self,
        state: SequenceState,
        ids: Sequence[int],
        positions: TokenPositions | None = None,
        recorder: QueryRecorder | None = None,
        num_picks: int = 1,
    ) -> list[int]:
        """Compute the ids in steps; gives the first choices after each of the last `num_picks` tokens."""
        body = len(ids) - num_picks
        cuts = [*range(0, body, STEP_TOKENS), body] if body else [0]
        for lo, hi in zip(cuts, cuts[1:], strict=False):
            self._step(state, ids[lo:hi], positions, None, 0)
        return self._step(state, ids[body:], positions, recorder, num_picks)

    def _step(
        self,
        state: SequenceState,
        ids: Sequence[int],
        positions: TokenPositions | None,
        recorder: QueryRecorder | None,
        num_picks: int,
    ) -> list[int]:
        state.begin(len(ids))
        picks = range(len(ids) - num_picks, len(ids)) if num_picks else [0]
        logits = self.model.forward([Row(state, ids, positions=positions, recorder=recorder)], picks)
        choices = mx.argmax(logits, axis=-1) if num_picks else mx.array([0])
        mx.eval(choices, state.arrays(), [] if recorder is None else recorder.arrays())
        state.rollback(0)
        chosen: list[int] = choices.tolist()  # type: ignore[assignment]
        return chosen


def score(draft: Reader, prompt: Sequence[int]) -> npt.NDArray[np.float32]:
    """Importance `[M]` of a prompt's tokens."""
    state, recorder = draft.open(len(prompt) + NUM_LOOKAHEAD), QueryRecorder()
    token = draft.read(state, prompt, recorder=recorder)
    for _ in range(NUM_LOOKAHEAD - 1):
        token = draft.read(state, token, recorder=recorder)
    found = importance(state, recorder, len(prompt))
    state.release()
    return found


def choose(
    how: str, asked: Question, found: npt.NDArray[np.float32], share: float, stream: random.Random
) -> tuple[int, ...]:
    """Positions of a share of the prompt, and the protected ones."""
    num_tokens = len(asked.prompt)
    if how == "random":
        found = np.repeat([stream.random() for _ in range(-(-num_tokens // CHUNK))], CHUNK)[:num_tokens]
    elif how == "even":
        # chunks in the order in which a golden ratio's multiples fall: any first few of them are spread out
        phases = [(place * 0.6180339887) % 1.0 for place in range(-(-num_tokens // CHUNK))]
        found = np.repeat([1.0 - phase for phase in phases], CHUNK)[:num_tokens]
    neighbours = NEIGHBOURS if how == "draft" else 0.0
    return select(found.astype(np.float32), 0, share, asked.protected, neighbours=neighbours)


def knows(reader: Reader, asked: Question, kept: Sequence[int] | None) -> bool:
    """Whether the greedy answer is right: each first choice along the right answer is its next token."""
    places = range(len(asked.prompt)) if kept is None else kept
    positions = TokenPositions(np.array(places, dtype=np.int32))
    ids = [*(asked.prompt[place] for place in places), *asked.answer[:-1]]
    state = reader.open(len(ids))
    choices = reader.read(state, ids, positions, num_picks=len(asked.answer))
    state.release()
    return choices == list(asked.answer)


@dataclass(slots=True)
class Count:
    """Answers of one way to choose, and the shares of their prompts that were computed."""

    asked: int = 0
    right: int = 0
    computed: float = 0.0

    def add(self, is_right: bool, computed: float) -> None:
        self.asked += 1
        self.right += is_right
        self.computed += computed

    def __str__(self) -> str:
        return f"{self.right}/{self.asked} at {self.computed / self.asked:.2f}"


def measure(reader: Reader, draft: Reader, tokenizer: Tokenizer, given: argparse.Namespace) -> None:
    """Print, after each round, right answers, questions, and the share that was computed on average."""
    ways = [(how, share) for how in given.by if how != "whole" for share in given.keep]
    counts: dict[tuple[int, float], dict[str, Count]] = {}
    streams: dict[tuple[int, float], random.Random] = {}
    for done in range(1, given.count + 1):
        for cell in ((length, depth) for length in given.lengths for depth in DEPTHS):
            stream = streams.setdefault(cell, random.Random(f"thinned recall {cell[0]} {cell[1]}"))
            asked, chance = question(tokenizer, *cell, stream), random.Random(f"chance {cell} {done}")
            told = counts.setdefault(cell, {})
            if "whole" in given.by:
                told.setdefault("whole", Count()).add(knows(reader, asked, None), 1.0)
            is_scored = not {"draft", "paper"}.isdisjoint(given.by)
            found = score(draft, asked.prompt) if is_scored else np.zeros(len(asked.prompt), np.float32)
            for how, share in ways:
                kept = choose(how, asked, found, share, chance)
                right = knows(reader, asked, kept)
                told.setdefault(f"{how} {share:g}", Count()).add(right, len(kept) / len(asked.prompt))
        print(f"after {done} rounds:")
        for (length, depth), told in counts.items():
            print(f"{length:6} {depth:4}  " + "   ".join(f"{way} {count}" for way, count in told.items()), flush=True)


def main() -> None:
    """Read the options and ask on the device that MLX has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--keep", type=float, nargs="+", default=[0.2, 0.3])
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--by", nargs="+", default=list(CHOICES), choices=CHOICES)
    given = parser.parse_args()
    blas.install("fast")
    models = [
        load(
            read_files(folder.name, folder), dtype="auto", numerics="fast", self_check=True, device=device.current()
        ).packed
        for folder in (MINIATURE, MINIATURE / "draft")
    ]
    reader, draft = map(Reader, models)
    tokenizer = Tokenizer.from_file(str(MINIATURE / "tokenizer.json"))
    measure(reader, draft, tokenizer, given)


if __name__ == "__main__":
    main()
