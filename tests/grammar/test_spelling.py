"""Texts in the tokens of every kind of tokenizer, byte for byte, and forms that are met to the letter."""

from __future__ import annotations

import json
import random
import unicodedata
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text.vocabularies import byte_fallback, byte_level, metaspace, word_piece
from tokenizers import Tokenizer as Backend

from headrace.grammar.compile import OutputForm, compile_output
from headrace.grammar.factory import ConstraintFactory
from headrace.grammar.vocabulary import Vocabulary
from headrace.models.built_in import MINIATURE
from headrace.text.tokenizer import Tokenizer
from headrace.types.chat import Structure
from headrace.types.request import ConstraintSpec

ALL_BYTES = {
    "byte level": byte_level,
    "byte fallback, prefixed": byte_fallback,
    "byte fallback": lambda: byte_fallback(strips_space=False),
}
"""Tokenizers that can write any bytes."""

SOME_TEXTS = {
    "unigram, prefixed": metaspace,
    "unigram, prefixed once": lambda: metaspace("first"),
    "unigram": lambda: metaspace("never"),
    "word piece": word_piece,
}
"""Those that only have tokens for what they were trained on."""

ANY_TEXT = st.text() | st.text(st.sampled_from("the cat\n▁Ġ #s</>é你e\u0301\u212b\u2126\u1100\u1161\u11a8"))
NORMALISED = ("e\u0301", "\u212b", "\u2126", "\u1100\u1161\u11a8", "a\u0323\u0302", "nai\u0308ve cafe\u0301")


@cache
def factory(name: str) -> ConstraintFactory:
    made: Backend = {**ALL_BYTES, **SOME_TEXTS}[name]()
    return ConstraintFactory(Vocabulary(Tokenizer(made)))


@cache
def miniature() -> ConstraintFactory:
    return ConstraintFactory(Vocabulary(Tokenizer.load(MINIATURE)))


def made(name: str) -> ConstraintFactory:
    return miniature() if name == "miniature" else factory(name)


def in_mid_text(vocabulary: Vocabulary, token_ids: list[int]) -> str:
    """What the tokenizer library makes of the tokens behind another one."""
    tokenizer = vocabulary.tokenizer
    assert isinstance(tokenizer, Tokenizer)
    backend, context = tokenizer._backend, tokenizer.encode("t")
    before = backend.decode(context, skip_special_tokens=False)
    return str(backend.decode(context + token_ids, skip_special_tokens=False))[len(before) :]


@pytest.mark.parametrize("name", [*ALL_BYTES, "miniature"])
@given(text=ANY_TEXT)
@settings(max_examples=100, deadline=None)
def test_tokens_decode_to_the_text_that_they_spell(name: str, text: str) -> None:
    vocabulary = made(name).vocabulary
    token_ids = vocabulary.spelling(text)
    assert in_mid_text(vocabulary, token_ids) == text
    assert not vocabulary.tokenizer.special_ids.intersection(token_ids)


@pytest.mark.parametrize("name", [*ALL_BYTES, "miniature"])
@given(
    data=st.binary().map(lambda data: data.replace(b"\xff", b"\xfe")) | ANY_TEXT.map(lambda text: text.encode()[:-1])
)
@settings(max_examples=100, deadline=None)
def test_the_tokens_that_a_grammar_uses_have_the_bytes_that_they_spell(name: str, data: bytes) -> None:
    compiled = made(name).vocabulary.compiled
    assert compiled.decode_bytes(compiled.tokenize_bytes(data)) == data


@pytest.mark.parametrize("name", SOME_TEXTS)
@given(text=ANY_TEXT)
@settings(max_examples=100, deadline=None)
def test_what_has_no_token_ends_the_spelling(name: str, text: str) -> None:
    vocabulary = made(name).vocabulary
    token_ids = vocabulary.spelling(text)
    spelled = b"".join(map(vocabulary.bytes_of, token_ids))
    assert text.encode().startswith(spelled)
    if all(ord(character) < 128 for character in text):
        assert in_mid_text(vocabulary, token_ids) == spelled.decode()
    rest = text.encode()[len(spelled) :]
    assert not any(rest.startswith(each) for each in map(vocabulary.bytes_of, ordinary_ids(vocabulary)) if each)


