"""Token ids to text, in every kind of vocabulary and every split."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text.vocabularies import byte_fallback, byte_level, metaspace, word_piece
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from headrace.text.detokenize import MAX_HELD_BYTES, WindowDecoder
from headrace.text.tokenizer import Tokenizer

BACKENDS = {
    "byte level": byte_level(),
    "byte fallback": byte_fallback(),
    "byte fallback, space kept": byte_fallback(strips_space=False),
    "metaspace": metaspace(),
    "metaspace, never in front": metaspace("never"),
    "word piece": word_piece(),
}
TEXTS = [
    "the cat sat",
    "  two spaces, then\n\n\n\ttabs ",
    "👩‍👩‍👧‍👦 family, flag 🇳🇴, é as e\u0301, 你好，世界",
    "tibetan བཀྲ་ཤིས་བདེ་ལེགས། and cuneiform 𒀀𒁀",
    "",
]


def library_decode(backend: Backend, token_ids: list[int]) -> str:
    reference = PreTrainedTokenizerFast(tokenizer_object=backend)
    return reference.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def streamed(tokenizer: Tokenizer, pieces: list[list[int]]) -> str:
    detokenizer = tokenizer.detokenizer()
    return "".join([*map(detokenizer.push, pieces), detokenizer.finish()])


@st.composite
def split_ids(draw: st.DrawFn, vocab_size: int) -> list[list[int]]:
    ids = st.lists(st.integers(0, vocab_size - 1), max_size=5)
    return draw(st.lists(ids, max_size=8))


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_comes_back_token_by_token_as_the_library_decodes_it(kind: str, text: str) -> None:
    backend = BACKENDS[kind]
    ids = backend.encode(text).ids
    assert streamed(Tokenizer(backend), [[token_id] for token_id in ids]) == library_decode(backend, ids)


@pytest.mark.parametrize("kind", BACKENDS)
def test_any_ids_in_any_split_give_what_the_library_decodes(kind: str) -> None:
    backend = BACKENDS[kind]
    tokenizer = Tokenizer(backend)

    @given(split_ids(tokenizer.token_ids.end))
    @settings(max_examples=150)
    def holds(pieces: list[list[int]]) -> None:
        ids = [token_id for piece in pieces for token_id in piece]
        assert streamed(tokenizer, pieces) == library_decode(backend, ids)

    holds()


@given(st.lists(st.integers(0, 255), max_size=40))
@settings(max_examples=200)
def test_runs_of_byte_tokens_are_valid_or_not_as_a_whole(values: list[int]) -> None:
    backend = byte_fallback()
    ids = [backend.token_to_id(f"<0x{value:02X}>") for value in values]
    assert streamed(Tokenizer(backend), [[token_id] for token_id in ids]) == library_decode(backend, ids)


@given(st.text(max_size=12))
def test_byte_level_text_is_held_for_one_character_only(text: str) -> None:
    backend = byte_level()
    detokenizer = Tokenizer(backend).detokenizer()
    for character in text:
        ids = backend.encode(character).ids
        assert detokenizer.push(ids) == unicodedata.normalize("NFC", character)
    assert detokenizer.finish() == ""


def test_a_long_run_of_byte_tokens_is_not_held_until_its_end() -> None:
    backend = byte_fallback()
    text = "ཀ" * 100
    ids = [backend.token_to_id(f"<0x{value:02X}>") for value in text.encode()]
    detokenizer = Tokenizer(backend).detokenizer()
    given_out = ""
    for count, token_id in enumerate(ids, start=1):
        given_out += detokenizer.push([token_id])
        assert count - len(given_out.encode()) <= MAX_HELD_BYTES
    assert given_out + detokenizer.finish() == text


def test_unknown_ids_add_nothing() -> None:
    for backend in BACKENDS.values():
        tokenizer = Tokenizer(backend)
        ids = tokenizer.encode("the cat")
        beyond = [tokenizer.token_ids.end, tokenizer.token_ids.end + 5000, -1]
        assert tokenizer.decode([ids[0], *beyond, *ids[1:]]) == tokenizer.decode(ids)


def test_special_tokens_are_skipped_unless_kept() -> None:
    tokenizer = Tokenizer(byte_level())
    ids = tokenizer.encode("<|im_start|>the cat<|im_end|>")
    assert tokenizer.decode(ids) == "the cat"
    assert tokenizer.decode(ids, keep_special=frozenset({"<|im_end|>", "not a token"})) == "the cat<|im_end|>"


def test_a_skipped_token_does_not_end_a_run_of_bytes() -> None:
    backend = byte_fallback()
    first, *rest = [backend.token_to_id(f"<0x{value:02X}>") for value in "é".encode()]
    assert Tokenizer(backend).decode([first, backend.token_to_id("</s>"), *rest]) == "é"


def test_white_space_alone_is_given_out_at_once() -> None:
    backend = byte_level()
    detokenizer = Tokenizer(backend).detokenizer()
    assert detokenizer.push(backend.encode("\n").ids) == "\n"
    assert detokenizer.push(backend.encode("   ").ids) == "   "


def test_a_window_agrees_with_the_library_where_no_form_of_ours_fits() -> None:
    backend = Backend.from_str(byte_level().to_str())
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    tokenizer = Tokenizer(backend)
    assert isinstance(tokenizer.detokenizer()._decoder, WindowDecoder)
    ids = backend.encode("👩‍👧 naïve 你好").ids
    assert streamed(tokenizer, [[token_id] for token_id in ids]) == "👩‍👧 naïve 你好"


@pytest.mark.parametrize("backend", [byte_fallback(), metaspace(), metaspace("first"), word_piece()])
def test_the_first_space_behind_a_prompt_is_kept(backend: Backend) -> None:
    tokenizer = Tokenizer(backend)
    prompt, token_ids = tokenizer.encode("the dog"), tokenizer.encode("the cat")
    following = tokenizer.detokenizer()
    following.follow_prompt(prompt)
    assert following.push(token_ids) + following.finish() == " the cat"
    assert tokenizer.decode(token_ids) == "the cat"


def test_a_newline_of_the_prompt_that_is_a_byte_token_does_not_come_out() -> None:
    backend = byte_fallback()
    newline, part = backend.token_to_id("<0x0A>"), backend.token_to_id("<0xC3>")
    rest = backend.token_to_id("<0xA9>")
    tokenizer = Tokenizer(backend)
    following = tokenizer.detokenizer()
    following.follow_prompt([*tokenizer.encode("the cat"), newline])
    assert following.push(tokenizer.encode("the dog")) == " the dog"
    unfinished = tokenizer.detokenizer()
    unfinished.follow_prompt([*tokenizer.encode("the cat"), part])
    assert unfinished.push([rest]) + unfinished.finish() == "é"
