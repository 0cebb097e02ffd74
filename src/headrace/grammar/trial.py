"""Runs in a helper process: compiles clients' grammars and checks answers against their schemas.

llguidance may take very long over a grammar, use much memory, or end its process. What passes here is compiled once
more in the server.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.errors import InvalidRequest
from headrace.grammar.compile import CompiledOutput, OutputForm, compile_output
from headrace.grammar.matcher import Matcher, compiled_grammar
from headrace.grammar.schema import schema_violation
from headrace.grammar.vocabulary import TokenTable, Vocabulary
from headrace.lru_cache import LruCache

_NUM_KEPT = 2
_NUM_TRIED = 4

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


def schema_violation_on_trial(schema: Any, text: str) -> str | None:
    """See `schema_violation`."""
    return schema_violation(schema, text)
