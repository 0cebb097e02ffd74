"""Packed steps give the logits of transformers and torch, in whatever pieces the prompt arrives.

The numbers were written by that implementation on another machine; see tests/data/README.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from headrace.backend import blas, device
from headrace.models.load import LoadedModel, load
from headrace.models.packed import PackedModel
from headrace.models.source import read_files
from headrace.models.step import Row
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool
from headrace.types.model import TokenIds

DATA = Path(__file__).parent.parent / "data"
FOLDERS = ("tiny_qwen35_torch", "tiny_qwen3vl_torch")
CASES = ("text40", "text200")
TOLERANCE = 1e-3
NOISE = (5, 300, 41, 207)
"""A neighbour that is always drafted and always wrong: two certain tokens, two that are rolled back."""


@pytest.fixture(params=["fast", "exact"], scope="module")
def numerics(request: pytest.FixtureRequest) -> Iterator[str]:
    blas.install(request.param)
    yield request.param
    blas.uninstall()


@cache
def loaded(folder: str, numerics: str) -> LoadedModel:
    files = read_files(folder, DATA / folder)
    return load(files, dtype="float32", numerics=numerics, self_check=True, device=device.current())


@dataclass
class Stream:
    """A prompt that arrives in chunks and goes on greedily; keeps the logits of every token it was fed."""

    ids: list[int]
    chunk_sizes: Iterator[int]
    num_output: int
    state: SequenceState
    first_step: int = 0
    num_prompt: int = 0
    logits: list[mx.array] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.ids)

    @property
    def is_done(self) -> bool:
        return self.state.length == self.num_prompt + self.num_output

    def next_chunk(self) -> list[int]:
        return self.ids[self.state.length :][: next(self.chunk_sizes)]

    def take(self, logits: mx.array) -> None:
        self.logits.append(logits)
        self.state.commit(logits.shape[0])
        if self.state.length == len(self.ids) and not self.is_done:
            self.ids.append(int(mx.argmax(logits[-1])))


def run(model: PackedModel, streams: list[Stream], noise: SequenceState | None) -> None:
    """Packed steps until all streams are done; a stream joins at its first step and leaves when it is done."""
    for step in itertools.count():
        live = [stream for stream in streams if not stream.is_done and step >= stream.first_step]
        if not live:
            return
        rows = []
        if noise is not None:
            noise.begin(len(NOISE), 2)
            rows.append(Row(noise, NOISE))
        for stream in live:
            chunk = stream.next_chunk()
            stream.state.begin(len(chunk))
            rows.append(Row(stream.state, chunk))
        total = sum(len(row.token_ids) for row in rows)
        got = model.forward(rows, range(total))
        mx.eval(got, [row.state.arrays() for row in rows])
        start = 0
        if noise is not None:
            noise.rollback(2)
            start = len(NOISE)
        for stream, row in zip(live, rows[-len(live) :], strict=True):
            stream.take(got[start : start + len(row.token_ids)])
            start += len(row.token_ids)


def expect(folder: str, case: str, stream: Stream) -> None:
    with np.load(DATA / folder / "expected.npz") as data:
        prefill, steps = data[f"{case}/prefill_logits"], data[f"{case}/step_logits"]
        greedy = data[f"{case}/greedy_tokens"].tolist()
    got = np.array(mx.concatenate(stream.logits))
    assert got.shape == (stream.num_prompt + len(greedy), prefill.shape[1])
    assert stream.ids[stream.num_prompt :] == greedy
    prompt = got[stream.num_prompt - len(prefill) : stream.num_prompt]
    assert np.abs(prompt - prefill).max() <= TOLERANCE
    assert np.abs(got[stream.num_prompt :] - steps).max() <= TOLERANCE
    assert got[stream.num_prompt :].argmax(axis=-1).tolist() == steps.argmax(axis=-1).tolist()


def prompt_of(folder: str, case: str) -> list[int]:
    with np.load(DATA / folder / "expected.npz") as data:
        return [int(token) for token in data[f"{case}/input_ids"]]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_prompt_in_one_chunk_gives_the_reference_logits(folder: str, case: str, numerics: str) -> None:
    prompt = prompt_of(folder, case)
    stream = Stream(prompt, itertools.repeat(len(prompt)), 5, SequenceState(StatePool()))
    run(loaded(folder, numerics).packed, [stream], None)
    expect(folder, case, stream)


@pytest.mark.parametrize(("short", "long"), [((1, 7, 3), (33, 64, 5)), ((40,), (9, 1, 128)), ((1,), (32,))])
@pytest.mark.parametrize("folder", FOLDERS)
def test_prompts_in_mixed_chunks_give_the_reference_logits(
    folder: str, short: tuple[int, ...], long: tuple[int, ...], numerics: str
) -> None:
    pool = StatePool()
    streams = [
        Stream(prompt_of(folder, "text40"), itertools.cycle(short), 5, SequenceState(pool), first_step=1),
        Stream(prompt_of(folder, "text200"), itertools.cycle(long), 5, SequenceState(pool)),
    ]
    run(loaded(folder, numerics).packed, streams, SequenceState(pool))
    for case, stream in zip(CASES, streams, strict=True):
        expect(folder, case, stream)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_text_model_out_of_a_vision_checkpoint_needs_no_last_resort(folder: str, numerics: str) -> None:
    report = loaded(folder, numerics).report
    assert not any("instead" in line or "row by row" in line for line in report)
    assert loaded(folder, numerics).tokens == TokenIds(512)