def ordinary_ids(vocabulary: Vocabulary) -> list[int]:
    return sorted(set(range(vocabulary.size)) - vocabulary.tokenizer.special_ids)


@pytest.mark.parametrize("name", [*ALL_BYTES, "miniature"])
def test_a_text_comes_in_the_tokenizers_own_tokens_where_they_spell_it(name: str) -> None:
    vocabulary = made(name).vocabulary
    text = 'the cat sat {"and": "the dog"}\nran to Paris.'
    behind_newline = vocabulary.tokenizer.encode("\n" + text)
    assert vocabulary.spelling(text) == behind_newline[-len(vocabulary.spelling(text)) :]


def test_of_a_long_text_a_beginning_is_spelled_in_the_tokens_of_the_whole() -> None:
    vocabulary = made("miniature").vocabulary
    text = "the quick brown fox jumps over the lazy dog, " * 1000
    token_ids = vocabulary.spelling(text)
    assert 50 < len(token_ids) < 2000
    assert vocabulary.tokenizer.encode(text)[: len(token_ids)] == token_ids


def written(made: ConstraintFactory, structure: Structure, seed: int) -> str:
    """An answer of random tokens among those that may come."""
    vocabulary = made.vocabulary
    grammar = compile_output(OutputForm(structure, None, None, None), vocabulary).grammar
    stop = min(vocabulary.tokenizer.special_ids)
    constraint = made.begin(ConstraintSpec(grammar), frozenset({stop}))
    rng, token_ids = random.Random(seed), []
    while not constraint.is_over:
        (mask,) = constraint.window(()).masks
        assert mask is not None
        token_id = rng.choice([each for each in range(vocabulary.size) if mask[each // 32] >> each % 32 & 1])
        constraint.accept((token_id,))
        if token_id == stop:
            break
        token_ids.append(token_id)
    return in_mid_text(vocabulary, token_ids)


@pytest.mark.parametrize("name", [*ALL_BYTES, "miniature"])
@pytest.mark.parametrize("text", ["The", " The", "<s>", "<|im_end|>", "a  b\n\n", *NORMALISED])
def test_a_choice_comes_as_it_was_given(name: str, text: str) -> None:
    assert written(made(name), Structure("choice", (text,)), 0) == text
    others = (text, text + text, "x" + text)
    assert {written(made(name), Structure("choice", others), seed) for seed in range(4)} <= set(others)


@pytest.mark.parametrize("name", SOME_TEXTS)
@pytest.mark.parametrize("text", [" the cat", " the dog ran"])
def test_a_choice_of_known_words_comes_as_it_was_given(name: str, text: str) -> None:
    assert written(made(name), Structure("choice", (text,)), 0) == text


@pytest.mark.parametrize("name", [*ALL_BYTES, "miniature"])
@pytest.mark.parametrize("text", NORMALISED)
def test_what_a_tokenizer_normalises_comes_as_it_was_given_in_every_form(name: str, text: str) -> None:
    assert text != unicodedata.normalize("NFC", text)
    listed = {"type": "object", "properties": {text: {"const": 1}}, "required": [text], "additionalProperties": False}
    for schema, answer in (({"const": text}, text), ({"enum": [text]}, text), (listed, {text: 1})):
        assert json.loads(written(made(name), Structure("json_schema", schema), 1)) == answer
    assert written(made(name), Structure("regex", f"({text}){{2}}"), 0) == text * 2
    assert written(made(name), Structure("grammar", f'start: "{text}" "!"'), 0) == text + "!"
