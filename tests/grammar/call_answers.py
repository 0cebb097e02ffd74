"""Outputs of a model that knows nothing but is held to calls, and what the stream parser makes of them."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from grammar.random_answers import legal_ids

from headrace.families.family import ModelFamily
from headrace.grammar.compile import OutputForm, compile_output
from headrace.grammar.constraint import Constraint
from headrace.grammar.factory import ConstraintFactory
from headrace.grammar.vocabulary import Vocabulary
from headrace.text.stream_parser import StreamParser
from headrace.tool_calls.forms import TagBody
from headrace.tool_calls.syntaxes import SYNTAXES
from headrace.types.chat import ToolDefinition
from headrace.types.events import Text, ToolArguments, ToolCallStart
from headrace.types.model import TokenIds
from headrace.types.request import ConstraintSpec, OutputGuarantees

END = 256
PATIENCE = 40
NASTY_PATIENCE = 400


class ByteTokenizer:
    """Every byte is a token, and there are some special ones."""

    def __init__(self, special: Sequence[str]) -> None:
        self.added_tokens = {"<end>": END} | {text: END + 1 + index for index, text in enumerate(special)}
        self.special_ids = frozenset(self.added_tokens.values())
        self.token_ids = TokenIds(END + 1 + len(special))

    def token_bytes(self, token_id: int) -> bytes | None:
        return bytes([token_id]) if token_id < END else None

    def token_text(self, token_id: int) -> str:
        return next(text for text, each in self.added_tokens.items() if each == token_id)

    def encode(self, text: str) -> list[int]:
        for name in sorted(self.added_tokens, key=len, reverse=True):
            before, found, after = text.partition(name)
            if found:
                return [*self.encode(before), self.added_tokens[name], *self.encode(after)]
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        pieces = [bytes([each]) if each < END else self.token_text(each).encode() for each in token_ids]
        return b"".join(pieces).decode()


@functools.cache
def made(special: tuple[str, ...]) -> ConstraintFactory:
    return ConstraintFactory(Vocabulary(ByteTokenizer(special)))


def special_of(name: str, has_special: bool) -> tuple[str, ...]:
    return SYNTAXES[name].parser.markers if has_special or SYNTAXES[name].messages is not None else ()


def begun(form: OutputForm, special: tuple[str, ...] = ()) -> Constraint:
    spec = ConstraintSpec(compile_output(form, made(special).vocabulary).grammar)
    return made(special).begin(spec, frozenset({END}))


def takes(constraint: Constraint, text: str, special: tuple[str, ...] = ()) -> bool:
    tokens = ByteTokenizer(special).encode(text)
    return constraint.window(tokens).num_legal == len(tokens)


def takes_whole(constraint: Constraint, text: str) -> bool:
    tokens = [*text.encode(), END]
    return constraint.window(tokens).num_legal == len(tokens)


def guarantees_of(form: OutputForm, special: tuple[str, ...] = ()) -> OutputGuarantees:
    return compile_output(form, made(special).vocabulary).guarantees


def random_output(
    constraint: Constraint, tokenizer: ByteTokenizer, ways_out: Sequence[str], seed: int, *, pieces: Sequence[str] = ()
) -> str:
    """Bytes at random, now and then one of the pieces; after some of them, whole ways out wherever one may come."""
    rng = np.random.default_rng(seed)
    outs = [[END], *map(tokenizer.encode, ways_out)]
    nasty = [*map(tokenizer.encode, pieces)]
    said: list[int] = []
    while len(said) < 4000:
        (mask,) = constraint.window(()).masks
        assert mask is not None
        legal = legal_ids(mask)
        following = [legal[int(rng.integers(len(legal)))]]
        if nasty and rng.random() < 0.6:
            piece = nasty[int(rng.integers(len(nasty)))]
            following = piece if constraint.window(piece).num_legal == len(piece) else following
        if len(said) > (NASTY_PATIENCE if nasty else PATIENCE) and rng.random() < 0.8:
            if nasty:
                rng.shuffle(outs)
            following = next((out for out in outs if constraint.window(out).num_legal == len(out)), following)
        constraint.accept(following)
        if following == [END]:
            return tokenizer.decode(said)
        said += following
    raise AssertionError(f"no end: {tokenizer.decode(said)[-200:]!r}")


def parsed(
    name: str,
    output: str,
    tools: Sequence[ToolDefinition],
    guarantees: OutputGuarantees | None = None,
    *,
    think: tuple[str, str] | tuple[None, None] = (None, None),
    cuts: Sequence[int] = (),
) -> tuple[str, list[tuple[str, Any]]]:
    """Text of an output, and its calls. cuts: where it is split."""
    family = ModelFamily("made up", tool_format=name, think_open=think[0], think_close=think[1])
    parser = StreamParser(family, thinking_open=False, tools=tuple(tools), guarantees=guarantees)
    calls: list[list[str]] = []
    text = ""
    pieces = [output[start:end] for start, end in itertools.pairwise((0, *sorted(cuts), len(output)))]
    events = [event for piece in pieces for event in parser.push(piece)]
    for event in (*events, *parser.finish()):
        match event:
            case ToolCallStart():
                calls.append([event.name, ""])
            case ToolArguments():
                calls[event.index][1] += event.text
            case Text():
                text += event.text
    return text, [(called, json.loads(arguments)) for called, arguments in calls]


def ways_out_of(name: str) -> list[str]:
    """Texts that end whatever text a call of a syntax may stand in."""
    bodies = [form.body for form in SYNTAXES[name].forms]
    tags = [body.tags.frame + body.tags.value_close for body in bodies if isinstance(body, TagBody)]
    return [*tags, '"', "}", "]", ")"]
