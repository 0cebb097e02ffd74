"""From a request's constraint to what follows its sequences."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from typing import Generic, TypeVar

from llguidance import LLMatcher

from headrace.errors import InvalidRequest
from headrace.grammar.all_of import AllOf
from headrace.grammar.compile import CompiledOutput, OutputForm, compile_output
from headrace.grammar.constraint import Constraint
from headrace.grammar.matcher import Matcher
from headrace.grammar.thinking import Lines, ThinkingBudget
from headrace.grammar.vocabulary import Vocabulary
from headrace.types.request import ConstraintSpec

NUM_KEPT = 64
"""Grammars that are kept compiled, those asked for last, and forms of outputs beside them. What the masks of a grammar
have cost is kept with it."""


class ConstraintFactory:
    """Makes constraints for one model. May be used by several threads."""

    def __init__(self, vocabulary: Vocabulary, lines: Callable[[], Lines]) -> None:
        """lines: makes those of an answer that has no text yet."""
        self.vocabulary = vocabulary
        self._lines = lines
        self._grammars: _Kept[LLMatcher] = _Kept()
        self._outputs: _Kept[CompiledOutput] = _Kept()

    def warm_up(self) -> None:
        """Do what is needed once for all grammars: no thread makes headway while llguidance takes in a vocabulary."""
        _ = self.vocabulary.compiled

    def output(self, form: OutputForm) -> CompiledOutput:
        """An output's grammar, compiled already so that `begin` need not. Raises InvalidRequest.

        It may take long the first time. In the next turn of a conversation nothing is compiled again.
        """
        content = sha256(repr(form).encode()).hexdigest()
        output = self._outputs.find(content, lambda: compile_output(form, self.vocabulary))
        self._find(output.grammar)
        return output

    def begin(self, spec: ConstraintSpec, stop_token_ids: frozenset[int]) -> Constraint:
        """The constraint of a sequence that has said nothing yet. Raises InvalidRequest if it can't be compiled."""
        parts: list[Constraint] = []
        if spec.thinking is not None:
            parts.append(ThinkingBudget(spec.thinking, self.vocabulary, self._lines))
        if spec.grammar is not None:
            parts.append(Matcher(self._find(spec.grammar).deep_copy(), self.vocabulary, stop_token_ids))
        return parts[0] if len(parts) == 1 else AllOf(parts)

    def _find(self, grammar: str) -> LLMatcher:
        return self._grammars.find(grammar, lambda: self._compiled(grammar))

    def _compiled(self, grammar: str) -> LLMatcher:
        made = LLMatcher(self.vocabulary.compiled, grammar, log_level=0)
        if made.is_error():
            raise InvalidRequest(f"the grammar can't be compiled: {made.get_error()}")
        return made


T = TypeVar("T")


class _Kept(Generic[T]):
    """What was asked for last, by what it was made of. Several threads at once may make the same."""

    def __init__(self) -> None:
        self._made: OrderedDict[str, T] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, source: str, make: Callable[[], T]) -> T:
        with self._lock:
            if (found := self._made.get(source)) is not None:
                self._made.move_to_end(source)
                return found
        made = make()
        with self._lock:
            self._made[source] = made
            while len(self._made) > NUM_KEPT:
                self._made.popitem(last=False)
        return made
