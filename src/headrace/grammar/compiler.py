"""Compiles clients' schemas and checks answers in helper processes.

llguidance may take very long over a grammar, use much memory, or end its process. What compiles in a
helper is compiled once more in the server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import numpy as np

from headrace.errors import HeadraceError, InvalidRequest
from headrace.grammar.compile import CompiledOutput, OutputForm, compile_output
from headrace.grammar.matcher import Matcher, compiled_grammar
from headrace.grammar.schema import schema_violation
from headrace.grammar.vocabulary import TokenTable, Vocabulary
from headrace.isolation import errors_as, isolated
from headrace.lru_cache import LruCache
from headrace.sandbox import LimitExceeded, Preparation, Sandbox

_NUM_KEPT = 2
_NUM_TRIED = 4

# In the helper process.
_vocabularies: LruCache[str, Vocabulary] = LruCache(_NUM_KEPT)


class UnknownVocabulary(Exception):
    """The process is new or has dropped the vocabulary: send it again."""


def take_vocabulary(table: TokenTable) -> None:
    """Compile and keep a vocabulary, for calls that name it by digest."""
    vocabulary = Vocabulary(table)
    _ = vocabulary.compiled
    _vocabularies.put(table.digest, vocabulary)


def compile_on_trial(digest: str, form: OutputForm) -> CompiledOutput:
    """An output's grammar, compiled and begun. Raises InvalidRequest, and UnknownVocabulary."""
    if (vocabulary := _vocabularies.get(digest)) is None:
        raise UnknownVocabulary
    output = compile_output(form, vocabulary)
    try:
        _begin(Matcher(compiled_grammar(output.grammar, vocabulary), vocabulary, frozenset()))
    except InvalidRequest as error:
        raise InvalidRequest(error.message, param=form.path) from error
    return output


def _begin(matcher: Matcher) -> None:
    """Sample the first tokens of an answer: most overly complex grammars fail at the beginning."""
    for _ in range(_NUM_TRIED):
        (mask,) = matcher.window(()).masks
        matcher.forced_tokens(1)
        assert mask is not None
        words = np.flatnonzero(mask)
        if not len(words):
            return
        word = int(words[len(words) // 2])
        matcher.accept((32 * word + int(mask[word]).bit_length() - 1,))


log = logging.getLogger("headrace.grammar")

Result = TypeVar("Result")

NUM_PROCESSES = 2
"""Grammars compiled at once, for all models of the server."""

MAX_BYTES = 1 << 30
"""Private memory of each process; a vocabulary of 250,000 tokens takes 150 MB."""

COMPILE_S = 5.0
CHECK_S = 2.0

_VOCABULARY_S = 60.0

_LIMITS = {
    "time": f"it takes longer than {COMPILE_S:.0f} s to compile",
    "memory": "it takes too much memory to compile",
    "crash": "it is nested too deeply, or its rules refer to each other in too long a row",
}


@cache
def _sandbox() -> Sandbox:
    """One for all models of the process: a helper is large."""
    return Sandbox(num_processes=NUM_PROCESSES, max_bytes=MAX_BYTES)


class Compiler:
    """For one vocabulary. Thread-safe; calls wait for a free process."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def prepare(self) -> None:
        _sandbox().run_in_background(take_vocabulary, self._vocabulary.table, timeout_s=_VOCABULARY_S)

    def output(self, form: OutputForm) -> CompiledOutput:
        """An output's grammar, compiled on trial. Raises InvalidRequest."""
        passing = (HeadraceError, OSError)  # the last where no process can be started
        with errors_as(lambda error: InvalidRequest(_why_not(form, error), param=form.path), passing=passing):
            return self._in_process(compile_on_trial, form)

    def schema_violation(self, schema: Any, text: str) -> str | None:
        """Why a text is no JSON value that matches the schema; None if it is one or if that is unknown."""
        with isolated(_log_unchecked):
            return _sandbox().run(schema_violation, schema, text, timeout_s=CHECK_S)
        return None

    def _in_process(self, function: Callable[..., Result], *args: object) -> Result:
        table = self._vocabulary.table
        try:
            return _sandbox().run(function, table.digest, *args, timeout_s=COMPILE_S)
        except UnknownVocabulary:
            preparation = Preparation(take_vocabulary, (table,), _VOCABULARY_S)
            return _sandbox().run(function, table.digest, *args, timeout_s=COMPILE_S, preparation=preparation)


def _why_not(form: OutputForm, error: BaseException) -> str:
    """Why an output's grammar is refused, without the texts of libraries, which quote it."""
    if isinstance(error, LimitExceeded):
        what = "the answer's format" if form.structure is not None else "a tool's schema"
        return f"{what} can't be compiled: {_LIMITS[error.reason]}"
    if isinstance(error, RecursionError):
        return "the JSON schema is nested too deeply"
    if isinstance(error, UnicodeError):
        return "a lone surrogate is not text"
    log.warning("a grammar could not be compiled: %s", type(error).__name__)
    return "the answer's format can't be compiled"


def _log_unchecked(error: Exception) -> None:
    reason = error.reason if isinstance(error, LimitExceeded) else type(error).__name__
    log.warning("an answer could not be checked against its schema: %s", reason)
