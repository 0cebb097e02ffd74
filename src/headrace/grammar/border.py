"""The border to llguidance: its limits, and its panics as errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from llguidance import LLParserLimits

from headrace.errors import GenerationFailed

P = ParamSpec("P")
Result = TypeVar("Result")

LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=100_000,
    verbose_errors=False,
)
"""Of one grammar: a mask takes 12 ms at most (of 250,000 tokens), and what masks have cost is kept in 60 MB at most."""


def translated(call: Callable[P, Result]) -> Callable[P, Result]:
    """The call, with a panic of the library (no Exception) translated to GenerationFailed."""

    @wraps(call)
    def translating(*args: P.args, **kwargs: P.kwargs) -> Result:
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            if isinstance(error, Exception) or type(error).__module__ != "pyo3_runtime":
                raise
        # The panic's text may quote the grammar.
        raise GenerationFailed("the grammar library failed")

    return translating
