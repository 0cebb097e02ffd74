"""All kinds of hostile inputs, by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from attack.body_inputs import body_inputs, bomb_inputs
from attack.grammar_inputs import grammar_inputs
from attack.inputs import Input
from attack.media_inputs import media_inputs, tool_inputs
from attack.mutated import mutated_inputs
from attack.text_inputs import id_inputs, number_inputs, text_inputs
from attack.wire_inputs import connection_inputs, path_inputs, session_inputs, wire_inputs

KINDS: Mapping[str, Callable[[random.Random, bool], list[Input]]] = {
    "grammars": grammar_inputs,
    "numbers": number_inputs,
    "ids": id_inputs,
    "texts": text_inputs,
    "bodies": body_inputs,
    "bombs": bomb_inputs,
    "media": media_inputs,
    "tools": tool_inputs,
    "mutated": mutated_inputs,
    "wire": wire_inputs,
    "paths": path_inputs,
    "connections": connection_inputs,
    "sessions": session_inputs,
}


def inputs_of(kind: str, is_whole: bool) -> list[Input]:
    """The same inputs every time; the sample leaves heavy ones out."""
    inputs = KINDS[kind](random.Random(f"attack {kind}"), is_whole)
    return inputs if is_whole else [each for each in inputs if not each.is_heavy]
