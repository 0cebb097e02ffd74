"""Recall: questions about single lines of a long harbour log."""

import random
from dataclasses import dataclass

from training.sample import Sample, Turn, is_held_out
from training.words import ADJECTIVES, CARGO, MONTHS, SHIP_NOUNS, UNITS

TOKENS_PER_LINE = 19  # measured with the shipped tokenizer; only steers how many lines are written
INTRODUCTIONS = (
    "Here is the harbour log.",
    "This is the log of the harbour.",
    "Read this log and answer my questions.",
    "Harbour log:",
    "Below is a list of ships. Read it with care.",
)
REMARKS = (
    "The sea was calm.",
    "Rain fell all day.",
    "The wind was strong.",
    "A fog came in at noon.",
    "The crane was repaired.",
    "The harbour master was away.",
    "The gates closed early.",
    "Two boats were painted.",
    "The lamp was cleaned.",
)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One line of the log."""

    ship: str
    amount: int
    unit: str
    cargo: str
    berth: int
    day: int
    month: str
    style: int

    def line(self) -> str:
        load = f"{self.amount} {self.unit} of {self.cargo}"
        if self.style == 0:
            return f"{self.day} {self.month}: The {self.ship} brought {load} to berth {self.berth}."
        if self.style == 1:
            return f"The {self.ship} came to berth {self.berth} with {load} on {self.day} {self.month}."
        return f"- {self.ship}: {load}, berth {self.berth}, {self.day} {self.month}"


def random_arrival(stream: random.Random, ship: str, style: int) -> Arrival:
    return Arrival(
        ship,
        stream.randint(2, 99),
        stream.choice(UNITS),
        stream.choice(CARGO),
        stream.randint(1, 40),
        stream.randint(1, 28),
        stream.choice(MONTHS),
        style,
    )


def ask(stream: random.Random, arrival: Arrival) -> tuple[str, str, str]:
    """A question about one line, its only answer, and the fact in a few words."""
    ship = arrival.ship
    kind = stream.randrange(4)
    if kind == 0:
        question = stream.choice(
            (f"What did the {ship} bring?", f"What was on the {ship}?", f"What cargo did the {ship} carry?")
        )
        load = f"{arrival.amount} {arrival.unit} of {arrival.cargo}"
        return question, f"The {ship} brought {load}.", load
    if kind == 1:
        question = stream.choice(
            (f"Which berth did the {ship} go to?", f"Where did the {ship} land?", f"At which berth was the {ship}?")
        )
        return question, f"The {ship} went to berth {arrival.berth}.", f"berth {arrival.berth}"
    if kind == 2:
        question = stream.choice(
            (f"When did the {ship} arrive?", f"On which day did the {ship} come?", f"What is the date of the {ship}?")
        )
        date = f"{arrival.day} {arrival.month}"
        return question, f"The {ship} arrived on {date}.", date
    question = stream.choice(
        (f"How much {arrival.cargo} did the {ship} bring?", f"How many {arrival.unit} did the {ship} bring?")
    )
    return question, f"The {ship} brought {arrival.amount} {arrival.unit}.", f"{arrival.amount} {arrival.unit}"


def ship_names(stream: random.Random, count: int, held_out: bool) -> tuple[list[str], list[str]]:
    """All ships of a log (distinct), and those of the wanted split, which may be asked about."""
    pairs = stream.sample(range(len(ADJECTIVES) * len(SHIP_NOUNS)), count)
    names = [f"{ADJECTIVES[pair % len(ADJECTIVES)]} {SHIP_NOUNS[pair // len(ADJECTIVES)]}" for pair in pairs]
    return names, [name for name in names if is_held_out(name) == held_out]


def make(
    stream: random.Random,
    held_out: bool = False,
    num_tokens: int | None = None,
    depth: float | None = None,
    thinking: bool | None = None,
) -> Sample:
    """A log of about `num_tokens` tokens (log-uniform 200 to 3,400 if None) and questions about it.

    With `depth` (0 first line, 1 last line) there is one question, about the nearest line that may be asked about.
    """
    wanted = num_tokens if num_tokens is not None else int(200 * 17 ** stream.random())
    num_lines = max(8, wanted // TOKENS_PER_LINE)
    names, askable = ship_names(stream, num_lines, held_out)
    while not askable:
        names, askable = ship_names(stream, num_lines, held_out)
    mixed = stream.random() < 0.2
    style = stream.randrange(3)
    arrivals = {name: random_arrival(stream, name, stream.randrange(3) if mixed else style) for name in names}
    lines = [arrivals[name].line() for name in names]
    if depth is not None:
        at = depth * (len(names) - 1)
        askable = [min(askable, key=lambda name: abs(names.index(name) - at))]
    for _ in range(len(lines) // 12 if stream.random() < 0.5 else 0):
        lines.insert(stream.randrange(len(lines)), stream.choice(REMARKS))
    log = stream.choice(INTRODUCTIONS) + "\n" + "\n".join(lines)
    num_questions = 1 if depth is not None else min(len(askable), stream.choice((1, 6, 16, 32)))
    asked = [arrivals[name] for name in stream.sample(askable, num_questions)]
    return _converse(stream, log, asked, stream.random() < 0.5 if thinking is None else thinking)


def _converse(stream: random.Random, log: str, asked: list[Arrival], thinking: bool) -> Sample:
    """The thought says the fact in its first words: a draft model that looks a few tokens ahead then reads its line."""
    turns: list[Turn] = []
    facts: list[str] = []
    if stream.random() < 0.3:
        turns = [Turn("user", log), Turn("assistant", "I have read the log. What do you want to know?")]
        log = ""
    for index, arrival in enumerate(asked):
        question, answer, fact = ask(stream, arrival)
        facts.append(fact)
        prefix = f"{log}\n\n" if index == 0 and log else ""
        thought = f"{arrival.ship}: {fact}." if thinking and index == len(asked) - 1 else None
        turns += [Turn("user", prefix + question), Turn("assistant", answer, thought)]
    told = {"ships": tuple(a.ship for a in asked), "facts": tuple(facts)}
    return Sample("recall", tuple(turns), thinking=thinking, facts=told)
