"""Exception boundaries around rows and side work, and failures as the scheduler gets them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from headrace.errors import GenerationFailed, GrammarFailed
from headrace.grammar.constraint import Constraint
from headrace.types.step import Chunk, ChunkFailure

Row = TypeVar("Row")
Result = TypeVar("Result")


def isolate(
    rows: Iterable[Row], work: Callable[[Row], Result], failed: Callable[[Row, Exception], Result]
) -> list[Result]:
    """Results of `work` by row. A row whose work raises fails alone: `failed` handles the error and returns its result.

    A function around all rows, since a context manager would cost each row three calls in each step.
    """
    results: list[Result] = []
    for row in rows:
        try:
            results.append(work(row))
        except Exception as error:  # the row's exception boundary
            results.append(failed(row, error))
    return results


@contextmanager
def boundary(failed: Callable[[Exception], None]) -> Iterator[None]:
    """An exception boundary around side work: `failed` handles its error, and the caller continues."""
    try:
        yield
    except Exception as error:
        failed(error)


def failures_of(chunk: Chunk, error: BaseException) -> list[ChunkFailure]:
    """A failure for the chunk and for each of its forks."""
    return [ChunkFailure(sequence_id, error) for sequence_id in (chunk.sequence_id, *chunk.forks)]


def not_drawn(sequence_id: str, constraint: Constraint | None) -> ChunkFailure:
    """The failure of a sequence for which no token could be drawn."""
    if constraint is not None:
        return ChunkFailure(sequence_id, GrammarFailed("the answer's grammar leaves no token that can be drawn"))
    error = GenerationFailed("no token can be drawn: the logits are not numbers, or every token is banned")
    return ChunkFailure(sequence_id, error)
