"""Long texts, encoded in a helper process: the same ids, within limits, and no longer than the caller waits."""

from __future__ import annotations

import asyncio
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from text.vocabularies import byte_fallback, byte_level, metaspace, word_piece
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from headrace.cancellation import WorkCancelled, run_in_thread
from headrace.errors import InvalidRequest
from headrace.text import encoder
from headrace.text.encoder import TextEncoder
from headrace.text.tokenizer import Tokenizer

BACKENDS = {
    "byte-level": byte_level(),
    "byte fallback": byte_fallback(),
    "metaspace": metaspace(),
    "metaspace, first": metaspace("first"),
    "word pieces": word_piece(),
}


def backtracking() -> Backend:
    """A tokenizer whose pattern has the library give up, and panic, on "aaa…"."""
    backend = Backend(models.BPE({"a": 0, "b": 1}, []))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(?:a|aa|aaa)+b"), "isolated")
    return backend


@pytest.mark.parametrize("name", BACKENDS)
def test_ids_from_the_helper_process_are_those_of_the_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = BACKENDS[name]
    tokenizer = Tokenizer(backend)
    draw = random.Random(60)
    texts = [
        "",
        " ",
        "".join(draw.choices(["the ", " quick", "\n", "é", "e\u0301", "<|im_end|>", "\U0001f600", "  "], k=400)),
    ]
    expected = [
        (
            backend.encode(text, add_special_tokens=False).ids,
            backend.encode(text).ids,
            tokenizer.encode_mixed([(text, True)]).tolist(),
        )
        for text in texts
    ]
    monkeypatch.setattr(encoder, "LONG_TEXT", -1)
    monkeypatch.setattr(encoder, "encode_all", lambda *arguments, **options: pytest.fail("encoded in this process"))
    found = [
        (tokenizer.encode(text), tokenizer.encode_document(text), tokenizer.encode_mixed([(text, True)]).tolist())
        for text in texts
    ]
    assert found == expected


@pytest.mark.parametrize("long_text", [-1, 1000])
def test_a_panic_of_the_tokenizer_is_the_text_s_own_fault(long_text: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "LONG_TEXT", long_text)
    failing = TextEncoder(backtracking())
    with pytest.raises(InvalidRequest, match="can't be split into tokens") as refused:
        failing.encode("a" * 60, adds_special_tokens=False)
    assert "aaa" not in str(refused.value)
    assert failing.encode("ab", adds_special_tokens=False).tolist() == [0, 1]


def test_a_text_that_takes_too_long_is_refused_and_the_next_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "LONG_TEXT", -1)
    usual = TextEncoder(BACKENDS["byte-level"])
    usual.encode("a", adds_special_tokens=False)
    with monkeypatch.context() as hasty:
        hasty.setattr(encoder, "_TIMEOUT_S", 0.0001)
        with pytest.raises(InvalidRequest, match="takes more than"):
            usual.encode("a " * 1_000_000, adds_special_tokens=False)
    assert usual.encode("a", adds_special_tokens=False).tolist() == BACKENDS["byte-level"].encode("a").ids


def _meet(key: bytes, texts: list[str], adds_special_tokens: bool) -> list[npt.NDArray[np.uint32]]:
    """Waits, in the helper process, for the other call."""
    place = Path(texts[0])
    (place / str(os.getpid())).touch()
    deadline = time.monotonic() + 60
    while len(pids := [int(each.name) for each in place.iterdir()]) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    return [np.array(sorted(pids), np.uint32)]


def test_two_long_texts_are_encoded_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(encoder, "LONG_TEXT", -1)
    monkeypatch.setattr(encoder, "_encode_known", _meet)
    usual = TextEncoder(BACKENDS["byte-level"])
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(usual.encode, str(tmp_path), adds_special_tokens=False) for _ in range(2)]
    pids = {tuple(call.result()) for call in calls}
    assert [len(each) for each in pids] == [2]


def test_encoding_ends_with_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "LONG_TEXT", -1)
    usual = TextEncoder(BACKENDS["byte-level"])
    usual.encode("a", adds_special_tokens=False)
    ends: list[str] = []

    def encode() -> None:
        try:
            usual.encode("a 1\n" * 3_000_000, adds_special_tokens=False)
            ends.append("encoded")
        except WorkCancelled:
            ends.append("cancelled")

    async def scenario() -> None:
        task = asyncio.create_task(run_in_thread(encode))
        await asyncio.sleep(0.2)
        task.cancel()
        while not ends:
            await asyncio.sleep(0.01)

    asyncio.run(scenario())
    assert ends == ["cancelled"]
