"""From a request's constraint to what follows its sequences."""

from __future__ import annotations

import threading
from collections import OrderedDict

from llguidance import LLMatcher

from headrace.errors import InvalidRequest
from headrace.grammar.all_of import AllOf
from headrace.grammar.constraint import Constraint
from headrace.grammar.matcher import Matcher
from headrace.grammar.thinking import ThinkingBudget
from headrace.grammar.vocabulary import Vocabulary
from headrace.types.request import ConstraintSpec

NUM_KEPT = 64
"""Grammars that are kept compiled, those asked for last. What their masks have cost is kept with them."""


class ConstraintFactory:
    """Makes constraints for one model. May be used by several threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def warm_up(self) -> None:
        """Do what is needed once for all grammars: no thread makes headway while llguidance takes in a vocabulary."""
        _ = self.vocabulary.compiled

    def prepare(self, grammar: str) -> None:
        """Compile a grammar, which may take long, so that `begin` need not. Raises InvalidRequest if it can't be."""
        self._find(grammar)

    def begin(self, spec: ConstraintSpec, stop_token_ids: frozenset[int]) -> Constraint:
        """The constraint of a sequence that has said nothing yet. Raises InvalidRequest like `prepare`."""
        parts: list[Constraint] = []
        if spec.thinking is not None:
            parts.append(ThinkingBudget(spec.thinking, self.vocabulary))
        if spec.grammar is not None:
            parts.append(Matcher(self._find(spec.grammar).deep_copy(), self.vocabulary, stop_token_ids))
        return parts[0] if len(parts) == 1 else AllOf(parts)

    def _find(self, grammar: str) -> LLMatcher:
        with self._lock:
            if (found := self._kept.get(grammar)) is not None:
                self._kept.move_to_end(grammar)
                return found
        made = LLMatcher(self.vocabulary.compiled, grammar, log_level=0)
        if made.is_error():
            raise InvalidRequest(f"the grammar can't be compiled: {made.get_error()}")
        with self._lock:
            self._kept[grammar] = made
            while len(self._kept) > NUM_KEPT:
                self._kept.popitem(last=False)
        return made
