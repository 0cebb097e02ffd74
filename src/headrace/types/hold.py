"""What a grammar makes certain of an output, so that whoever reads it need not guess."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OutputHold:
    """Of one output that a grammar holds.

    thinks: blocks of thinking may come before anything else; in any other place their markers are text.
    call_openers: texts that calls begin with, none if there can be no calls; what begins with anything else is none.
    is_mixed: a call may come behind text; else only where the answer begins.
    json_values: tool and parameter of the values between tags that are JSON if they begin with a bracket. Any other
    value ends at the first closing tag.
    """

    thinks: bool
    call_openers: tuple[str, ...] = ()
    is_mixed: bool = False
    json_values: frozenset[tuple[str, str]] = frozenset()
