"""Copying: repeat, quote or edit a given text, to the letter."""

import random

from training.sample import Sample, Turn, is_held_out
from training.words import ADJECTIVES, CARGO, NAMES, PLACES, PLAIN_WORDS, SHIP_NOUNS, SYLLABLES

REPEATS = (
    "Repeat this text exactly:\n{}",
    "Copy this:\n{}",
    "Say this again, word for word:\n{}",
    "Write this text once more:\n{}",
    "Please repeat: {}",
    "Repeat after me: {}",
    "{}\n\nCopy the text above.",
    "{}\n\nRepeat that exactly.",
)
ORDINALS = ("first", "second", "third", "fourth", "fifth")
LETTERS = "etaoinshrdlucmfwygpbvkxqjz"
LETTER_WEIGHTS = (12, 9, 8, 8, 7, 7, 6, 6, 6, 4, 4, 3, 3, 3, 2, 2, 2, 2, 2, 1.5, 1, 1, 0.4, 0.4, 0.4, 0.4)
SYMBOLS = "= + - * / ( ) [ ] { } < > ; : , . # @ & % _ ! ?".split()


def made_up_word(stream: random.Random, num_parts: int) -> str:
    """A word of syllables that means nothing, such as `kobelimo`."""
    return "".join(stream.choice(SYLLABLES) for _ in range(num_parts))


def odd_word(stream: random.Random) -> str:
    """A made-up word, such as `thrumes`: letters as frequent as in English."""
    word = "".join(stream.choices(LETTERS, LETTER_WEIGHTS, k=stream.randint(2, 9)))
    return word if stream.random() < 0.75 else word.capitalize()


def odd_sentence(stream: random.Random) -> str:
    """Odd words, known words, numbers and signs in any order."""
    words = []
    for _ in range(stream.randint(3, 14)):
        kind = stream.random()
        words.append(
            odd_word(stream)
            if kind < 0.55
            else stream.choice(PLAIN_WORDS)
            if kind < 0.85
            else str(stream.randint(0, 9999))
            if kind < 0.92
            else stream.choice(("-", "and", "&", "(a)", "it's", "don't"))
        )
        if stream.random() < 0.08:
            words[-1] += stream.choice(",;:")
    text = " ".join(words)
    return text[0].upper() + text[1:] + stream.choice(".....!?")


def sentence(stream: random.Random) -> str:
    words = [stream.choice(PLAIN_WORDS) for _ in range(stream.randint(3, 12))]
    if stream.random() < 0.3:
        words.insert(stream.randrange(len(words)), stream.choice((*NAMES, *PLACES, *CARGO, *ADJECTIVES, *SHIP_NOUNS)))
    if stream.random() < 0.25:
        words.insert(stream.randrange(len(words)), str(stream.randint(0, 9999)))
    if stream.random() < 0.2:
        words.insert(stream.randrange(len(words)), made_up_word(stream, stream.randint(2, 4)))
    text = " ".join(words)
    return text[0].upper() + text[1:] + stream.choice(".....!?")


def code_line(stream: random.Random) -> str:
    parts = []
    for _ in range(stream.randint(2, 8)):
        kind = stream.random()
        if kind < 0.4:
            parts.append(made_up_word(stream, stream.randint(1, 3)))
        elif kind < 0.6:
            parts.append(str(stream.randint(0, 999)))
        else:
            parts.append(stream.choice(SYMBOLS))
    return stream.choice(("", "    ")) + stream.choice((" ", "")).join(parts)


def passage(stream: random.Random) -> list[str]:
    """One to six lines of prose, code or made-up words."""
    maker = stream.choices((sentence, code_line, odd_sentence), (3, 2, 4))[0]
    lines = [maker(stream) for _ in range(stream.choice((1, 1, 2, 3, 5, 6)))]
    lines[0] = lines[0].strip()
    return lines


def _repeat(stream: random.Random) -> tuple[str, str]:
    lines = passage(stream)
    text = stream.choice(("\n", " ")).join(lines) if not lines[-1].startswith(" ") else "\n".join(lines)
    return stream.choice(REPEATS).format(text), text


def _quote(stream: random.Random) -> tuple[str, str]:
    lines = [sentence(stream) for _ in range(stream.randint(2, 5))]
    at = stream.randrange(len(lines))
    numbered = "\n".join(lines)
    ask = stream.choice(("Quote the {} line.", "What is the {} line?", "Copy only the {} line."))
    return f"{numbered}\n\n{ask.format(ORDINALS[at])}", lines[at]


def _replace(stream: random.Random) -> tuple[str, str]:
    words = [stream.choice(PLAIN_WORDS) for _ in range(stream.randint(4, 14))]
    at = stream.randrange(len(words))
    old, new = (
        words[at],
        stream.choice(
            (stream.choice(NAMES), stream.choice(CARGO), str(stream.randint(1, 99)), made_up_word(stream, 3))
        ),
    )
    text, edited = " ".join(words), " ".join(new if word == old else word for word in words)
    ask = stream.choice(("Replace {} with {}", "Change {} to {}", "Put {1} in place of {0}"))
    return f"{ask.format(old, new)} in this text:\n{text}", edited


def make(stream: random.Random, held_out: bool = False) -> Sample:
    """One text to repeat, quote from, or edit."""
    while True:
        kind = stream.random()
        question, answer = (_repeat if kind < 0.5 else _quote if kind < 0.7 else _replace)(stream)
        if is_held_out(question) == held_out:
            break
    thinking = stream.random() < 0.4
    thought = "I copy the text with care." if thinking else None
    return Sample("copying", (Turn("user", question), Turn("assistant", answer, thought)), thinking=thinking)
