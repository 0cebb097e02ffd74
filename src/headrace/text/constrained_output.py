"""Separates answer, thinking and calls in a grammar-constrained output.

The grammar has decided already, so no heuristics are needed: thinking comes first and ends at its first closer,
whatever surrounds it; calls begin with the grammar's openers, never in thinking, after text only where the
grammar allows it, and quotes make no difference.
"""

from __future__ import annotations

from headrace.families.family import ModelFamily
from headrace.text.call_reader import CallReader
from headrace.text.emitter import Emitter
from headrace.text.plain_output import PlainOutput
from headrace.tool_calls.reader import Reader, Reading
from headrace.types.output_guarantees import OutputGuarantees


class ConstrainedOutput(PlainOutput):
    """State of one answer."""

    _minds_quotes = False

    def __init__(
        self,
        family: ModelFamily,
        reader: Reader,
        emitter: Emitter,
        calls: CallReader | None,
        guarantees: OutputGuarantees,
        *,
        thinking_open: bool,
    ) -> None:
        super().__init__(family, reader, emitter, calls, thinking_open=thinking_open)
        blocks = {opener: closers for opener, closers in self._blocks.items() if opener == family.think_open}
        self._blocks = blocks if guarantees.thinks else {}
        openers = () if calls is None else (*calls.openers, *calls.bare_openers)
        self._call_openers = tuple(
            each for each in openers if any(known.startswith(each) for known in guarantees.call_openers)
        )
        self._bare_openers = ()
        self._is_mixed = guarantees.is_mixed
        self._has_spoken = False

    def _openers_in_thinking(self) -> tuple[str, ...]:
        return ()

    def _openers_that_count(self) -> list[str]:
        if not self._has_spoken:
            return super()._openers_that_count()
        return [*self._call_openers] if self._is_mixed or self._emitter.num_calls else []

    def _close_thinking(self, closer: str) -> Reading[None]:
        yield from super()._close_thinking(closer)
        self._has_spoken = False

    def _say(self, text: str) -> None:
        self._has_spoken = True
        super()._say(text)
