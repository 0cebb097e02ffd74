"""The least number of tokens of a text: never more than it really has, and of use for long ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text.vocabularies import byte_fallback, byte_level, copy_of, metaspace, word_piece
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from headrace.text.tokenizer import Tokenizer

QWEN = Path(__file__).parent.parent / "data" / "text" / "qwen35" / "tokenizer.json"


def with_normalizer(normalizer: normalizers.Normalizer) -> Backend:
    backend = copy_of(byte_level())
    backend.normalizer = normalizer
    return backend


def with_swallowing_token() -> Backend:
    backend = copy_of(byte_level())
    backend.add_tokens([AddedToken("<swallow>", lstrip=True, rstrip=True, normalized=False)])
    return backend


def without_some_bytes() -> Backend:
    """A byte-level vocabulary without the letter q and the byte that Greek letters begin with."""
    backend = copy_of(byte_level())
    vocabulary = {piece: token_id for piece, token_id in backend.get_vocab(False).items() if len(piece) == 1}
    for piece in ("q", "\N{LATIN CAPITAL LETTER I WITH CIRCUMFLEX}"):
        del vocabulary[piece]
    bare = Backend(BPE(vocabulary, []))
    bare.pre_tokenizer, bare.decoder = backend.pre_tokenizer, backend.decoder
    return bare


BOUNDED: dict[str, Backend] = {
    "byte level": byte_level(),
    "byte level with compatibility forms": with_normalizer(normalizers.NFKC()),
    "byte level with several forms": with_normalizer(normalizers.Sequence([normalizers.NFD(), normalizers.NFC()])),
    "byte level with a swallowing token": with_swallowing_token(),
    "byte level without some bytes": without_some_bytes(),
    "byte fallback": byte_fallback(),
    "byte fallback that keeps its first space": byte_fallback(strips_space=False),
    "a real one": Backend.from_file(str(QWEN)),
}

# Letters that forms put together (the Kelvin sign, Hangul, mathematical ones), marks, spaces of all kinds, spellings.
PIECES = st.sampled_from(
    ["a", "q", " ", "  ", "\n", "\t", "\u00a0", "\u3000", "\u2581", "\u212a", "\u1112\u1161\u11ab", "e\u0301",
     "\u03b1\u0313\u0300\u0345", "\U0001d400", "\ufb01", "\U0001f389", "\ud83d", "the cat", "<swallow>", "<think>",
     "<|im_end|>", "</s>", "\x04"]
)  # fmt: skip
TEXTS = st.lists(PIECES | st.text(max_size=4), max_size=12).map("".join)


@pytest.mark.parametrize("name", BOUNDED)
@given(texts=st.lists(TEXTS, max_size=3))
def test_texts_never_come_to_fewer_tokens_than_the_bound(name: str, texts: list[str]) -> None:
    tokenizer = Tokenizer(BOUNDED[name])
    least = tokenizer.least_num_tokens(texts)
    assert least <= len(tokenizer.encode("".join(texts)))
    assert least <= len(tokenizer.encode_mixed([("".join(texts), True)]))


@pytest.mark.parametrize("name", BOUNDED)
def test_a_long_text_has_at_least_as_many_tokens_as_the_longest_token_allows(name: str) -> None:
    longest = max(len(piece.encode()) for piece in BOUNDED[name].get_vocab())
    assert Tokenizer(BOUNDED[name]).least_num_tokens(["ab" * 1000, "c" * 1000]) >= 3000 // longest


def test_what_no_token_stands_for_does_not_count() -> None:
    tokenizer = Tokenizer(BOUNDED["byte level without some bytes"])
    assert tokenizer.encode("q" * 100) == []
    assert tokenizer.least_num_tokens(["q" * 100]) == 0
    assert tokenizer.least_num_tokens(["a" * 100]) > 0


def test_white_space_that_a_token_may_swallow_does_not_count() -> None:
    tokenizer = Tokenizer(BOUNDED["byte level with a swallowing token"])
    assert len(tokenizer.encode(f"<swallow>{' ' * 10_000}a")) == 2
    assert tokenizer.least_num_tokens([" " * 10_000]) == 0


def changed(change: Callable[[Backend], None]) -> Backend:
    backend = copy_of(byte_level())
    change(backend)
    return backend


def lowercase(backend: Backend) -> None:
    backend.normalizer = normalizers.Lowercase()


def shorten(backend: Backend) -> None:
    backend.normalizer = normalizers.Replace("aa", "a")


def squeeze(backend: Backend) -> None:
    backend.normalizer = normalizers.Replace(Regex(" +"), " ")


def drop_spaces(backend: Backend) -> None:
    parts = [pre_tokenizers.Split(" ", behavior="removed"), pre_tokenizers.ByteLevel()]
    backend.pre_tokenizer = pre_tokenizers.Sequence(parts)


@pytest.mark.parametrize(
    "backend",
    [word_piece(), metaspace(), *map(changed, (lowercase, shorten, squeeze, drop_spaces))],
)
def test_a_tokenizer_that_may_lose_any_amount_of_text_has_no_bound(backend: Backend) -> None:
    assert Tokenizer(backend).least_num_tokens(["a" * 10_000]) == 0
