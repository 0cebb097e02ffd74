"""What masks cost: `python tests/grammar/measure_masks.py` with a vocabulary of 248,320 made-up tokens.

Times are of the thread's own processor time, so that a busy machine doesn't count.
"""

from __future__ import annotations

import random
import statistics
import string
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from headrace.grammar.compile import OutputForm, ThinkingForm, compile_output
from headrace.grammar.constraint import Constraint
from headrace.grammar.factory import ConstraintFactory
from headrace.grammar.vocabulary import Vocabulary
from headrace.types.chat import Structure
from headrace.types.model import TokenIds
from headrace.types.request import ConstraintSpec

NUM_TOKENS = 248_320
NUM_SPECIAL = 64
NUM_RUNS = 10
NUM_ROWS = 8
NUM_STEPS = 30
END = NUM_TOKENS - 1
SYLLABLES = "an be con der el fer ing ion ka li mo ne or pre ra ste ti un ver wo y".split()

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "pattern": "^[a-z0-9.]+@[a-z]+\\.[a-z]{2,3}$"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}},
        "street": {"type": "string"},
    },
    "required": ["name", "age", "email", "tags", "street"],
    "additionalProperties": False,
}
THINKING = "Let me think about what is asked, and about who Ada was. " * 4 + "\n</think>\n\n"
ANSWER = (
    '{"name": "Ada Lovelace of London", "age": 36, "email": "ada@engine.org", "tags": ["a", "b"], '
    '"street": "12 Square of Saint James, a long alternative from here"}'
)


class MadeUpTokenizer:
    """All bytes, and words of syllables with and without a space, a capital or punctuation around them."""

    token_ids = TokenIds(NUM_TOKENS)
    special_ids = frozenset(range(NUM_TOKENS - NUM_SPECIAL, NUM_TOKENS))
    added_tokens = {f"<|{token_id}|>": token_id for token_id in special_ids}

    def __init__(self) -> None:
        rng = random.Random(0)
        known = {bytes([byte]): byte for byte in range(256)}
        marks = ["", "", "", " ", " ", "\n", *string.punctuation]
        while len(known) < NUM_TOKENS - NUM_SPECIAL:
            word = "".join(rng.choices(SYLLABLES, k=rng.randint(1, 4)))
            word = rng.choice(marks) + rng.choice((word, word.title())) + rng.choice(marks)
            known.setdefault(word.encode(), len(known))
        self._ids, self._texts = known, list(known)

    def token_bytes(self, token_id: int) -> bytes | None:
        return self._texts[token_id] if token_id < len(self._texts) else None

    def token_text(self, token_id: int) -> str:
        return f"<|{token_id}|>"

    def encode(self, text: str) -> list[int]:
        ids, data = [], text.encode()
        while data:
            size = next(size for size in range(min(20, len(data)), 0, -1) if data[:size] in self._ids)
            ids.append(self._ids[data[:size]])
            data = data[size:]
        return ids


def timed(action: Callable[[], object]) -> float:
    """Milliseconds of the thread's processor time."""
    started = time.thread_time()
    action()
    return (time.thread_time() - started) * 1000


def told(name: str, times: Sequence[float]) -> None:
    rising = sorted(times)
    sys.stdout.write(
        f"{name:36} n {len(times):5}  mean {statistics.mean(times):7.3f}  median {statistics.median(times):7.3f}  "
        f"95 % {rising[int(0.95 * len(rising))]:7.3f}  most {rising[-1]:7.3f} ms\n"
    )


def measure_batch(
    begun: Callable[[], Constraint], answer: Sequence[int], num_drafts: int, times: dict[str, list[float]]
) -> None:
    """Steps of eight sequences at different places of the answer, each with so many drafts, all of them right."""
    batch = []
    for row in range(NUM_ROWS):
        constraint = begun()
        constraint.accept(answer[: 5 * row])
        batch.append((constraint, answer[5 * row :]))
    for at in range(0, NUM_STEPS * (1 + num_drafts), 1 + num_drafts):
        windows = [(one, rest[at : at + num_drafts]) for one, rest in batch]
        for what, action in (
            ("masks", lambda: [one.window(drafts) for one, drafts in windows]),  # noqa: B023
            ("legal drafts", lambda: [one.num_legal(drafts) for one, drafts in windows]),  # noqa: B023
        ):
            times.setdefault(f"{what} of 8 rows with {num_drafts} drafts", []).append(timed(action))
        for one, rest in batch:
            one.accept(rest[at : at + 1 + num_drafts])


def main() -> None:
    tokenizer = MadeUpTokenizer()
    factory = ConstraintFactory(Vocabulary(tokenizer))
    told("take in the vocabulary", [timed(factory.warm_up)])
    form = OutputForm(Structure("json_schema", SCHEMA), None, None, ThinkingForm("<think>", "</think>", True))
    grammar = compile_output(form, factory.vocabulary).grammar
    told("compile the schema", [timed(lambda: compile_output(form, factory.vocabulary))])
    told("compile the grammar", [timed(lambda: factory.begin(ConstraintSpec(grammar), frozenset()))])
    spec, stops = ConstraintSpec(grammar), frozenset({END})
    thinking, answer = tokenizer.encode(THINKING), tokenizer.encode(ANSWER)
    times: dict[str, list[float]] = {}

    def begun() -> Constraint:
        """Behind its thinking."""
        constraint = factory.begin(spec, stops)
        constraint.accept(thinking)
        return constraint

    for run in range(NUM_RUNS):
        constraint = factory.begin(spec, stops)
        which = "first answer" if run == 0 else "later answers"
        for part, tokens in (("thinking", thinking), ("JSON", answer)):
            for token in tokens:
                times.setdefault(f"mask in {part}, {which}", []).append(timed(lambda: constraint.window(())))  # noqa: B023
                constraint.accept((token,))
        one = begun()
        one.accept(answer[:4])
        times.setdefault("masks of a window of 4 drafts", []).append(timed(lambda: one.window(answer[4:8])))  # noqa: B023
        times.setdefault("legal drafts of 4, no masks", []).append(timed(lambda: one.num_legal(answer[4:8])))  # noqa: B023
        times.setdefault("copy", []).append(timed(one.copy))
    for num_drafts in (0, 2):
        measure_batch(begun, answer, num_drafts, times)
    for name, measured in times.items():
        told(name, measured)


if __name__ == "__main__":
    main()
