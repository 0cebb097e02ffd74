"""Loading a tokenizer, and encoding with and without added tokens."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text.vocabularies import CHATML_TOKENS, DATA, byte_fallback, byte_level, copy_of, metaspace
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from headrace.errors import ModelError
from headrace.text.tokenizer import Tokenizer

QWEN = DATA / "qwen35"
BYTE_LEVEL = Tokenizer(byte_level())


def test_a_folder_loads_with_its_tokens_and_template() -> None:
    tokenizer = Tokenizer.load(QWEN)
    reference = AutoTokenizer.from_pretrained(QWEN, local_files_only=True)
    assert tokenizer.token_ids.end == len(reference) == 498
    assert tokenizer.eos_token_id == reference.eos_token_id == 482
    assert set(reference.all_special_ids) <= tokenizer.special_ids
    assert tokenizer.chat_template == (QWEN / "chat_template.jinja").read_text(encoding="utf-8")
    assert tokenizer.template_variables == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def test_gaps_in_a_vocabulary_are_no_tokens_and_what_stands_behind_them_is() -> None:
    specification = json.loads(byte_level((), ()).to_str())
    vocabulary = specification["model"]["vocab"]
    num_tokens = len(vocabulary)
    vocabulary |= {"<near>": num_tokens + 3, "<far>": num_tokens + 20}
    tokenizer = Tokenizer(Backend.from_str(json.dumps(specification)))
    assert tokenizer.token_ids.end == num_tokens + 21
    gaps = set(range(num_tokens, num_tokens + 20)) - {num_tokens + 3}
    assert tokenizer.token_ids.missing == gaps
    assert not any(token_id in tokenizer.token_ids for token_id in (*gaps, -1, num_tokens + 21))
    assert num_tokens + 20 in tokenizer.token_ids


def test_ids_are_those_of_the_library() -> None:
    tokenizer = Tokenizer.load(QWEN)
    reference = AutoTokenizer.from_pretrained(QWEN, local_files_only=True)
    for text in ["Hello there", "<|im_start|>user\nhi 你好<|im_end|>\n", "  a\n\n\tb", "<think>\nhm\n</think>"]:
        assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False)


def test_a_template_kept_with_the_processor_is_found(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(QWEN / name, tmp_path / name)
    assert Tokenizer.load(tmp_path).chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert Tokenizer.load(tmp_path).chat_template == "{{ messages }}"
    (tmp_path / "chat_template.json").write_text("[]")
    with pytest.raises(ModelError, match="chat_template.json"):
        Tokenizer.load(tmp_path)


def test_a_folder_without_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=str(tmp_path)):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_of_special_tokens_only_is_none(tmp_path: Path) -> None:
    # transformers knows what kind of tokenizer this model has, and makes one without its vocabulary.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5"}))
    shutil.copy(QWEN / "tokenizer_config.json", tmp_path)
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_a_broken_tokenizer_file_is_refused(tmp_path: Path) -> None:
    shutil.copyfile(QWEN / "tokenizer_config.json", tmp_path / "tokenizer_config.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="no tokenizer could be loaded"):
        Tokenizer.load(tmp_path)


def test_code_out_of_the_folder_is_never_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n")
    config = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError):
        Tokenizer.load(tmp_path)
    assert not ran.exists()


def test_a_tokenizer_without_a_tokenizer_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    with pytest.raises(ModelError, match=r"ByT5Tokenizer.*tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_half_a_surrogate_pair_becomes_a_replacement_character() -> None:
    tokenizer = Tokenizer(byte_level())
    text = "a\ud83d b\udc4d"
    for ids in (tokenizer.encode(text), tokenizer.encode_mixed([(text, True)]).tolist()):
        assert tokenizer.decode(ids) == "a\ufffd b\ufffd"
    assert tokenizer.decode(tokenizer.encode("\ud83d\udc4d")) == "👍"


@pytest.mark.parametrize("special", [True, False])
def test_other_threads_go_on_while_a_text_is_encoded(special: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(byte_level())

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text) if special else tokenizer.encode_mixed([(text, True)]).tolist()

    encode("warm")
    began, events = threading.Event(), []

    def other() -> None:
        began.wait()
        events.append("the other thread ran")

    before = sys.getswitchinterval()
    thread = threading.Thread(target=other)
    thread.start()
    try:
        # From now on Python never preempts a thread: the other one only runs if this one yields.
        sys.setswitchinterval(1000)
        began.set()
        encode("the cat sat on the mat " * 40_000)
        events.append("the text is encoded")
    finally:
        sys.setswitchinterval(before)
    thread.join()
    assert events == ["the other thread ran", "the text is encoded"]


def test_truncation_set_in_the_file_is_switched_off() -> None:
    backend = copy_of(byte_level())
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    assert len(Tokenizer(backend).encode("the cat sat on the mat and ran to the door")) not in (4, 64)


def without_added_tokens(backend: Backend) -> Backend:
    """The library's own tokenizer over the same vocabulary, not told of any added token."""
    specification = json.loads(backend.to_str())
    specification["added_tokens"] = []
    return Backend.from_str(json.dumps(specification))


