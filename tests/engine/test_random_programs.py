"""Whatever happens to a state on its way, the next token's logits are those of a cold run, bit for bit.

Programs of everything that can befall the states of several sequences: prompts that begin from what memory or disk
holds, windows with rejected drafts, checkpoints, preemption, aborts, evictions, clearings and restarts. The reference
is the same tokens fed one at a time to a fresh state.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from models import tiny

from headrace.backend import blas
from headrace.backend.kernels import Kernels
from headrace.engine.disk_cache import DiskLoader
from headrace.engine.kv_bits import kv_forms
from headrace.engine.memory import sample_state
from headrace.engine.prefix_cache import PrefixCache
from headrace.models.levels import choose_levels
from headrace.models.packed import PackedModel
from headrace.models.step import Row
from headrace.scheduler.stages import PromptStages
from headrace.state.disk import DiskTier
from headrace.state.quantized_kv import KVForms
from headrace.state.records import SequenceRecord
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool
from headrace.state.stored_state import StateLayout
from headrace.types.request import GREEDY, Boundary, BoundaryKind, GenerationRequest
from headrace.types.status import WaitReason

WIDE = "qwen3_5_wide"
KINDS = {
    "dense": ("llama", None),
    "sliding window": ("gpt_oss", None),
    "hybrid": ("qwen3_5", None),
    "module": ("lfm2", None),
    "dense, 8 bits": ("mistral", 8),
    "sliding window, 4 bits": ("gemma3_text", 4),
    "hybrid, 4 bits": (WIDE, 4),
}
"""A family, and the bits of its keys and values."""
VOCAB = 97
LENGTH = 56
MAX_LIVE = 3


def _sentence(salt: int) -> tuple[int, ...]:
    return tuple((7 * i * i + (3 + salt) * i + 1 + salt) % VOCAB for i in range(LENGTH))


SENTENCES = (
    _sentence(0),
    _sentence(0)[:19] + _sentence(5)[19:],
    _sentence(0)[:37] + _sentence(9)[37:],
    _sentence(2),
)
"""The sequences' texts: three that diverge, and a separate one."""


@pytest.fixture(autouse=True, scope="module")
def small_files_and_patience() -> Iterator[None]:
    """Blocks on disk short enough for these sentences, and a disk that always beats computing."""
    blas.install("exact")
    with pytest.MonkeyPatch.context() as patched:
        for module in ("disk_index", "disk_records"):
            patched.setattr(f"headrace.state.{module}.BLOCK_TOKENS", 16)
        patched.setattr("headrace.state.disk_times._LEAST_TIMEOUT_S", 3600.0)
        patched.setattr("headrace.state.disk_times.READ_START_S", 0.0)
        patched.setattr("headrace.state.disk_times.FILE_S", 0.0)
        patched.setitem(tiny.FAMILIES, WIDE, tiny.with_wide_heads("qwen3_5"))
        yield
    # other tests look at how much memory is in use
    packed.cache_clear()
    forms.cache_clear()
    expected.cache_clear()
    gc.collect()


@cache
def packed(kind: str) -> PackedModel:
    model = tiny.build(KINDS[kind][0])
    return PackedModel(model, choose_levels(model), Kernels("exact", "cpu"))


@cache
def forms(kind: str) -> KVForms:
    family, bits = KINDS[kind]
    return {} if bits is None else kv_forms(bits, family, packed(kind), sample_state(packed(kind), None))


@cache
def expected(kind: str, sentence: int) -> list[mx.array]:
    """Logits behind every token of a sentence, fed one at a time."""
    state = SequenceState(StatePool(kv_forms=forms(kind)))
    rows = []
    for token in SENTENCES[sentence]:
        state.begin(1)
        rows.append(packed(kind).forward([Row(state, [token])], [0])[0])
        mx.eval(rows[-1], state.arrays())
        state.commit(1)
    return rows


@dataclass
class Live:
    """A sequence in the middle of its sentence, and the records that were taken of it."""

    request: GenerationRequest
    sentence: int
    state: SequenceState
    records: list[SequenceRecord] = field(default_factory=list)

    @property
    def tokens(self) -> tuple[int, ...]:
        return SENTENCES[self.sentence]

    @property
    def in_prompt(self) -> bool:
        return self.state.length < len(self.request.prompt)


