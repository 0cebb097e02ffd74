"""Engines whose keys and values have few bits: only the bits change an answer, and no record serves other bits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import metal_forms
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from engine.asking import tokens
from engine.sparse_models import save
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache
from models import tiny

from headrace.backend import gated_delta
from headrace.backend.kernels import Kernels
from headrace.cli.configured import configured_text_pipeline
from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.engine.group import refuse_with_ranks
from headrace.engine.kv_bits import kv_forms
from headrace.engine.memory import sample_state
from headrace.engine.model_files import model_files
from headrace.errors import ConfigError
from headrace.models.levels import choose_levels
from headrace.models.packed import PackedModel
from headrace.models.preview import estimate
from headrace.models.step import Row
from headrace.models.weights import load_weights, set_precision
from headrace.scheduler import admission
from headrace.speculate.depth import DepthPlanner
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool
from headrace.text.tokenizer import Tokenizer
from headrace.types.events import TokenLogprobs
from headrace.types.request import GREEDY, GenerationRequest
from headrace.types.status import Phase

WIDE = "qwen3_5_wide"
KINDS = {"dense": ("mistral", 8), "sliding window": ("gemma3_text", 4), "hybrid": (WIDE, 4)}
slow = pytest.mark.slow


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def wide_hybrid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiny.FAMILIES, WIDE, tiny.with_wide_heads("qwen3_5"))


@asynccontextmanager
async def engine_of(folder: Path, bits: int | None, **knobs: object) -> AsyncIterator[Engine]:
    given = EngineConfig(**{"prefill_chunk": 32, "kv_bits": bits, **knobs})  # type: ignore[arg-type]
    engine = Engine.launch(Config(str(folder), ModelConfig(numerics="exact", self_check=False), given))
    try:
        yield engine
    finally:
        await asyncio.to_thread(engine.stop)


Answer = tuple[list[int], list[TokenLogprobs]]


async def ask(engine: Engine, request: GenerationRequest) -> tuple[Answer, int]:
    """The output's tokens with their log-probabilities, and how many of the prompt's were cached."""
    found: Answer = [], []
    num_cached = 0
    async for part in await engine.submit(request):
        found[0].extend(part.token_ids)
        found[1].extend(part.logprobs)
        num_cached = part.num_cached_tokens
    return found, num_cached


def requests(name: str) -> list[GenerationRequest]:
    """Some share 60 tokens; the lowest priority is preempted."""
    shared = tokens(1, 60)
    prompts = [tokens(2, 45), (*shared, *tokens(3, 20)), (*shared, *tokens(4, 31)), tokens(5, 9)]
    return [
        GenerationRequest(f"{name}-{number}", prompt, GREEDY, 16, priority=len(prompts) - number, num_logprobs=2)
        for number, prompt in enumerate(prompts)
    ]


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["dense", pytest.param("sliding window", marks=slow), "hybrid"])
async def test_an_answer_does_not_depend_on_company_cache_drafts_or_preemption(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, bits = KINDS[kind]
    target, draft = save(family, tmp_path / "target"), save("llama", tmp_path / "draft")
    async with engine_of(target, bits, prefix_cache="off") as engine:
        alone = [(await ask(engine, each))[0] for each in requests("alone")]
    async with engine_of(target, None, prefix_cache="off") as engine:
        exact = [(await ask(engine, each))[0] for each in requests("exact")]
    monkeypatch.setattr(DepthPlanner, "plan", lambda self, rows: tuple(len(row.survival) for row in rows))
    monkeypatch.setattr(DepthPlanner, "is_due", lambda self, rows: True)
    monkeypatch.setattr(DepthPlanner, "prefills", lambda self, rows: list(range(len(rows))))
    monkeypatch.setattr(admission, "SLICE_TOKENS", 3)
    async with engine_of(target, bits, draft_model=str(draft), max_num_seqs=2) as engine:
        for turn in range(2):
            running = []
            for each in requests(f"turn {turn}"):
                running.append(asyncio.create_task(ask(engine, each)))
                while not any(one.phase is Phase.DECODE for one in (await engine.status()).requests):
                    if running[-1].done():
                        break
            answers = [await each for each in running]
            assert [found for found, _ in answers] == alone
            assert not turn or all(num_cached for _, num_cached in answers[:3])
        counters = (await engine.status()).counters
    assert counters.num_preemptions > 0
    assert counters.drafts.num_drafted > 0
    assert exact != alone


@pytest.mark.anyio
@pytest.mark.parametrize(
    "kind", [pytest.param("dense", marks=slow), "sliding window", pytest.param("hybrid", marks=slow)]
)
async def test_records_on_disk_serve_their_own_bits_alone_and_outlast_a_restart(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.state.disk_times._LEAST_TIMEOUT_S", 3600.0)
    family, own = KINDS[kind]
    config = tiny.FAMILIES[family]
    for part in (config, config.get("text_config", config)):
        monkeypatch.setitem(part, "max_position_embeddings", 2048)
    folder, cache = save(family, tmp_path / "model"), str(tmp_path / "cache")
    prompt = tokens(6, 600)
    other = 12 - own
    cold = {}
    for bits in (None, own, other):
        async with engine_of(folder, bits, prefix_cache="off") as engine:
            cold[bits] = (await ask(engine, GenerationRequest("cold", prompt, GREEDY, 8, num_logprobs=2)))[0]
    for round_ in range(2):
        for bits in (None, own, other):
            async with engine_of(folder, bits, cache_dir=cache) as engine:
                found, num_cached = await ask(engine, GenerationRequest("asked", prompt, GREEDY, 8, num_logprobs=2))
            assert found == cold[bits]
            assert (num_cached > 0) == (round_ > 0), bits


def packed(family: str, kernels: Kernels) -> PackedModel:
    model = tiny.build(family)
    return PackedModel(model, choose_levels(model), kernels)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("llama", "a head of model has 16 numbers, and groups have 64 or 32"),
        ("mamba2", "model has no layers of full attention"),
        ("deepseek_v3", "DeepseekV3Attention of model run row by row and keep exact keys and values"),
        ("gemma2", "Attention of model run row by row and keep exact keys and values"),
    ],
)
def test_a_model_whose_keys_can_not_have_few_bits_is_refused_by_the_flag(
    family: str, reason: str, tmp_path: Path
) -> None:
    folder = tiny.save(family, tmp_path / "model")
    config = Config(str(folder), ModelConfig(self_check=False), EngineConfig(kv_bits=4))
    with pytest.raises(ConfigError) as caught:
        Engine.launch(config)
    assert (str(caught.value), caught.value.param) == (f"--kv-bits: {reason}", "kv_bits")


def test_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="kv_bits is not supported with --ranks"):
        refuse_with_ranks(Config("m", engine=EngineConfig(kv_bits=8)))


@pytest.mark.parametrize(
    ("family", "stored", "read"),
    [
        # three layers of two heads of 32 numbers: a byte each, a scale and a bias of four bytes, for keys and values
        ("mistral", 3 * 2 * 2 * (32 + 8), 2 * 2 * 32 * 4),
        # two of four layers have no window
        ("gemma3_text", 2 * 2 * 2 * (32 + 8), 2 * 2 * 32 * 4),
        # one of four layers, of 64 numbers
        (WIDE, 1 * 2 * 2 * (64 + 8), 2 * 2 * 64 * 4),
    ],
)
def test_a_token_takes_what_is_promised_and_what_is_foreseen(family: str, stored: int, read: int) -> None:
    model = packed(family, Kernels("fast", "cpu"))
    exact = sample_state(model, None)
    forms = kv_forms(8, family, model, exact)
    cost = sample_state(model, None, forms).cost()
    assert cost.token_bytes == stored
    assert cost.num_bytes(8192) - cost.num_bytes(4096) == 4096 * (stored + read)
    assert cost.record_bytes(8192) - cost.record_bytes(4096) == 4096 * stored
    foreseen = estimate(tiny.FAMILIES[family], 4, kv_bits=8)
    assert foreseen is not None
    assert foreseen.cost.token_bytes == stored
    assert foreseen.cost.num_bytes(8192) - foreseen.cost.num_bytes(4096) == 4096 * (stored + read)


def logits(model: PackedModel, ids: Sequence[int], pool: StatePool, chunks: Sequence[int]) -> np.ndarray:
    """Of two rows of the same tokens, the second one token behind, in such chunks."""
    states = [SequenceState(pool), SequenceState(pool)]
    found: list[list[np.ndarray]] = [[], []]
    for number, num_tokens in enumerate(chunks):
        rows = []
        for row, state in enumerate(states):
            own = num_tokens - (row == 1 and number == 0)
            state.begin(own)
            rows.append(Row(state, ids[state.length : state.length + own]))
        sizes = [len(row.token_ids) for row in rows]
        given = np.array(model.forward(rows, range(sum(sizes))).astype(mx.float32))
        mx.eval(model.unevaluated(rows))
        for row, state in enumerate(states):
            found[row].append(given[: sizes[0]] if row == 0 else given[sizes[0] :])
            state.commit(sizes[row])
    return np.concatenate(found[0]), np.concatenate(found[1])


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "gemma4_text", WIDE])
@pytest.mark.parametrize("device", ["metal", "cuda"])
def test_other_devices_forms_give_what_the_cpus_give(family: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Metal rows are read together; on CUDA no kernel of ours reads such keys."""
    monkeypatch.setattr(gated_delta, "gated_delta_kernel", metal_forms.delta_kernel)
    ids = tokens(7, 60)
    here = packed(family, Kernels("fast", "cpu"))
    exact = sample_state(here, None)
    forms = kv_forms(8, family, here, exact)
    expected = logits(here, ids, StatePool(kv_forms=forms), (20, 1, 1, 7, 1))
    there = packed(family, replace(Kernels("fast", device), fuses_attention=False))
    pool = StatePool(has_batches=there.kernels.attends_in_batches, kv_forms=forms)
    assert not there.is_compiled
    for found, wanted in zip(logits(there, ids, pool, (20, 1, 1, 7, 1)), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=2e-2)
    plain = logits(here, ids, StatePool(), (20, 1, 1, 7, 1))
    assert max(float(np.abs(one - other).max()) for one, other in zip(plain, expected, strict=True)) > 1e-4


