"""What runs in a helper process: compiling what a client sent, and checking an answer against its schema.

The library may take very long over a grammar, use much memory, or end its process. What has passed here is compiled
once more in the server.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np

from headrace.errors import InvalidRequest
from headrace.grammar.compile import CompiledOutput, OutputForm, compile_output
from headrace.grammar.matcher import Matcher, compiled_grammar
from headrace.grammar.schema import misfit
from headrace.grammar.vocabulary import TokenTable, Vocabulary

_NUM_KEPT = 2
_NUM_TRIED = 4

_vocabularies: OrderedDict[str, Vocabulary] = OrderedDict()


class UnknownVocabulary(Exception):
    """The process has just been started, or has had others since: the vocabulary has to be sent once more."""


def take_vocabulary(table: TokenTable) -> None:
    """Keep a vocabulary, compiled, for the calls that name it by its digest."""
    vocabulary = Vocabulary(table)
    _ = vocabulary.compiled
    _vocabularies[table.digest] = vocabulary
    while len(_vocabularies) > _NUM_KEPT:
        _vocabularies.popitem(last=False)


def compile_on_trial(digest: str, form: OutputForm) -> CompiledOutput:
    """An output's grammar, compiled and begun. Raises InvalidRequest, and UnknownVocabulary."""
    if (vocabulary := _vocabularies.get(digest)) is None:
        raise UnknownVocabulary
    _vocabularies.move_to_end(digest)
    output = compile_output(form, vocabulary)
    try:
        _begin(Matcher(compiled_grammar(output.grammar, vocabulary), vocabulary, frozenset()))
    except InvalidRequest as error:
        raise InvalidRequest(error.message, param=form.path) from error
    return output


def _begin(matcher: Matcher) -> None:
    """The first tokens of an answer, any that may come: what is too complex mostly is so from the beginning."""
    for _ in range(_NUM_TRIED):
        (mask,) = matcher.window(()).masks
        matcher.forced_tokens(1)
        assert mask is not None
        words = np.flatnonzero(mask)
        if not len(words):
            return
        word = int(words[len(words) // 2])
        matcher.accept((32 * word + int(mask[word]).bit_length() - 1,))


def misfit_on_trial(schema: Any, text: str) -> str | None:
    """See `misfit`."""
    return misfit(schema, text)
