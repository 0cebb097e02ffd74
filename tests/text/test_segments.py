"""Texts encoded in segments, which are remembered: the same tokens as of the whole text, for any kind of tokenizer."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text.vocabularies import byte_fallback, byte_level, copy_of, metaspace, word_piece
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

import headrace
from headrace.lru_cache import LruCache
from headrace.models.smollm2 import FOLDER
from headrace.text import encoder, segments
from headrace.text.control_text import any_of
from headrace.text.encoder import TextEncoder
from headrace.text.segments import Cuts, find_cuts
from headrace.text.tokenizer import Tokenizer

ODD_TOKENS = [
    AddedToken("<|user|>", special=True, normalized=False, rstrip=True),
    AddedToken("<|end|>", special=True, normalized=False, rstrip=True),
    AddedToken("<mask>", special=True, normalized=False, lstrip=True),
    AddedToken("<both>", special=True, normalized=False, lstrip=True, rstrip=True),
    AddedToken("whole", special=False, normalized=False, single_word=True),
    AddedToken("<norm>", special=False, normalized=True),
    AddedToken("<a", special=False, normalized=False),
    AddedToken("<a>", special=False, normalized=False),
    AddedToken(">b", special=False, normalized=False),
    AddedToken("x<y>", special=False, normalized=False),
    AddedToken("<y>z", special=False, normalized=False),
    AddedToken("y", special=False, normalized=False),
    AddedToken("..", special=False, normalized=False),
    AddedToken("end", special=False, normalized=False),
    AddedToken("[é]", special=False, normalized=False),
]
SPACE_TOKENS = [AddedToken(text, special=False, normalized=False) for text in ("  ", "\t\n", "\n>")]


def _with(backend: Backend, *tokens: AddedToken) -> Backend:
    changed = copy_of(backend)
    changed.add_tokens([token for token in tokens if not token.special])
    changed.add_special_tokens([token for token in tokens if token.special])
    return changed


def _changed(backend: Backend, change: Callable[[Backend], None]) -> Backend:
    changed = copy_of(backend)
    change(changed)
    return changed


def _prefix_space(backend: Backend) -> None:
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def _bert(backend: Backend) -> None:
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens(["[CLS]"])
    backend.post_processor = processors.BertProcessing(("[SEP]", 1), ("[CLS]", backend.token_to_id("[CLS]")))


def _t5(backend: Backend) -> None:
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    backend.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 2)])


def _llama_3(backend: Backend) -> None:
    bos = backend.token_to_id("<|im_start|>")
    framing = processors.TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", bos)])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), framing])


def _twice(backend: Backend) -> None:
    backend.post_processor = processors.TemplateProcessing("$A $A", special_tokens=[])


def _context(backend: Backend) -> None:
    backend.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()])


def _words() -> Backend:
    backend = Backend(models.WordLevel({"[UNK]": 0, "the": 1, "cat": 2, "</s>": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits()])
    backend.add_special_tokens(["</s>"])
    return backend


def _kinds() -> dict[str, Backend]:
    kinds = {
        "byte-level, NFC": byte_level(),
        "byte-level, prefix space": _changed(byte_level(), _prefix_space),
        "byte-level, frame": _changed(byte_level(), _llama_3),
        "byte-level, normalised": _changed(byte_level(), _context),
        "byte fallback, prefix space": byte_fallback(),
        "byte fallback": byte_fallback(strips_space=False),
        **{f"unigram, {scheme}": metaspace(scheme) for scheme in ("always", "first", "never")},
        "unigram, NFKC": _changed(metaspace("first"), _t5),
        "word pieces": _with(word_piece(), AddedToken("[SEP]", special=True, normalized=False)),
        "word pieces, BERT": _changed(word_piece(), _bert),
        "words": _words(),
    }
    odd = {f"{name}, odd tokens": _with(backend, *ODD_TOKENS) for name, backend in kinds.items()}
    spaces = {
        f"{name}, spaces": _with(kinds[name], *ODD_TOKENS, *SPACE_TOKENS) for name in ("byte-level, NFC", "words")
    }
    miniature = Backend.from_file(str(Path(headrace.__file__).parent / "miniature" / "tokenizer.json"))
    return {**kinds, **odd, **spaces, "miniature": miniature, "every text twice": _changed(byte_level(), _twice)}


KINDS = _kinds()
SMOLLM2 = Path.home() / ".cache" / "headrace" / FOLDER / "tokenizer.json"
if SMOLLM2.exists():
    KINDS["SmolLM2"] = Backend.from_file(str(SMOLLM2))

# White space to Unicode, to Rust, to Python: not all agree on \x1c. Then what normalisers join, split or drop.
_PIECES = [
    "the cat",
    " sat",
    "whole",
    "wholes",
    "end",
    "é",
    "e",
    "\u0301",
    "\u0338",
    "ﬁ",
    "½",
    "你好",
    "👍🏽",
    "\ufeff",
    "1999",
]
_PIECES += [" ", "  ", "\n", "\n\n", "\t", "\xa0", "\x1c", "\x85", "\u2028", "\u200b", "\r\n", "▁", "\0", "\ufdd0", "𒀀"]
_SPELLINGS = sorted({token.content for kind in KINDS.values() for token in kind.get_added_tokens_decoder().values()})
_CUT_SPELLINGS = ["<", "<|", "<|im_", "end|>", "|>", ">", "b", "z", "[", "SEP]", "</", "s>", "<a>b", "x<y>z", "x<y>b"]


def _texts(backend: Backend) -> st.SearchStrategy[str]:
    own = sorted(token.content for token in backend.get_added_tokens_decoder().values())
    pieces = st.one_of(
        st.sampled_from(own),
        st.sampled_from([*_PIECES, *_CUT_SPELLINGS, *_SPELLINGS]),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    )
    return st.lists(pieces, max_size=16).map("".join)


def whole(backend: Backend, text: str, *, adds_special_tokens: bool = False) -> list[int]:
    """The library's own tokens of a whole text."""
    token_ids: list[int] = backend.encode(text, add_special_tokens=adds_special_tokens).ids
    return token_ids


