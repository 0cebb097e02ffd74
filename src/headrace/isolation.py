"""Exception boundaries: around foreign code, around side work, and around each of several rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from headrace.cancellation import WorkCancelled
from headrace.errors import HeadraceError

Row = TypeVar("Row")
Result = TypeVar("Result")

_INTERRUPTIONS: tuple[type[BaseException], ...] = (
    KeyboardInterrupt,
    GeneratorExit,
    asyncio.CancelledError,
    WorkCancelled,
)


@contextmanager
def errors_as(
    translated: Callable[[BaseException], Exception],
    *,
    passing: tuple[type[BaseException], ...] = (HeadraceError,),
    may_exit: bool = False,
) -> Iterator[None]:
    """Translate whatever foreign code raises, panics of Rust libraries included, which are no Exceptions.

    passing: errors to leave unchanged, as interruptions always are. may_exit: whether the code ends the process for an
    error, as some of mlx-lm's models do where a package is missing: SystemExit is then an error, too.
    """
    unchanged = (*_INTERRUPTIONS, *passing, *(() if may_exit else (SystemExit,)))
    try:
        yield
    except unchanged:
        raise
    except BaseException as error:
        raise translated(error) from error


def first_line(error: BaseException) -> str:
    """The first line of a foreign error's message, with the next one if it ends with a colon, or the error's type."""
    line, _, rest = str(error).strip().partition("\n")
    if line.endswith(":"):
        line = f"{line} {rest.strip().partition(chr(10))[0]}".rstrip()
    return line or type(error).__name__


@contextmanager
def isolated(failed: Callable[[Exception], None]) -> Iterator[None]:
    """Around side work: `failed` handles its error, and the caller continues."""
    try:
        yield
    except Exception as error:
        failed(error)


def isolate_each(
    rows: Iterable[Row], work: Callable[[Row], Result], failed: Callable[[Row, Exception], Result]
) -> list[Result]:
    """Results of `work` by row. A row whose work raises fails alone: `failed` handles the error and returns its result.

    A function around all rows, since a context manager would cost each row three calls in each step.
    """
    results: list[Result] = []
    for row in rows:
        try:
            results.append(work(row))
        except Exception as error:
            results.append(failed(row, error))
    return results
