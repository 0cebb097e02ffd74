"""Regular expressions of schemas, matched in time that grows with the text only."""

from __future__ import annotations

import json
from functools import cache, lru_cache

from llguidance import LLMatcher, LLTokenizer

from headrace.grammar.vocabulary import TokenTable, Vocabulary


def is_found(pattern: str, text: str) -> bool | None:
    """Whether a schema's `pattern` is found in a text; None for a pattern that grammars don't support."""
    compiled = _compiled(pattern)
    if compiled.is_error():
        return None
    matcher = compiled.deep_copy()
    quoted = json.dumps(text, ensure_ascii=False).encode()
    return matcher.try_consume_tokens(list(quoted)) == len(quoted) and bool(matcher.is_accepting())


@lru_cache(128)
def _compiled(pattern: str) -> LLMatcher:
    grammar = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": pattern}))
    return LLMatcher(_bytes(), grammar, log_level=0)


@cache
def _bytes() -> LLTokenizer:
    """A vocabulary with a token for each byte."""
    return Vocabulary(TokenTable(tuple(bytes([byte]) for byte in range(256)), frozenset(), {})).compiled
