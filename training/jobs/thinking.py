"""Thinking: sums and comparisons in two or three steps, worked in the thought; small ones answered directly."""

import random

from training.sample import Sample, Turn, is_held_out
from training.words import NAMES, PLACES, THINGS, WOMEN

GAINS = ("buys {n} more", "finds {n} more", "gets {n} more", "is given {n} more")
LOSSES = ("gives away {n}", "loses {n}", "sells {n}", "drops {n}")


def _work(start: int, changes: list[int]) -> tuple[str, int]:
    """The written steps and the result: '12 + 7 = 19. 19 - 5 = 14.'"""
    steps, total = [], start
    for change in changes:
        result = total + change
        steps.append(f"{total} {'+' if change > 0 else '-'} {abs(change)} = {result}.")
        total = result
    return " ".join(steps), total


def _changes(stream: random.Random, start: int, count: int, limit: int) -> list[int]:
    changes, total = [], start
    for _ in range(count):
        change = stream.randint(1, max(1, min(limit, 99)))
        if total > 2 and stream.random() < 0.5:
            change = -stream.randint(1, total - 1) if total - 1 < limit else -stream.randint(1, limit)
        changes.append(change)
        total += change
    return changes


def _joined(stream: random.Random, name: str, parts: list[str]) -> list[str]:
    """'Ann has 2 pens. She buys 3 more and loses 1.' for three sentences about Ann."""
    short = ("She" if name in WOMEN else "He") if stream.random() < 0.7 else name
    deeds = [part.removeprefix("Then ").removeprefix(f"{name} ").rstrip(".") for part in parts[1:]]
    return [parts[0], f"{short} {', '.join(deeds[:-1])} and {deeds[-1]}."]


def _story(stream: random.Random, num_steps: int, limit: int) -> tuple[str, str, str]:
    name, thing = stream.choice(NAMES), stream.choice(THINGS)
    start = stream.randint(2, limit)
    changes = _changes(stream, start, num_steps, limit)
    parts = [f"{name} has {start} {thing}."]
    for index, change in enumerate(changes):
        deed = stream.choice(GAINS if change > 0 else LOSSES).format(n=abs(change))
        parts.append(f"{name if index == 0 else 'Then ' + name} {deed}.")
    if len(parts) > 2 and stream.random() < 0.4:
        parts = _joined(stream, name, parts)
    work, total = _work(start, changes)
    ending = stream.choice(
        (
            f"How many {thing} does {name} have now?",
            f"How many {thing} are left?",
            f"How many {thing} does {name} have in the end?",
        )
    )
    return " ".join([*parts, ending]), work, f"{name} has {total} {thing}."


def _formula(stream: random.Random, num_steps: int, limit: int) -> tuple[str, str, str]:
    start = stream.randint(1, limit)
    changes = _changes(stream, start, num_steps, limit)
    text = f"{start} " + " ".join(f"{'+' if c > 0 else '-'} {abs(c)}" for c in changes)
    work, total = _work(start, changes)
    question = stream.choice(
        ("What is {}?", "How much is {}?", "Calculate {}.", "{} = ?", "What's {}?", "{}?", "what is {}")
    ).format(text.replace(" ", "") if stream.random() < 0.3 else text)
    return question, work, f"{text} = {total}."


def _product(stream: random.Random) -> tuple[str, str, str]:
    a, b = stream.randint(1, 10), stream.randint(1, 10)
    sign = stream.choice((" times ", " * ", " x ", "*"))
    question = stream.choice(("What is {}?", "How much is {}?", "Calculate {}.", "what's {}?")).format(f"{a}{sign}{b}")
    return question, f"{a} * {b} = {a * b}.", f"{a} times {b} is {a * b}."


def _comparison(stream: random.Random, limit: int) -> tuple[str, str, str]:
    first, second = stream.sample(NAMES, 2)
    thing = stream.choice(THINGS)
    a, b, c = (stream.randint(1, limit) for _ in range(3))
    if a + c == b:
        b += 1
    winner, loser = (first, second) if a + c > b else (second, first)
    more = stream.random() < 0.5
    question = (
        f"{first} has {a} {thing} and {second} has {b} {thing}. {first} gets {c} more. "
        f"Who has {'more' if more else 'fewer'} {thing}?"
    )
    sign = "more" if a + c > b else "less"
    work = f"{first}: {a} + {c} = {a + c}. {second}: {b}. {a + c} is {sign} than {b}."
    return question, work, f"{winner if more else loser} has {'more' if more else 'fewer'} {thing}."


def _distance(stream: random.Random, limit: int) -> tuple[str, str, str]:
    a, b, c = stream.sample(PLACES, 3)
    first, second = stream.randint(2, limit), stream.randint(2, limit)
    question = (
        f"From {a} to {b} it is {first} miles. From {b} to {c} it is {second} miles. "
        f"How far is it from {a} to {c} through {b}?"
    )
    return question, f"{first} + {second} = {first + second}.", f"It is {first + second} miles."


def make(stream: random.Random, held_out: bool = False, thinking: bool | None = None) -> Sample:
    """One problem with numbers up to 99 in one to three steps.

    Without thinking one step is answered at once (numbers up to 20), and more steps are shown in the answer.
    """
    thinks = stream.random() < 0.7 if thinking is None else thinking
    while True:
        shown = not thinks and stream.random() < 0.45  # several steps, worked before everybody's eyes
        many, limit = thinks or shown, 99 if thinks or shown else 20
        steps = stream.choice((2, 2, 3) if shown else (1, 2, 2, 3)) if many else 1
        kind = stream.random()
        kind = kind * 0.6 if shown and kind > 0.67 else kind  # only stories and formulas have several steps
        if kind < 0.4:
            question, work, answer = _story(stream, steps, limit)
        elif kind < 0.45 and not shown:
            question, work, answer = _product(stream)
        elif kind < 0.67:
            question, work, answer = _formula(stream, steps, limit)
        elif kind < 0.85:
            question, work, answer = _comparison(stream, limit)
        else:
            question, work, answer = _distance(stream, limit)
        if is_held_out(question) == held_out:
            break
    answer = f"{work} {answer}" if shown else answer
    turns = (Turn("user", question), Turn("assistant", answer, work if thinks else None))
    return Sample("thinking", turns, thinking=thinks)
