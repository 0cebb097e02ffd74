"""Pictures: shapes with colour, size and place; counting; two pictures compared. Also the clips' shapes."""

import random

from training.sample import IMAGE_MARK, Drawing, Sample, Shape, Turn, is_held_out

KINDS = ("circle", "square", "triangle", "star", "cross")
COLORS = ("red", "green", "blue", "yellow", "orange", "purple", "black", "white")
GROUNDS = ("white", "grey", "pale")
SIZES = {"small": (0.085, 0.105), "large": (0.145, 0.165)}
PLACES = (
    "at the top left",
    "at the top",
    "at the top right",
    "on the left",
    "in the middle",
    "on the right",
    "at the bottom left",
    "at the bottom",
    "at the bottom right",
)
IMAGE_SIZES = ((128, 128),) * 6 + ((96, 128), (128, 96), (96, 96), (96, 160), (160, 96))
NUMBERS = ("no", "one", "two", "three", "four", "five", "six")


def article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def place_shape(stream: random.Random, cell: int, kind: str, color: str, size: str) -> Shape:
    """A shape near the centre of one of nine cells, rows first."""
    jitter = 0.02 if size == "large" else 0.05
    low, high = SIZES[size]
    x = (cell % 3 + 0.5) / 3 + stream.uniform(-jitter, jitter)
    y = (cell // 3 + 0.5) / 3 + stream.uniform(-jitter, jitter)
    return Shape(kind, color, x, y, stream.uniform(low, high))


def size_of(shape: Shape) -> str:
    return "small" if shape.radius < 0.125 else "large"


def cell_of(shape: Shape) -> int:
    return int(shape.y * 3) * 3 + int(shape.x * 3)


def name_of(shape: Shape, sized: bool = True) -> str:
    return f"{size_of(shape)} {shape.color} {shape.kind}" if sized else f"{shape.color} {shape.kind}"


def random_drawing(stream: random.Random, num_shapes: int) -> Drawing:
    """Distinct shapes (kind and colour together) in distinct cells, none the colour of the ground."""
    ground = stream.choice(GROUNDS)
    colors = [color for color in COLORS if color != ground]
    looks = stream.sample([(kind, color) for kind in KINDS for color in colors], num_shapes)
    cells = sorted(stream.sample(range(9), num_shapes))
    shapes = [
        place_shape(stream, cell, *look, stream.choice(list(SIZES))) for cell, look in zip(cells, looks, strict=True)
    ]
    return Drawing(ground, tuple(shapes))


def described(drawing: Drawing) -> str:
    """'a small red circle at the top left and a large blue square in the middle', in reading order."""
    parts = [f"{article(name_of(shape))} {PLACES[cell_of(shape)]}" for shape in drawing.shapes]
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def _describe(stream: random.Random, drawing: Drawing) -> tuple[str, str]:
    question = stream.choice(
        (
            "What is in the picture?",
            "What do you see?",
            "Describe the picture.",
            "What is in this image?",
            "Describe this image.",
            "What does the picture show?",
            "What is this?",
            "What is on this picture?",
            "what do you see",
            "describe it",
            "Describe this picture.",
            "What can you see in this picture?",
            "What's in this image?",
        )
    )
    return question, f"There is {described(drawing)}."


def _attribute(stream: random.Random, drawing: Drawing) -> tuple[str, str]:
    shape = stream.choice(drawing.shapes)
    place = PLACES[cell_of(shape)]
    single = sum(other.kind == shape.kind for other in drawing.shapes) == 1
    kind = stream.randrange(4) if single else stream.randrange(2)
    if kind == 0:
        return f"What is {place}?", f"{article(name_of(shape)).capitalize()} is {place}."
    if kind == 1:
        question = stream.choice(("Where is the {}?", "Where do you see the {}?")).format(name_of(shape, sized=False))
        return question, f"The {name_of(shape, sized=False)} is {place}."
    if kind == 2:
        question = stream.choice((f"What color is the {shape.kind}?", f"Which colour does the {shape.kind} have?"))
        return question, f"The {shape.kind} is {shape.color}."
    return f"Is the {shape.kind} small or large?", f"The {shape.kind} is {size_of(shape)}."


def _count_drawing(stream: random.Random) -> Drawing:
    """Up to six shapes of few kinds, so that there is something to count."""
    ground = stream.choice(GROUNDS)
    kinds = stream.sample(KINDS, 2)
    colors = stream.sample([color for color in COLORS if color != ground], 2)
    cells = sorted(stream.sample(range(9), stream.randint(1, 6)))
    return Drawing(
        ground,
        tuple(
            place_shape(stream, cell, stream.choice(kinds), stream.choice(colors), stream.choice(list(SIZES)))
            for cell in cells
        ),
    )


def counted(number: int, word: str) -> str:
    return f"There {'is' if number == 1 else 'are'} {NUMBERS[number]} {word}{'' if number == 1 else 's'}."


def _count(stream: random.Random, drawing: Drawing) -> tuple[str, str]:
    kind = stream.randrange(3)
    if kind == 0:
        question = stream.choice(("How many shapes are there?", "How many shapes do you see?", "Count the shapes."))
        return question, counted(len(drawing.shapes), "shape")
    if kind == 1:
        asked = stream.choice(drawing.shapes).kind if stream.random() < 0.9 else stream.choice(KINDS)
        number = sum(shape.kind == asked for shape in drawing.shapes)
        plural = asked + ("es" if asked == "cross" else "s")
        answer = counted(number, asked) if asked != "cross" or number == 1 else f"There are {NUMBERS[number]} crosses."
        return f"How many {plural} are there?", answer
    color = stream.choice(drawing.shapes).color
    number = sum(shape.color == color for shape in drawing.shapes)
    return f"How many {color} shapes are there?", counted(number, f"{color} shape")


def _compare(stream: random.Random) -> tuple[tuple[Drawing, Drawing], str, str]:
    """Two pictures and a question about both."""
    kind = stream.randrange(3)
    first = random_drawing(stream, stream.randint(1, 3))
    if kind == 0:
        second = first if stream.random() < 0.5 else random_drawing(stream, stream.randint(1, 3))
        question = stream.choice(("Are the two pictures the same?", "Do both pictures show the same?"))
        return (first, second), question, "Yes, they are the same." if second == first else "No, they are different."
    if kind == 1:
        second = random_drawing(stream, stream.choice([n for n in (1, 2, 3) if n != len(first.shapes)]))
        word = "first" if len(first.shapes) > len(second.shapes) else "second"
        return (first, second), "Which picture has more shapes?", f"The {word} picture has more shapes."
    second = random_drawing(stream, stream.randint(1, 3))
    at = stream.randrange(2)
    word = ("first", "second")[at]
    question = stream.choice((f"What is in the {word} picture?", f"Describe the {word} picture."))
    return (first, second), question, f"There is {described((first, second)[at])}."


def make(stream: random.Random, held_out: bool = False) -> Sample:
    """One or two pictures and one to three questions; split by the pictures themselves."""
    while True:
        kind = stream.random()
        drawings: tuple[Drawing, ...]
        if kind < 0.25:
            drawings, question, answer = _compare(stream)
            asked = [(question, answer)]
        else:
            drawing = random_drawing(stream, stream.randint(1, 3)) if kind < 0.75 else _count_drawing(stream)
            drawings = (drawing,)
            makers = (_describe, _attribute) if kind < 0.75 else (_count,)
            asked = [stream.choice(makers)(stream, drawing) for _ in range(stream.choice((1, 1, 2, 3)))]
        if is_held_out(str(drawings[0])) == held_out:
            break
    thinking = stream.random() < 0.4
    turns: list[Turn] = []
    for index, (question, answer) in enumerate(asked):
        marks = IMAGE_MARK * len(drawings)
        text = question if index else marks + question if stream.random() < 0.8 else question + marks
        thought = "I look at the picture." if thinking and index == len(asked) - 1 else None
        turns += [Turn("user", text), Turn("assistant", answer, thought)]
    return Sample("pictures", tuple(turns), thinking=thinking, drawings=drawings, size=stream.choice(IMAGE_SIZES))