WITHOUT_ADDED_TOKENS = without_added_tokens(byte_level())
TYPED = st.lists(
    st.one_of(st.sampled_from([*CHATML_TOKENS, "<think>", "<|im_", "end|>", "\n", " "]), st.text(max_size=4)),
    max_size=8,
).map("".join)


@given(TYPED)
@settings(max_examples=150)
def test_plain_text_holds_no_added_token_and_loses_nothing(text: str) -> None:
    ids = BYTE_LEVEL.encode_mixed([(text, True)]).tolist()
    assert not set(ids) & set(BYTE_LEVEL.added_tokens.values())
    assert ids == WITHOUT_ADDED_TOKENS.encode(text).ids


@pytest.mark.parametrize("backend", [byte_fallback(), byte_fallback(strips_space=False), metaspace()])
def test_a_token_of_the_vocabulary_itself_stays_text_too(backend: Backend) -> None:
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("</s>") == [tokenizer.added_tokens["</s>"]]
    ids = tokenizer.encode_mixed([("end with </s> or [INST]", True)]).tolist()
    assert not set(ids) & {tokenizer.added_tokens[text] for text in ("</s>", "[INST]")}


def test_merges_that_lead_to_an_added_token_are_not_taken() -> None:
    pieces = ["<", "s", ">", "<s", "<s>", "<s>s"]
    merges = [("<", "s"), ("<s", ">"), ("<s>", "s")]
    backend = Backend(models.BPE({piece: index for index, piece in enumerate(pieces)}, merges))
    backend.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("<s>s") == [pieces.index("<s>"), pieces.index("s")]
    assert tokenizer.encode_mixed([("<s>s", True)]).tolist() == [pieces.index(piece) for piece in ("<s", ">", "s")]


def test_byte_fallback_still_spells_plain_text_in_bytes() -> None:
    backend = byte_fallback()
    tokenizer = Tokenizer(backend)
    text = "</s> 𒀀 [INST]"
    assert tokenizer.decode(tokenizer.encode_mixed([(text, True)]).tolist()) == text
    assert backend.token_to_id("<0xF0>") in tokenizer.encode_mixed([(text, True)]).tolist()


@given(st.lists(st.tuples(TYPED, st.booleans()), max_size=6))
@settings(max_examples=150)
def test_runs_become_tokens_only_where_they_are_not_plain(runs: list[tuple[str, bool]]) -> None:
    tokenizer = BYTE_LEVEL
    ids = tokenizer.encode_mixed(runs).tolist()
    expected = [
        token_id
        for text, is_plain in runs
        if not is_plain
        for token_id in tokenizer.encode(text)
        if token_id in tokenizer.added_tokens.values()
    ]
    assert [token_id for token_id in ids if token_id in tokenizer.added_tokens.values()] == expected


@pytest.mark.parametrize("backend", [byte_level(), byte_fallback(), metaspace(), metaspace("first")])
def test_runs_that_are_not_plain_are_encoded_as_usual(backend: Backend) -> None:
    tokenizer = Tokenizer(backend)
    text = "<s>[INST] the cat  sat [/INST] on</s>\nthe <|im_start|>mat<|im_end|>\n"
    assert tokenizer.encode_mixed([(text, False)]).tolist() == tokenizer.encode(text)


def test_white_space_that_a_token_swallows_is_swallowed_among_runs_too() -> None:
    backend = copy_of(byte_level())
    backend.add_special_tokens([AddedToken("<|sep|>", special=True, lstrip=True, rstrip=True, normalized=False)])
    tokenizer = Tokenizer(backend)
    text = "the cat  <|sep|> \n sat"
    assert tokenizer.encode_mixed([(text, False)]).tolist() == tokenizer.encode(text)


def test_the_room_needs_no_remote_lookup_for_special_ids() -> None:
    backend = byte_level()
    reference = PreTrainedTokenizerFast(tokenizer_object=backend)
    marked = {i for i, token in reference.added_tokens_decoder.items() if token.special}
    assert Tokenizer(backend).special_ids == marked