def test_the_report_tells_the_bytes_and_the_error() -> None:
    config = Config("miniature", engine=EngineConfig(kv_bits=8, mtp="off"))
    text = configured_text_pipeline(config)
    assert text is not None
    engine = Engine.launch(config, text.constraints)
    engine.stop()
    assert engine.model.kv_bits == 8
    (line,) = [line for line in engine.model.report if line.startswith("keys and values: ")]
    # of two layers, two heads of 64 numbers: as float32, and a byte each with a scale and a bias
    stored, exact = (2 * 2 * 2 * num_bytes for num_bytes in (64 + 8, 64 * 4))
    assert line.startswith(f"keys and values: in 8 bits in 2 layers, {stored} bytes a token instead of {exact}; KL ")
    assert "nats from exact ones, the same likeliest token at 100% of 128 positions" in line


def quantised_logits(model: nn.Module, ids: Sequence[int], group_size: int, bits: int) -> np.ndarray:
    """Of mlx-lm's model with its own quantised caches, by one call."""
    caches = [QuantizedKVCache(group_size, bits) for _ in make_prompt_cache(model)]
    return np.array(model(mx.array([ids]), cache=caches)[0].astype(mx.float32))


def kv_logits(model: PackedModel, ids: Sequence[int], bits: int | None) -> np.ndarray:
    """Of our steps, by one call."""
    forms = {} if bits is None else kv_forms(bits, "model", model, sample_state(model))
    state = SequenceState(StatePool(kv_forms=forms), len(ids))
    state.begin(len(ids))
    return np.array(model.forward([Row(state, ids)], range(len(ids))).astype(mx.float32))


