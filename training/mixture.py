"""Which jobs make up the training data, and a seeded stream of samples of each kind."""

import random
from collections.abc import Callable, Iterator

from training.jobs import clips, copying, pictures, recall, talk, thinking, tools
from training.sample import Sample

Maker = Callable[[random.Random], Sample]


def _short_log(stream: random.Random) -> Sample:
    return recall.make(stream, num_tokens=stream.choice((160, 250, 400)))


KINDS: dict[str, tuple[tuple[Maker, float], ...]] = {
    "long": ((recall.make, 1.0),),
    "short": ((tools.make, 11.0), (talk.make, 3.0), (thinking.make, 3.0), (copying.make, 7.0), (_short_log, 1.0)),
    "media": ((pictures.make, 2.0), (clips.make, 1.0)),
}


def samples(kind: str, seed: str) -> Iterator[Sample]:
    """An endless stream of training samples of one kind; the same seed gives the same stream."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind of samples {kind!r}; known: {', '.join(KINDS)}")
    stream = random.Random(f"{kind} {seed}")
    makers = [maker for maker, _ in KINDS[kind]]
    weights = [weight for _, weight in KINDS[kind]]
    while True:
        yield stream.choices(makers, weights)[0](stream)