@pytest.fixture(scope="module", autouse=True)
def short_segments() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "MIN_SEGMENT", 1)
        patch.setattr(encoder, "MIN_SEGMENT", 1)
        yield


@pytest.fixture
def no_second_thoughts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts must be right, not only repaired by encoding the whole text when a wrong one is noticed."""

    def fit(cuts: Cuts, parts: Sequence[encoder.EncodedIds]) -> bool:
        assert found_fit(cuts, parts)
        return True

    found_fit = Cuts.fit
    monkeypatch.setattr(Cuts, "fit", fit)


@pytest.mark.usefixtures("no_second_thoughts")
@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_those_of_the_whole_text(name: str) -> None:
    backend = KINDS[name]
    remembering = TextEncoder(backend)
    texts = _texts(backend)

    def check(text: str) -> None:
        for adds_special_tokens in (False, True):
            assert remembering.encode(text, adds_special_tokens=adds_special_tokens).tolist() == whole(
                backend, text, adds_special_tokens=adds_special_tokens
            )

    @settings(max_examples=40, deadline=None)
    @given(st.lists(texts, min_size=1, max_size=4), texts)
    def check_turns(turns: list[str], other: str) -> None:
        """A text that grows, and one that parts from it: what was remembered of the first serves the second."""
        for end in range(len(turns)):
            check("".join(turns[: end + 1]))
        last = "".join(turns)
        check(last[: len(last) // 2] + other)
        check(last[len(last) // 2 :])

    check_turns()


@pytest.mark.usefixtures("no_second_thoughts")
@pytest.mark.parametrize("name", KINDS)
def test_every_pair_of_pieces_around_every_added_token(name: str) -> None:
    backend = KINDS[name]
    remembering = TextEncoder(backend)
    tokens = list(backend.get_added_tokens_decoder().values())[:24]
    greedy = [token.content for token in tokens if token.lstrip or token.rstrip]
    around = [
        "",
        "a",
        " ",
        "\n ",
        "\x1c",
        "\u0301",
        "\u0338",
        "whole",
        "b",
        "z",
        "<",
        "x",
        ">",
        tokens[0].content,
        *greedy,
    ]
    for token in tokens:
        for before in around:
            for behind in around:
                text = f"{before}{token.content}{behind}{tokens[-1].content}{behind}"
                assert remembering.encode(text, adds_special_tokens=False).tolist() == whole(backend, text)


def test_text_in_which_tokens_are_spelled_out_is_encoded_as_a_whole_too() -> None:
    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.tuples(_texts(KINDS["byte-level, NFC"]), st.booleans()), max_size=5))
    def check(runs: list[tuple[str, bool]]) -> None:
        remembered = remembering.encode_mixed(runs).tolist()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(encoder, "MIN_SEGMENT", 10**9)
            assert remembered == forgetful.encode_mixed(runs).tolist()

    remembering, forgetful = Tokenizer(copy_of(byte_level())), Tokenizer(copy_of(byte_level()))
    check()


def test_cuts_are_where_nothing_else_can_be_found() -> None:
    odd = find_cuts(_with(byte_level(), *ODD_TOKENS)).token_ids
    usual = {"<|im_start|>", "<|im_end|>", "<think>", "</think>"}
    # `<a`, `y` and `end` stand in other tokens; `>b` begins as `<a>` ends, `<y>z` as `x<y>` does, and `..` as itself;
    # `whole` and `<norm>` depend on what is around them.
    assert odd.keys() == usual | {"<|user|>", "<|end|>", "<mask>", "<both>", "[é]", "<a>", "x<y>"}
    spaces = find_cuts(_with(byte_level(), *ODD_TOKENS, *SPACE_TOKENS)).token_ids
    spaces = find_cuts(_with(byte_level(), *ODD_TOKENS, *SPACE_TOKENS)).token_ids
    assert spaces.keys() == odd.keys() | {"\t\n"}


def test_a_tokenizer_that_draws_its_tokens_is_not_remembered() -> None:
    specification = json.loads(byte_level().to_str())
    specification["model"]["dropout"] = 0.5
    assert not find_cuts(Backend.from_str(json.dumps(specification))).token_ids


def test_special_tokens_that_are_to_stay_text_are_no_cuts() -> None:
    backend = copy_of(byte_level())
    backend.encode_special_tokens = True
    text = "a<|im_end|>b" * 3
    assert TextEncoder(backend).encode(text, adds_special_tokens=False).tolist() == whole(backend, text)
    assert not find_cuts(backend).token_ids


def test_a_token_that_the_library_knows_otherwise_than_it_says_is_found_out() -> None:
    # Added a second time, a special token is listed anew but still looked for as before: behind the normaliser.
    backend = Backend(models.BPE({"▁": 0, "a": 1, "<x>": 2}, []))
    backend.normalizer = normalizers.Prepend("▁")
    backend.add_special_tokens([AddedToken("<x>", special=True, normalized=True)])
    backend.add_special_tokens([AddedToken("<x>", special=True, normalized=False)])
    text = "a<x>a<x>a"
    assert TextEncoder(backend).encode(text, adds_special_tokens=False).tolist() == whole(backend, text)


def test_only_what_is_new_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []
    encode_all = encoder.encode_all

    def spy(backend: Backend, texts: list[str], *, adds_special_tokens: bool) -> list[encoder.EncodedIds]:
        encoded.extend(texts)
        return encode_all(backend, texts, adds_special_tokens=adds_special_tokens)

    monkeypatch.setattr(encoder, "encode_all", spy)
    monkeypatch.setattr(segments, "MIN_SEGMENT", 1000)
    tokenizer = Tokenizer(copy_of(byte_level()))
    turns = [f"<|im_start|>user\n{index}{' the cat sat' * 200}<|im_end|>\n" for index in range(50)]
    tokenizer.encode("".join(turns))
    for grown in (turns[:-1], [*turns, "<|im_start|>assistant\nYes.<|im_end|>\n"], ["Hi.", *turns[1:]]):
        encoded.clear()
        tokenizer.encode("".join(grown))
        assert sum(map(len, encoded)) < 3 * len(turns[0])


def test_what_is_remembered_weighs_no_more_than_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Weighing(LruCache[str, encoder.EncodedIds]):
        weight = 0

        def put(self, key: str, value: encoder.EncodedIds, size: int = 1) -> None:
            Weighing.weight += size
            super().put(key, value, size)

    monkeypatch.setattr(encoder, "LruCache", Weighing)
    monkeypatch.setattr(segments, "MIN_SEGMENT", 1)
    remembering = TextEncoder(byte_level())
    remembering.encode("warm<|im_end|>up", adds_special_tokens=False)
    text = "".join(f"{number} grüße<|im_end|>" for number in range(5000))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        Weighing.weight = 0
        remembering.encode(text, adds_special_tokens=False)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert Weighing.weight / 2 < after - before < Weighing.weight


@given(st.lists(st.text("<|ab>.*", max_size=5), max_size=6), st.text("<|ab>.*", max_size=12))
def test_a_pattern_of_many_texts_finds_the_longest_of_them(texts: list[str], text: str) -> None:
    found = [(match.start(), match[0]) for match in segments.re.finditer(any_of(texts), text)]
    expected, place = [], 0
    while place < len(text):
        here = max((each for each in texts if each and text.startswith(each, place)), key=len, default="")
        expected += [(place, here)] if here else []
        place += len(here) or 1
    assert found == expected
