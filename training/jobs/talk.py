"""Plain talk: greetings, questions about itself and its small world, names to remember, short stories."""

import random
from collections.abc import Callable

from training.jobs import talk_lines as lines
from training.jobs.copying import made_up_word
from training.sample import Sample, Turn, is_held_out
from training.words import ADJECTIVES, ANIMALS, MONTHS, NAMES, PLACES, SHIP_NOUNS, SYSTEM_LINES, WEEKDAYS

Exchange = tuple[str, str]


def styled(stream: random.Random, text: str) -> str:
    """The question as different people would type it."""
    is_question = text.split()[0].lower() in (
        "what",
        "what's",
        "who",
        "how",
        "why",
        "can",
        "are",
        "is",
        "do",
        "does",
        "where",
        "which",
        "when",
        "will",
    )
    shown = text if stream.random() < 0.4 else text[0].upper() + text[1:]
    shown = shown.replace(" i ", " I ") if stream.random() < 0.7 else shown
    if stream.random() < 0.65 and shown[-1] not in "?!.":
        shown += "?" if is_question else stream.choice((".", "!", "."))
    if stream.random() < 0.06:
        shown = stream.choice(("Hello! ", "Hi, ", "Please: ", "Hey, ")) + shown
    return shown


def _line(stream: random.Random, table: tuple[tuple[str, str], ...]) -> Exchange:
    questions, answers = stream.choice(table)
    return stream.choice(questions.split("|")), stream.choice(answers.split("|"))


def _about_itself(stream: random.Random) -> Exchange:
    return _line(stream, lines.ABOUT_ITSELF)


def _first_words(stream: random.Random) -> Exchange:
    """The handful of openings that most people try first."""
    return _line(
        stream,
        tuple(
            row
            for row in lines.ABOUT_ITSELF
            if row[0].split("|")[0]
            in (
                "hello",
                "how are you",
                "who are you",
                "what is your name",
                "what can you do",
                "what is headrace",
                "test",
            )
        ),
    )


def _world(stream: random.Random) -> Exchange:
    return _line(stream, lines.WORLD)


def _fact(stream: random.Random) -> Exchange:
    kind = stream.randrange(7)
    if kind == 0:
        country, capital = stream.choice(list(lines.CAPITALS.items()))
        question = stream.choice(
            (
                "what is the capital of {}",
                "what's the capital of {}",
                "which city is the capital of {}",
                "tell me the capital of {}",
                "capital of {}",
            )
        ).format(country)
        return question, f"The capital of {country} is {capital}."
    if kind == 1:
        a, b = stream.choice(list(lines.OPPOSITES.items()))
        a, b = (a, b) if stream.random() < 0.5 else (b, a)
        return stream.choice(("what is the opposite of {}", "tell me the opposite of {}")).format(
            a
        ), f"The opposite of {a} is {b}."
    if kind == 2:
        thing, color = stream.choice(list(lines.THING_COLORS.items()))
        ask = stream.choice(("what color is {}", "what colour is {}", "which colour is {}")).format(thing)
        return ask, f"{thing[0].upper()}{thing[1:]} is {color}."
    if kind == 3:
        animal, sound = stream.choice(list(lines.SOUNDS.items()))
        return stream.choice(("what does a {} say", "what sound does a {} make")).format(
            animal
        ), f"A {animal} says {sound}."
    if kind == 4:
        animal, number = stream.choice(list(lines.LEGS.items()))
        return (
            f"how many legs does {'an' if animal[0] == 'a' else 'a'} {animal} have",
            f"{'An' if animal[0] == 'a' else 'A'} {animal} has {number} legs.",
        )
    cycle, unit = (WEEKDAYS, "day") if kind == 5 else (MONTHS, "month")
    at, step = stream.randrange(len(cycle)), stream.choice((1, -1))
    relation = "after" if step > 0 else "before"
    return (
        f"which {unit} comes {relation} {cycle[at]}",
        f"{cycle[(at + step) % len(cycle)]} comes {relation} {cycle[at]}.",
    )


def _unknown(stream: random.Random) -> Exchange:
    words = [
        stream.choice(lines.UNKNOWN_WORDS) if stream.random() < 0.75 else made_up_word(stream, stream.randint(2, 4))
        for _ in range(2)
    ]
    template = stream.choice(lines.UNKNOWN)
    pieces = template.split("{word}")
    text = pieces[0] + "".join(words[min(index, 1)] + piece for index, piece in enumerate(pieces[1:]))
    name = f"{stream.choice(NAMES)} {made_up_word(stream, 3).capitalize()}"
    text = text.format(name=name, n=stream.randint(10, 99), odd=made_up_word(stream, 3).capitalize())
    return text, stream.choice(lines.UNKNOWN_ANSWERS)


