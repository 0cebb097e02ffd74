"""Follows one sequence through a grammar."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLMatcher

from headrace.errors import GenerationFailed, GrammarFailed, InvalidRequest
from headrace.grammar.constraint import DraftMasks, Mask, mask_of, num_words
from headrace.grammar.faults import LIMITS, describe_fault, panics_translated
from headrace.grammar.vocabulary import Vocabulary

_FAILURES = (
    ("too many", "it is too complex at this point of the text"),
    ("max is", "it is too complex at this point of the text"),
    ("TooComplex", "it is too complex at this point of the text"),
    ("NoExtension", "the model has no token for the required text"),
    ("forced bytes", "the model has no token for the required text"),
)
"""Errors of llguidance that are the grammar's fault, by a part of their texts."""


def compiled_grammar(grammar: str, vocabulary: Vocabulary) -> LLMatcher:
    """A matcher at the beginning of a grammar in llguidance's syntax. Raises InvalidRequest."""
    compiled = panics_translated(LLMatcher)(vocabulary.compiled, grammar, log_level=0, limits=LIMITS)
    if compiled.is_error():
        raise InvalidRequest(f"the grammar can't be compiled: {describe_fault(compiled.get_error())}")
    return compiled


class Matcher:
    """A Constraint: a sequence's position in a grammar.

    Stop tokens are allowed exactly where the grammar may end, whatever their text. Where only one text is possible,
    only its usual tokens are allowed.
    """

    def __init__(
        self,
        grammar: LLMatcher,
        vocabulary: Vocabulary,
        stop_token_ids: frozenset[int],
        *,
        path: str | None = None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """grammar: not yet begun, and not shared. path: the field of the request that an error names.

        on_failure: called when the grammar can't go on.
        """
        self._grammar = grammar
        self._path = path
        self._on_failure = on_failure
        self._vocabulary = vocabulary
        self._stop_token_ids = stop_token_ids
        self._stops = mask_of(stop_token_ids, vocabulary.size)
        self._has_stopped = False

    @property
    def is_over(self) -> bool:
        return self._has_stopped or self._grammar.is_stopped()

    @panics_translated
    def num_legal(self, drafts: Sequence[int]) -> int:
        if self.is_over:
            return int(bool(drafts) and drafts[0] in self._stop_token_ids)
        known = self._vocabulary.tokenizer.token_ids
        # llguidance fails for good on an id that it doesn't know
        drafts = list(itertools.takewhile(known.__contains__, drafts))
        before_stop = list(itertools.takewhile(lambda draft: draft not in self._stop_token_ids, drafts))
        num_valid: int = self._grammar.validate_tokens(before_stop)
        if num_valid < len(before_stop) or len(before_stop) == len(drafts):
            return num_valid
        return num_valid + self._may_end_after(before_stop)

    def _may_end_after(self, token_ids: list[int]) -> bool:
        num_consumed = self._grammar.try_consume_tokens(token_ids)
        may_end: bool = self._grammar.is_accepting()
        if num_consumed and not self._grammar.rollback(num_consumed):
            raise self._failure()
        return may_end

    @panics_translated
    def window(self, drafts: Sequence[int]) -> DraftMasks:
        masks: list[Mask | None] = []
        num_legal = num_consumed = 0
        for draft in drafts:
            mask = self._mask()
            masks.append(mask)
            if not _allows(mask, draft):
                break
            num_legal += 1
            if draft in self._stop_token_ids:
                break
            num_consumed += self._grammar.try_consume_tokens([draft])
        else:
            masks.append(self._mask())
        if num_consumed and not self._grammar.rollback(num_consumed):
            raise self._failure()
        masks += [None] * (len(drafts) + 1 - len(masks))
        return DraftMasks(tuple(masks), num_legal)

    @panics_translated
    def accept(self, token_ids: Sequence[int]) -> None:
        """See Constraint. Raises GenerationFailed for a token that may not come."""
        for token_id in token_ids:
            if self._has_stopped:
                return
            if token_id in self._stop_token_ids:
                self._has_stopped = True
            elif not self._grammar.consume_token(token_id):
                raise self._failure()

    @panics_translated
    def forced_tokens(self, limit: int) -> tuple[int, ...]:
        return () if self.is_over else tuple(self._grammar.compute_ff_tokens()[:limit])

    def _mask(self) -> Mask:
        mask: Mask = np.zeros(num_words(self._vocabulary.size), dtype=np.uint32)
        self._grammar.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._grammar.is_error():
            raise self._failure()
        may_end = _allows(mask, self._vocabulary.end_id)
        _forbid(mask, self._vocabulary.end_id)
        return mask | self._stops if may_end else mask & ~self._stops

    def _failure(self) -> GrammarFailed | GenerationFailed:
        self._on_failure()
        error = f"{self._grammar.get_error()} {self._grammar.stop_reason()}"
        for part, reason in _FAILURES:
            if part in error:
                return GrammarFailed(f"the answer's grammar can't go on: {reason}", param=self._path)
        return GenerationFailed("the answer's grammar can't go on with this token")


def _allows(mask: Mask, token_id: int) -> bool:
    return 0 <= token_id < 32 * len(mask) and bool(mask[token_id // 32] >> np.uint32(token_id % 32) & 1)


def _forbid(mask: Mask, token_id: int) -> None:
    mask[token_id // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token_id % 32))
