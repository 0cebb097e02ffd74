"""What a grammar guarantees about an output, so that the parser needs no heuristics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OutputGuarantees:
    """Guarantees of one grammar-constrained output.

    thinks: thinking may come first; elsewhere its markers are text.
    call_starts: texts that begin calls, none if there can be no calls; nothing else begins one.
    is_mixed: calls may follow text; otherwise they only come first.
    json_values: (tool, parameter) pairs whose values between tags are JSON if they begin with a bracket. Any other
    value ends at the first closing tag.
    """

    thinks: bool
    call_starts: tuple[str, ...] = ()
    is_mixed: bool = False
    json_values: frozenset[tuple[str, str]] = frozenset()