class World:
    """What the engine's thread owns, without a scheduler: every action is asked for by name."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        self.slabs = StatePool(kv_forms=forms(kind))
        self.live: list[Live] = []
        self.num_started = self.num_restored = 0
        self.layout = StateLayout.of(sample_state(packed(kind), None, forms(kind)))
        self._open()

    def _open(self) -> None:
        limits = {"max_pending_bytes": 10**9, "max_load_bytes": 10**9}
        disk = DiskTier(self.folder, 10**9, "w", layout=self.layout, prefill_tokens_per_s=1.0, **limits)
        layout = self.layout
        self.pool = PrefixCache("w", has_spans=layout.has_spans, needs_snapshots=layout.needs_snapshots, disk=disk)
        self.disk = DiskLoader(disk, self.pool)
        self.stages = PromptStages([self.pool, self.disk])

    def start(self, sentence: int, length: int, marks: set[int]) -> None:
        """Begin a prompt where the cache can; others that share it may have to be computed first."""
        if len(self.live) == MAX_LIVE:
            self.abort(self.live[0])
        self.num_started += 1
        boundaries = tuple(Boundary(mark, BoundaryKind.MESSAGE) for mark in sorted(marks) if mark <= length)
        prompt = SENTENCES[sentence][:length]
        request = GenerationRequest(f"r{self.num_started}", prompt, GREEDY, 8, boundaries=boundaries)
        while isinstance(cached := self.stages.prepare(request), WaitReason):
            self.step([(7, 0, 7) if other.in_prompt else (0, 0, 0) for other in self.live])
        state = SequenceState(self.slabs, length + 1)
        if cached.num_cached:
            self.pool.restore(request.request_id, state)
            self.num_restored += 1
        assert state.length == cached.num_cached < length
        self.live.append(Live(request, sentence, state))

    def step(self, widths: Sequence[tuple[int, int, int]]) -> None:
        """One packed forward. widths: tokens that are kept, those that are rolled back, those certain, of each row."""
        rows: list[tuple[Live, int, int, tuple[int, ...]]] = []
        for live, (num_kept, num_junk, num_certain) in zip(self.live, widths, strict=False):
            start = live.state.length
            end = min(start + num_kept, len(live.request.prompt) if live.in_prompt else LENGTH)
            if start == end:
                continue
            if live.in_prompt:
                num_junk, num_certain = 0, end - start
            marks = self.pool.begin_chunk(live.request.request_id, start, end) if live.in_prompt else ()
            certain = min(num_certain, end - start)
            live.state.begin(end - start + num_junk, certain, tuple(mark for mark in marks if mark < end))
            rows.append((live, end - start, num_junk, marks))
        if rows:
            self._forward(rows)

    def _forward(self, rows: Sequence[tuple[Live, int, int, tuple[int, ...]]]) -> None:
        made, picks, lo = [], [], 0
        for live, num_kept, num_junk, _ in rows:
            start = live.state.length
            junk = [(token + 1) % VOCAB for token in (live.tokens * 2)[start + num_kept :][:num_junk]]
            made.append(Row(live.state, [*live.tokens[start : start + num_kept], *junk]))
            picks += range(lo, lo + num_kept)
            lo += num_kept + num_junk
        logits = packed(self.kind).forward(made, picks)
        mx.eval(logits, [row.state.arrays() for row in made])
        lo = 0
        for live, num_kept, num_junk, marks in rows:
            for offset in range(num_kept):
                place = live.state.length + offset
                assert mx.array_equal(logits[lo + offset], expected(self.kind, live.sentence)[place]), place
            lo += num_kept
            self._commit(live, num_junk, marks)

    def _commit(self, live: Live, num_junk: int, marks: tuple[int, ...]) -> None:
        was_in_prompt = live.in_prompt
        snapshots = live.state.take_snapshots()
        live.state.rollback(num_junk)
        if not was_in_prompt:
            return
        if live.state.length in marks:
            snapshots[live.state.length] = live.state.snapshot()
        self.pool.add_snapshots(live.request.request_id, snapshots)
        if not live.in_prompt:
            self.pool.store(live.request.request_id, live.tokens, live.state)

    def checkpoint(self, live: Live) -> None:
        live.records.append(live.state.checkpoint())

    def restore(self, live: Live, number: int) -> None:
        """Back, or forward, to a record, in the state that it was taken from or in a fresh one."""
        if not live.records:
            return
        record = live.records[number % len(live.records)]
        if number % 2:
            live.state.release()
            live.state = SequenceState(self.slabs)
        live.state.restore(record)
        assert live.state.length == record.length

    def preempt(self, live: Live) -> None:
        record = live.state.checkpoint()
        live.state.release()
        live.state = SequenceState(self.slabs, record.length + 1)
        live.state.restore(record)

    def abort(self, live: Live) -> None:
        """The sequence ends, in its prompt or behind it; what it has computed stays."""
        if live.state.length:
            self.pool.store(live.request.request_id, live.tokens, live.state)
        self.stages.end(live.request.request_id)
        live.state.release()
        self.live.remove(live)

    def evict(self, share: int) -> None:
        num_bytes = self.pool.num_bytes * share // 4
        freed = self.pool.evict(num_bytes)
        assert freed >= num_bytes or self.live

    def save(self) -> None:
        while self.disk.advance():
            pass

    def load(self) -> None:
        """A restart: memory is empty, the disk isn't."""
        for live in list(self.live):
            self.abort(live)
        self.disk.close()
        self._open()

    def close(self) -> None:
        for live in list(self.live):
            self.abort(live)
        self.disk.close()
        assert self.slabs.num_bytes == 0