@pytest.mark.parametrize("bits", [8, 4])
def test_logits_are_those_of_mlx_lm_with_its_quantised_caches(bits: int) -> None:
    ids = tokens(8, 90)
    expected = quantised_logits(tiny.build("mistral"), ids, 32, bits)
    model = packed("mistral", Kernels("exact", "cpu"))
    found, exact = kv_logits(model, ids, bits), kv_logits(model, ids, None)
    error = np.abs(exact - expected).max()
    assert error > 1e-3
    # a rounding of a key may make its number the next one
    assert np.abs(found - expected).max() < error / 10


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "most_nats"), [(8, 2e-3), (4, 0.2)])
def test_real_weights_stay_near_their_exact_next_tokens(bits: int, most_nats: float) -> None:
    """SmolLM2, over a text that it was not asked about; and mlx-lm's quantised caches, which are as far."""
    files = model_files(Config("smollm2"))
    ids = Tokenizer.load(files.directory).encode(Path(__file__).read_text()[:1000])[:80]
    model = load_weights(files).model
    set_precision(model, "float32", "cpu", 24_000_000_000)
    of_mlx_lm = quantised_logits(model, ids, 64, bits)
    own = PackedModel(model, choose_levels(model), Kernels("fast", "cpu"))
    exact, found = kv_logits(own, ids, None), kv_logits(own, ids, bits)
    ours, theirs = divergence(exact, found), divergence(exact, of_mlx_lm)
    assert 0 < ours < most_nats
    assert 0.5 < ours / theirs < 2


def divergence(exact: np.ndarray, found: np.ndarray) -> float:
    """Kullback-Leibler, the mean in nats."""
    logs = [each - each.max(-1, keepdims=True) for each in (exact.astype(np.float64), found.astype(np.float64))]
    expected, other = (each - np.log(np.exp(each).sum(-1, keepdims=True)) for each in logs)
    return float((np.exp(expected) * (expected - other)).sum(-1).mean())
