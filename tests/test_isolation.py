"""Exception boundaries: foreign errors are translated, interruptions and our own errors pass."""

from __future__ import annotations

import asyncio

import pytest

from headrace.cancellation import WorkCancelled
from headrace.errors import GenerationFailed, InvalidRequest
from headrace.isolation import errors_as, first_line, isolate_each, isolated


class Panic(BaseException):
    """As PyO3 raises panics of Rust libraries."""


@pytest.mark.parametrize("error", [ValueError("of a library"), StopIteration(), MemoryError(), Panic()])
def test_errors_and_panics_are_translated_and_kept_as_the_cause(error: BaseException) -> None:
    with pytest.raises(InvalidRequest, match="not so") as caught, errors_as(lambda _: InvalidRequest("not so")):
        raise error
    assert caught.value.__cause__ is error


INTERRUPTIONS = [KeyboardInterrupt(), SystemExit(), GeneratorExit(), asyncio.CancelledError(), WorkCancelled()]


@pytest.mark.parametrize("error", [GenerationFailed("ours"), *INTERRUPTIONS])
def test_our_own_errors_and_interruptions_pass(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, errors_as(lambda _: InvalidRequest("not so")):
        raise error
    assert caught.value is error


def test_the_end_of_the_process_is_an_error_of_code_that_may_do_so() -> None:
    with pytest.raises(InvalidRequest), errors_as(lambda _: InvalidRequest("not so"), may_exit=True):
        raise SystemExit


def test_where_exceptions_pass_only_panics_are_translated() -> None:
    with pytest.raises(ValueError, match="theirs"), errors_as(lambda _: InvalidRequest("not so"), passing=(Exception,)):
        raise ValueError("theirs")
    with pytest.raises(InvalidRequest), errors_as(lambda _: InvalidRequest("not so"), passing=(Exception,)):
        raise Panic


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("no such file\nmore"), "no such file"),
        (ValueError("error for 'size':\n    TypeError: not an int\nmore"), "error for 'size': TypeError: not an int"),
        (ValueError("reason:"), "reason:"),
        (KeyError(), "KeyError"),
    ],
)
def test_the_first_line_of_a_foreign_error_says_what_is_wrong(error: Exception, line: str) -> None:
    assert first_line(error) == line


def test_side_work_fails_without_its_caller_and_does_not_swallow_interruptions() -> None:
    failures: list[Exception] = []
    with isolated(failures.append):
        raise ValueError("side work")
    assert [str(each) for each in failures] == ["side work"]
    with pytest.raises(KeyboardInterrupt), isolated(failures.append):
        raise KeyboardInterrupt


def test_a_row_that_fails_leaves_the_others_their_results() -> None:
    assert isolate_each([4, 0, 2], lambda row: 8 // row, lambda row, error: -1) == [2, -1, 4]
