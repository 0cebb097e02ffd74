"""Single tokens: the bytes that each adds to a text, and texts framed as documents."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text.vocabularies import byte_fallback, byte_level, copy_of, metaspace, word_piece
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from headrace.text.tokenizer import Tokenizer

# A decoder that leaves the first space out has one more byte in its tokens.
BACKENDS = {
    "byte level": byte_level(),
    "byte fallback": byte_fallback(strips_space=False),
    "byte fallback, stripped": byte_fallback(),
    "metaspace": metaspace("never"),
    "metaspace, prepended": metaspace(),
}


@pytest.mark.parametrize("name", BACKENDS)
@given(text=st.text(st.sampled_from("the cat sat, Grüße 你好🎉\n"), min_size=1))
@settings(max_examples=60, deadline=None)
def test_the_bytes_of_all_tokens_are_the_text_that_the_library_decodes(name: str, text: str) -> None:
    backend: Backend = BACKENDS[name]
    tokenizer = Tokenizer(backend)
    token_ids = [each for each in tokenizer.encode(text) if each not in tokenizer.special_ids]
    joined = b"".join(tokenizer.token_bytes(token_id) or b"" for token_id in token_ids)
    decoded = backend.decode(token_ids, skip_special_tokens=False)
    assert joined.decode() in (decoded, " " + decoded)


def test_a_token_that_is_part_of_a_character_has_its_bytes_and_shows_as_a_replacement() -> None:
    tokenizer = Tokenizer(byte_level())
    token_ids = tokenizer.encode("🎉")
    assert len(token_ids) == 4
    assert [tokenizer.token_bytes(token_id) for token_id in token_ids] == [bytes([byte]) for byte in "🎉".encode()]
    assert {tokenizer.token_text(token_id) for token_id in token_ids} == {"\ufffd"}


def test_a_byte_token_has_the_byte_that_it_names() -> None:
    backend = byte_fallback()
    assert Tokenizer(backend).token_bytes(backend.token_to_id("<0xF0>")) == b"\xf0"


def test_special_tokens_have_a_name_and_no_bytes_and_added_ones_are_text() -> None:
    tokenizer = Tokenizer(byte_level())
    end, think = tokenizer.added_tokens["<|im_end|>"], tokenizer.added_tokens["<think>"]
    assert (tokenizer.token_bytes(end), tokenizer.token_text(end)) == (None, "<|im_end|>")
    assert (tokenizer.token_bytes(think), tokenizer.token_text(think)) == (b"<think>", "<think>")


def test_ids_beyond_the_vocabulary_are_nothing() -> None:
    tokenizer = Tokenizer(byte_level())
    for token_id in (-1, tokenizer.token_ids.end, 10**6):
        assert (tokenizer.token_bytes(token_id), tokenizer.token_text(token_id)) == (None, "")


def test_a_word_piece_has_the_bytes_that_the_library_adds_for_it_in_mid_text() -> None:
    backend = word_piece()
    assert backend.decode([backend.token_to_id(each) for each in ("the", "cat", "##s")]) == "the cats"
    expected = {"the": b" the", "cat": b" cat", "##s": b"s"}
    tokenizer = Tokenizer(backend)
    assert {piece: tokenizer.token_bytes(backend.token_to_id(piece)) for piece in expected} == expected


def test_a_document_has_the_tokens_that_the_tokenizer_puts_around_it() -> None:
    backend = copy_of(byte_level())
    plain = Tokenizer(backend).encode_document("the cat")
    assert plain == Tokenizer(backend).encode("the cat")
    start = backend.token_to_id("<|im_start|>")
    backend.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)])
    framed = Tokenizer(backend)
    assert framed.encode_document("the cat") == [start, *plain]
    assert framed.encode("the cat") == plain
    assert framed.encode_document("\ud800a")[0] == start
