"""Tokenizers of each kind, trained in the test run on a few sentences."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from headrace.text.tokenizer import Tokenizer

DATA = Path(__file__).parent.parent / "data" / "text"

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
HEADER_TOKENS = ("<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
TURN_TOKENS = ("<s>", "</s>", "[INST]", "[/INST]")

_SENTENCES = [
    "the cat sat on the mat and the dog ran to the door",
    "user assistant system think tool call, what is the capital of France? It is Paris.",
    "def add(a, b):\n    return a + b\n\n",
    "Grüße aus Köln, naïve café; 你好世界 こんにちは",
] * 8


@cache
def byte_level(special: tuple[str, ...] = CHATML_TOKENS, added: tuple[str, ...] = ("<think>", "</think>")) -> Backend:
    """Like GPT-2, Qwen and Llama 3: every byte has a token."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?[^\s\w]+|\s?\w+|\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(_SENTENCES, trainer)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return backend


@cache
def byte_fallback(*, strips_space: bool = True) -> Backend:
    """Like Llama 2 (strips_space) and Gemma: characters without a token are spelled in byte tokens."""
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.add_special_tokens(["<unk>", *TURN_TOKENS])
    trainer = trainers.BpeTrainer(
        vocab_size=240, special_tokens=["<unk>", *TURN_TOKENS], show_progress=False, limit_alphabet=60
    )
    backend.train_from_iterator(_SENTENCES, trainer)
    specification = json.loads(backend.to_str())
    vocabulary = specification["model"]["vocab"]
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    specification["model"]["byte_fallback"] = True
    backend = Backend.from_str(json.dumps(specification))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strips_space:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


@cache
def metaspace(prepend_scheme: str = "always") -> Backend:
    """Like T5 and other unigram models."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    special = ["<unk>", *TURN_TOKENS]
    trainer = trainers.UnigramTrainer(vocab_size=160, special_tokens=special, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(_SENTENCES, trainer)
    return backend


@cache
def word_piece() -> Backend:
    """Like BERT: a decoder for which this package has no implementation."""
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    backend.train_from_iterator(_SENTENCES, trainer)
    return backend


def copy_of(backend: Backend) -> Backend:
    """A backend that a test may change."""
    return Backend.from_str(backend.to_str())


def template(name: str) -> str:
    """A chat template of the test data."""
    return (DATA / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def chat_tokenizer(name: str) -> Tokenizer:
    """A tokenizer with one of the chat templates of the test data."""
    if name == "alternating":
        variables = {"bos_token": "<s>", "eos_token": "</s>"}
        return Tokenizer(byte_fallback(), chat_template=template(name), template_variables=variables)
    if name == "headers":
        variables = {"bos_token": "<|begin|>", "eos_token": "<|eot_id|>"}
        return Tokenizer(byte_level(HEADER_TOKENS), chat_template=template(name), template_variables=variables)
    added = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    return Tokenizer(byte_level(added=added), chat_template=template(name))