places = st.integers(0, MAX_LIVE - 1)
widths = st.tuples(st.sampled_from((0, 3, 8, 16, 16)), st.integers(0, 4), st.sampled_from((1, 2, 16)))
ACTIONS = {
    # lengths and boundaries of conversations that go on where others were, or branch off them
    "start": st.tuples(
        st.integers(0, len(SENTENCES) - 1),
        st.sampled_from((12, 20, 33, 41, 48)),
        st.sets(st.sampled_from((9, 16, 19, 30, 37)), min_size=1),
    ),
    "step": st.tuples(st.lists(widths, min_size=MAX_LIVE, max_size=MAX_LIVE)),
    "checkpoint": st.tuples(places),
    "restore": st.tuples(places, st.integers(0, 9)),
    "preempt": st.tuples(places),
    "abort": st.tuples(places),
    "evict": st.tuples(st.integers(1, 4)),
    "save": st.just(()),
    "load": st.just(()),
    "clear": st.just(()),
}
OFTEN = ("start",) * 5 + ("step",) * 10 + ("abort",) * 2
programs = st.lists(
    st.sampled_from((*OFTEN, *ACTIONS)).flatmap(lambda name: st.tuples(st.just(name), ACTIONS[name])),
    min_size=24,
    max_size=36,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(program=programs)
def test_random_programs_of_everything_equal_a_cold_run(kind: str, program: list[tuple[str, tuple]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world = World(kind, Path(folder))
        for action, said in program:
            if action in {"checkpoint", "restore", "preempt", "abort"}:
                if said[0] < len(world.live):
                    getattr(world, action)(world.live[said[0]], *said[1:])
            elif action == "clear":
                world.pool.clear()
            else:
                getattr(world, action)(*said)
        event(f"prompts that went on from the cache: {world.num_restored}")
        world.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_was_brought_back_and_never_went_on_leaves_nothing_broken(kind: str, tmp_path: Path) -> None:
    """Its layers are still in the records that it came from: there is nothing to be copied out of it."""
    world = World(kind, tmp_path)
    world.start(0, 20, set())
    world.step([(20, 0, 20)])
    world.step([(8, 0, 8)])
    (live,) = world.live
    world.preempt(live)
    world.abort(live)
    world.start(0, 40, set())
    assert world.num_restored == 1
    for _ in range(4):
        world.step([(12, 0, 12)])
    world.close()