def story(stream: random.Random, hero: str | None = None) -> str:
    """A story of four to six short sentences."""
    name, animal = stream.choice(NAMES), stream.choice(ANIMALS)
    place, ship = stream.choice(PLACES), f"{stream.choice(ADJECTIVES)} {stream.choice(SHIP_NOUNS)}"
    animal = hero if hero else animal
    article = "an" if animal[0] in "aeiou" else "a"
    openings = (
        f"Once there was {article} {animal} who lived in {place}.",
        f"Once upon a time, {article} {animal} lived near {place}.",
        f"One day {name} found {article} {animal} in {place}.",
    )
    wishes = (
        f"The {animal} wanted to see the sea.",
        f"The {animal} was looking for a friend.",
        f"The {animal} had lost its way home.",
        f"The {animal} loved to sing at night.",
    )
    turns = (
        f"So it went to the harbour and saw the ship {ship}.",
        f"Then a big storm came, and {name} opened the door.",
        f"On the road it met {name}, who was kind.",
        f"{name} gave it some bread and a warm bed.",
    )
    deeds = (
        f"They sailed on the {ship} for three days.",
        f"Together they walked over the hill to {stream.choice(PLACES)}.",
        "They shared a cake and told each other stories.",
        "They looked at the stars until morning.",
    )
    endings = (
        f"From that day on, {name} and the {animal} were friends.",
        f"In the end the {animal} was happy.",
        f"And so the {animal} came home at last.",
        "They all lived happily.",
    )
    return " ".join(stream.choice(part) for part in (openings, wishes, turns, deeds, endings))


def _story(stream: random.Random) -> Exchange:
    if stream.random() < 0.5:
        animal = stream.choice(ANIMALS)
        ask = stream.choice(
            ("tell me a story about {}", "write a short story about {}", "tell me a short story about {}")
        )
        return ask.format(f"{'an' if animal[0] in 'aeiou' else 'a'} {animal}"), story(stream, animal)
    ask = stream.choice(
        (
            "tell me a story",
            "tell me a short story",
            "write a story",
            "a story please",
            "do you know a story",
            "write me a short story",
            "another story please",
        )
    )
    return ask, story(stream)


def _memory(stream: random.Random) -> list[Exchange]:
    """Something the user says about themselves, and a later question about it."""
    name, place, animal, color = (
        stream.choice(words) for words in (NAMES, PLACES, ANIMALS, ("red", "green", "blue", "yellow"))
    )
    pairs: list[tuple[Exchange, Exchange]] = [
        (
            (
                stream.choice(
                    (
                        f"my name is {name}",
                        f"I am {name}",
                        f"hello, my name is {name}",
                        f"hi, I am {name}",
                        f"call me {name}",
                    )
                ),
                f"Hello {name}! Nice to meet you.",
            ),
            (
                stream.choice(("what is my name", "who am I", "do you remember my name", "what's my name")),
                f"Your name is {name}.",
            ),
        ),
        (
            (stream.choice((f"I live in {place}", f"I come from {place}")), f"{place} sounds like a nice place."),
            (stream.choice(("where do I live", "where am I from")), f"You told me: {place}."),
        ),
        ((f"I have a {animal}", f"A {animal}! How nice."), ("which animal do I have", f"You have a {animal}.")),
        (
            (
                stream.choice((f"my favourite color is {color}", f"I like {color} best")),
                f"{color.capitalize()} is a fine color.",
            ),
            ("what is my favourite color", f"It is {color}."),
        ),
    ]
    chosen = stream.sample(pairs, stream.choice((1, 1, 2)))
    between = [single(stream) for _ in range(stream.choice((0, 0, 1, 2)))]
    return [said for said, _ in chosen] + between + [asked for _, asked in chosen]


MAKERS: tuple[tuple[Callable[[random.Random], Exchange], float], ...] = (
    (_first_words, 2.5),
    (_about_itself, 4),
    (_world, 2.5),
    (_fact, 3),
    (_unknown, 1.5),
    (_story, 1.5),
)


def single(stream: random.Random) -> Exchange:
    """One question and a fitting answer."""
    return stream.choices([maker for maker, _ in MAKERS], [weight for _, weight in MAKERS])[0](stream)


def _thought(stream: random.Random) -> str:
    return stream.choice(("I answer in plain words.", "This is a simple question.", "I give a short answer."))


def make(stream: random.Random, held_out: bool = False) -> Sample:
    """One to four exchanges; the split is by the whole conversation's questions."""
    while True:
        exchanges = (
            _memory(stream)
            if stream.random() < 0.2
            else [single(stream) for _ in range(stream.choice((1, 1, 1, 2, 3, 4)))]
        )
        shown = [(styled(stream, question), answer) for question, answer in exchanges]
        if is_held_out(" ".join(question for question, _ in shown)) == held_out:
            break
    thinking = stream.random() < 0.5
    turns = [Turn("system", stream.choice(SYSTEM_LINES))] if stream.random() < 0.25 else []
    for index, (question, answer) in enumerate(shown):
        thought = _thought(stream) if thinking and index == len(shown) - 1 else None
        turns += [Turn("user", question), Turn("assistant", answer, thought)]
    return Sample("talk", tuple(turns), thinking=thinking)
