"""Makes constraints and caches compiled grammars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Any

from llguidance import LLMatcher

from headrace.errors import InvalidRequest
from headrace.grammar.compile import CompiledOutput, OutputForm
from headrace.grammar.compiler import Compiler
from headrace.grammar.constraint import AllOf, Constraint
from headrace.grammar.matcher import Matcher, compiled_grammar
from headrace.grammar.thinking import ThinkingBudget
from headrace.grammar.vocabulary import Vocabulary
from headrace.lru_cache import LruCache
from headrace.types.request import ConstraintSpec, OutputGuarantees, ThinkingLimit

MAX_CHARACTERS = 1_000_000
"""Over all schemas and grammars of a request; a value counts like a character."""

NUM_KEPT = 32
"""Compiled grammars and output forms kept (least recently used go first). The cost of a grammar's masks is kept with
it."""


class ConstraintFactory:
    """Makes constraints for one model. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._compiler = Compiler(vocabulary)
        self._grammars: LruCache[str, LLMatcher] = LruCache(NUM_KEPT)
        self._outputs: LruCache[str, CompiledOutput] = LruCache(NUM_KEPT)

    def prepare(self) -> None:
        """Do the one-time work for all grammars: llguidance blocks all threads while it reads a vocabulary."""
        _ = self.vocabulary.compiled
        self._compiler.prepare()

    def known(self, form: OutputForm, thinking: ThinkingLimit | None) -> tuple[ConstraintSpec, OutputGuarantees] | None:
        """As `spec` if the form is compiled already, else None.

        Raises InvalidRequest for a form that is too large.
        """
        output = self._outputs.get(_key(form))
        compiled = None if output is None else self._grammars.get(output.grammar)
        return None if output is None or compiled is None else _spec(output, thinking, compiled)

    def output(self, form: OutputForm) -> CompiledOutput:
        """An output's grammar, compiled so that `begin` need not. Raises InvalidRequest.

        The first time may take long; the next turn of a conversation reuses it.
        """
        output = self._outputs.find(_key(form), lambda: self._compiler.output(form))
        self.compiled(output.grammar)
        return output

    def spec(self, form: OutputForm, thinking: ThinkingLimit | None) -> tuple[ConstraintSpec, OutputGuarantees]:
        """The engine's constraint with its compiled grammar, and the parser's guarantees.

        May take long and raises as `output` does. The spec keeps the compiled grammar even if it leaves this cache.
        """
        output = self.output(form)
        return _spec(output, thinking, self.compiled(output.grammar))

    def schema_violation(self, schema: Any, text: str) -> str | None:
        return self._compiler.schema_violation(schema, text)

    def begin(self, spec: ConstraintSpec, stop_token_ids: frozenset[int]) -> Constraint:
        """The constraint of an empty sequence. Raises InvalidRequest if it can't be compiled."""
        parts: list[Constraint] = []
        if spec.thinking is not None:
            parts.append(ThinkingBudget(spec.thinking, self.vocabulary))
        if spec.grammar is not None:
            # It may have failed only because of its accumulated mask cost: compile it again next time.
            drop = partial(self._grammars.remove, spec.grammar)
            compiled = spec.compiled if isinstance(spec.compiled, LLMatcher) else self.compiled(spec.grammar)
            begun = compiled.deep_copy()
            parts.append(Matcher(begun, self.vocabulary, stop_token_ids, path=spec.path, on_failure=drop))
        return parts[0] if len(parts) == 1 else AllOf(parts)

    def compiled(self, grammar: str) -> LLMatcher:
        """A grammar in llguidance's syntax. May take long. Raises InvalidRequest."""
        return self._grammars.find(grammar, lambda: compiled_grammar(grammar, self.vocabulary))


def _spec(
    output: CompiledOutput, thinking: ThinkingLimit | None, compiled: LLMatcher
) -> tuple[ConstraintSpec, OutputGuarantees]:
    return ConstraintSpec(output.grammar, thinking, output.path, compiled), output.guarantees


def _key(form: OutputForm) -> str:
    values = [] if form.structure is None else [form.structure.value]
    values += [] if form.calls is None else [tool.parameters for tool in form.calls.tools]
    if _is_larger(values, MAX_CHARACTERS):
        message = f"schemas and grammars may have at most {MAX_CHARACTERS:,} characters and values in total"
        raise InvalidRequest(message, param=form.path)
    try:
        return sha256(repr(form).encode("utf-8", "surrogatepass")).hexdigest()
    except RecursionError as error:
        raise InvalidRequest("the JSON schema is nested too deeply", param=form.path) from error


def _is_larger(values: Sequence[Any], most: int) -> bool:
    """Whether JSON values have more than `most` characters and parts; stops counting there."""
    waiting, size = list(values), 0
    while waiting and size <= most:
        value = waiting.pop()
        size += 1 + (len(value) if isinstance(value, str | list | tuple | Mapping) else 0)
        if isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()] if size <= most else []
        elif isinstance(value, list | tuple):
            waiting += value if size <= most else []
    return size > most
