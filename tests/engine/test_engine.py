"""The engine on tiny models: every request gets what it would get alone, whatever its neighbours do."""

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from models import tiny

from headrace.backend.kernels import Kernels
from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.engine.forward import Draws
from headrace.engine.loop import Loop
from headrace.engine.prefix_cache import PrefixCache
from headrace.engine.runner import Runner
from headrace.engine.windows import Window
from headrace.errors import ConfigError, ContextTooLong, EngineDead, GenerationFailed, InvalidRequest, ModelError
from headrace.models.levels import choose_levels
from headrace.models.packed import PackedModel
from headrace.sampling.rows import SamplingRow
from headrace.scheduler.scheduler import Scheduler
from headrace.state.sequence import SequenceState
from headrace.types.events import FinishReason
from headrace.types.request import GREEDY, GenerationRequest, SamplingParams
from headrace.types.step import Chunk, StepPlan

pytestmark = pytest.mark.anyio

CHUNK = 32


def launch(folder: Path, numerics: str = "exact", **knobs: int) -> Engine:
    engine = EngineConfig(**{"prefill_chunk": CHUNK, **knobs})
    return Engine.launch(Config(model=str(folder), models=ModelConfig(numerics=numerics), engine=engine))


@pytest.fixture(scope="module", params=["qwen3_5", "gemma3", "nemotron_h"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(family, tmp_path_factory.mktemp("models") / family)


@pytest.fixture(scope="module")
def shared_engine(folder: Path) -> Iterator[Engine]:
    engine = launch(folder)
    yield engine
    engine.stop()


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return tiny.save("llama", tmp_path / "llama")


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(seed).integers(0, 97, length))


def request(number: int, length: int, temperature: float = 0.0, max_tokens: int = 16) -> GenerationRequest:
    sampling = SamplingParams(temperature, 0.95, 0, 0.02, seed=number) if temperature else GREEDY
    return GenerationRequest(f"r{number}", prompt(number, length), sampling, max_tokens)


async def collect(engine: Engine, wanted: GenerationRequest, delay_steps: int = 0) -> list[int]:
    for _ in range(delay_steps):
        await asyncio.sleep(0.001)
    return [token async for output in await engine.submit(wanted) for token in output.token_ids]


REQUESTS = [
    request(number, length, temperature=float(number % 2))
    for number, length in enumerate([5, 100, 1, 33, 64, 17, 90, 31])
]


async def test_a_batch_gives_each_request_its_solo_output(shared_engine: Engine) -> None:
    alone = [await collect(shared_engine, one) for one in REQUESTS]
    together = await asyncio.gather(*(collect(shared_engine, one, 3 * i) for i, one in enumerate(REQUESTS)))
    assert together == alone
    assert len({tuple(tokens) for tokens in alone}) == len(REQUESTS)


async def test_greedy_output_is_that_of_the_untouched_model(shared_engine: Engine, family: str) -> None:
    wanted = request(0, 40, max_tokens=24)
    model, ids = tiny.build(family), list(wanted.prompt)
    cache = make_prompt_cache(model)
    for index in range(len(wanted.prompt) + wanted.max_tokens - 1):
        logits = model(mx.array([[ids[index]]]), cache=cache)[0, -1]
        if index >= len(wanted.prompt) - 1:
            ids.append(int(mx.argmax(logits)))
    assert await collect(shared_engine, wanted) == ids[len(wanted.prompt) :]


async def test_an_aborted_request_leaves_the_others_alone(shared_engine: Engine) -> None:
    alone = [await collect(shared_engine, one) for one in REQUESTS[:4]]
    aborted = await shared_engine.submit(request(77, 60, max_tokens=200))

    async def give_up() -> None:
        async for _ in aborted:
            break
        await aborted.aclose()

    together = await asyncio.gather(give_up(), *(collect(shared_engine, one) for one in REQUESTS[:4]))
    assert together[1:] == alone


async def test_a_request_id_is_free_again_after_an_abort(shared_engine: Engine) -> None:
    wanted = request(5, 50, max_tokens=300)
    stream = await shared_engine.submit(wanted)
    async for _ in stream:
        break
    await stream.aclose()
    assert len(await collect(shared_engine, request(5, 50, max_tokens=3))) == 3


async def test_a_row_that_raises_fails_alone(
    shared_engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    alone = [await collect(shared_engine, one) for one in REQUESTS[:4]]
    open_window = Runner._open

    def poisoned(self: Runner, requests: dict[str, GenerationRequest], chunk: Chunk):
        if chunk.request_id == "r66" and chunk.start >= CHUNK:
            raise ValueError("poison in the row")
        return open_window(self, requests, chunk)

    monkeypatch.setattr(Runner, "_open", poisoned)
    victim = collect(shared_engine, request(66, 2 * CHUNK + 3))
    with caplog.at_level(logging.ERROR):
        results = await asyncio.gather(
            victim, *(collect(shared_engine, one) for one in REQUESTS[:4]), return_exceptions=True
        )
    assert isinstance(results[0], GenerationFailed)
    assert isinstance(results[0].__cause__, ValueError)
    assert results[1:] == alone
    assert "poison in the row" in caplog.text


async def test_a_row_whose_masks_cannot_be_made_fails_alone(
    shared_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = await collect(shared_engine, REQUESTS[0])
    sampling_rows = Window.sampling_rows

    def poisoned(self: Window) -> list[SamplingRow]:
        if self.chunk.request_id == "r67" and self.chunk.output_index == 1:
            raise GenerationFailed("the grammar can't go on")
        return sampling_rows(self)

    monkeypatch.setattr(Window, "sampling_rows", poisoned)
    victim, healthy = await asyncio.gather(
        collect(shared_engine, request(67, 7)), collect(shared_engine, REQUESTS[0]), return_exceptions=True
    )
    assert isinstance(victim, GenerationFailed)
    assert "the grammar can't go on" in str(victim)
    assert healthy == alone


async def test_a_row_without_finite_logits_fails_alone(shared_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = await collect(shared_engine, REQUESTS[0])
    forward = PackedModel.forward

    def nan_for_last_row(self: PackedModel, rows, picks, ids):
        logits = forward(self, rows, picks, ids)
        is_victim = [len(row.token_ids) == 7 for row in rows]
        return mx.where(mx.array([is_victim[i] for i in range(len(picks))])[:, None], mx.nan, logits)

    monkeypatch.setattr(PackedModel, "forward", nan_for_last_row)
    victim, healthy = await asyncio.gather(
        collect(shared_engine, request(50, 7)), collect(shared_engine, REQUESTS[0]), return_exceptions=True
    )
    assert isinstance(victim, GenerationFailed)
    assert healthy == alone


async def test_a_step_that_raises_fails_its_rows_and_the_engine_goes_on(
    shared_engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    alone = await collect(shared_engine, REQUESTS[1])
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(PackedModel, "forward", lambda self, rows, picks, ids: mx.array([1.0]) @ mx.zeros((7, 7)))
        with pytest.raises(GenerationFailed):
            await collect(shared_engine, REQUESTS[1])
    assert "a step of 1 rows failed" in caplog.text
    assert shared_engine.health() is None
    assert await collect(shared_engine, REQUESTS[1]) == alone


async def test_a_step_that_fails_leaves_nothing_of_its_prompts_for_others(
    shared_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = request(60, 31)

    async def num_cached() -> int:
        return [output async for output in await shared_engine.submit(prompt)][0].num_cached_tokens

    def fail(self: Draws) -> None:
        raise RuntimeError("the device gave no tokens")

    with monkeypatch.context() as patch:
        patch.setattr(Draws, "read", fail)
        with pytest.raises(GenerationFailed):
            await num_cached()
    assert await num_cached() == 0
    assert await num_cached() > 0


async def test_an_answer_that_can_not_be_kept_is_complete_and_the_engine_goes_on(
    shared_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = await collect(shared_engine, REQUESTS[1])
    store = PrefixCache.store

    def fail_at_the_end(self: PrefixCache, request_id: str, token_ids: Sequence[int], state: SequenceState) -> None:
        if state.length > len(REQUESTS[1].prompt):
            raise MemoryError("no memory for a copy")
        store(self, request_id, token_ids, state)

    with monkeypatch.context() as patch:
        patch.setattr(PrefixCache, "store", fail_at_the_end)
        assert await collect(shared_engine, REQUESTS[1]) == alone
        assert await collect(shared_engine, REQUESTS[1]) == alone
    assert shared_engine.health() is None


async def test_stop_tokens_and_max_tokens_end_an_output(shared_engine: Engine) -> None:
    tokens = await collect(shared_engine, REQUESTS[0])
    stop = tokens[5]
    wanted = GenerationRequest("stopping", REQUESTS[0].prompt, GREEDY, 16, stop_token_ids=frozenset({stop}))
    outputs = [output async for output in await shared_engine.submit(wanted)]
    assert [token for output in outputs for token in output.token_ids] == tokens[: tokens.index(stop)]
    assert [output.finish_reason for output in outputs if output.finish_reason] == [FinishReason.STOP]
    outputs = [output async for output in await shared_engine.submit(REQUESTS[0])]
    assert outputs[-1].finish_reason is FinishReason.LENGTH


async def test_requests_that_make_no_sense_are_refused(shared_engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="no tokens"):
        await collect(shared_engine, GenerationRequest("empty", (), GREEDY, 1))
    length = shared_engine.model.max_model_len
    with pytest.raises(ContextTooLong, match=str(length)):
        await collect(shared_engine, GenerationRequest("long", (1,) * length, GREEDY, 1))


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> list[Runner]:
    """The runners that engines make from here on."""
    made: list[Runner] = []
    init = Runner.__init__

    def remember(self: Runner, *arguments, **options) -> None:
        init(self, *arguments, **options)
        made.append(self)

    monkeypatch.setattr(Runner, "__init__", remember)
    return made


async def test_memory_of_ended_requests_is_given_back(llama: Path, runners: list[Runner]) -> None:
    engine = launch(llama)
    stream = await engine.submit(request(61, 300, max_tokens=50))
    await anext(stream)
    await asyncio.gather(*(collect(engine, one) for one in REQUESTS))
    assert runners[0].state_bytes > 0
    await stream.aclose()
    await collect(engine, REQUESTS[0])
    engine.stop()
    # the last request's rows are freed when the thread looks for work again, which it does before it stops
    assert runners[0].state_bytes == 0


async def test_a_long_prefill_holds_no_stream_longer_than_a_chunk(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    plans: list[StepPlan] = []
    execute = Runner.execute

    def record(self: Runner, plan: StepPlan, requests):
        plans.append(plan)
        return execute(self, plan, requests)

    monkeypatch.setattr(Runner, "execute", record)
    engine = launch(llama, "fast", prefill_chunk=256)
    streams = [await engine.submit(request(number, 8, max_tokens=400)) for number in range(4)]
    for stream in streams:
        await anext(stream)
    await collect(engine, request(9, 4000, max_tokens=1))
    for stream in streams:
        await stream.aclose()
    engine.stop()
    prefill = [number for number, plan in enumerate(plans) if any(chunk.sequence_id == "r9" for chunk in plan.chunks)]
    assert len(prefill) >= 4000 // 256
    for number in prefill:
        chunks = {chunk.sequence_id: chunk for chunk in plans[number].chunks}
        assert {"r0", "r1", "r2", "r3"} <= chunks.keys()
        assert len(chunks["r9"].token_ids) <= 256


async def test_a_dead_thread_turns_health_red_and_leaves_nobody_waiting(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = launch(llama)
    stream = await engine.submit(request(1, 8, max_tokens=400))
    await anext(stream)

    def die(self: Scheduler, prompts_s: float | None = None) -> StepPlan:
        raise MemoryError("out of everything")

    monkeypatch.setattr(Scheduler, "schedule", die)
    with pytest.raises(EngineDead, match="MemoryError$"):
        async for _ in stream:
            pass
    assert engine.health() == "its thread ended with MemoryError"
    with pytest.raises(EngineDead, match="MemoryError$"):
        await collect(engine, REQUESTS[0])


@pytest.mark.parametrize("name", ["_submit", "set_budget"])
async def test_who_sent_what_the_thread_dies_of_gets_an_error(
    name: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = launch(llama)

    def die(*args: object) -> None:
        raise MemoryError("out of everything")

    monkeypatch.setattr(Loop, name, die)
    with pytest.raises(EngineDead, match="MemoryError$"):
        async with asyncio.timeout(60):
            await (engine.set_budget(1) if name == "set_budget" else collect(engine, REQUESTS[0]))


async def test_a_device_that_fails_at_every_call_ends_the_engine(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA does after an illegal access."""
    engine = launch(llama)
    stream = await engine.submit(request(1, 8, max_tokens=400))
    await anext(stream)

    def fail(*arrays: object) -> None:
        raise RuntimeError("CUDA error: misaligned address")

    monkeypatch.setattr("mlx.core.eval", fail)
    with pytest.raises(EngineDead, match="the device has failed at every call since a step failed$"):
        async for _ in stream:
            pass
    assert engine.health() == "the device has failed at every call since a step failed"


async def test_stopping_ends_what_still_runs(llama: Path) -> None:
    engine = launch(llama)
    stream = await engine.submit(request(1, 8, max_tokens=400))
    await anext(stream)
    await asyncio.to_thread(engine.stop)
    with pytest.raises(EngineDead, match="shutting down"):
        async for _ in stream:
            pass


def test_a_context_over_the_models_own_is_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len 999999"):
        launch(llama, max_model_len=999_999)


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(ModelError, match="no/such/folder"):
        launch(Path("./no/such/folder"))


def test_a_decode_step_writes_keys_in_place() -> None:
    llama = tiny.build("llama")
    model = PackedModel(llama, choose_levels(llama), Kernels("fast", "cpu"))
    runner = Runner(model, 160)
    num_rows, length = 4, 1500
    requests = {f"r{i}": GenerationRequest(f"r{i}", prompt(i, length), GREEDY, 8) for i in range(num_rows)}
    for name, one in requests.items():
        runner.execute(StepPlan((Chunk(name, name, 0, one.prompt),)), requests)
    decode = [StepPlan(tuple(Chunk(name, name, length + step, (5,)) for name in requests)) for step in range(3)]
    runner.execute(decode[0], requests)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for plan in decode[1:]:
        runner.execute(plan, requests)
    one_array = runner.state_bytes // (2 * len(model.model.layers) * num_rows)
    assert one_array > 200_000
    assert mx.get_peak_memory() - before < one_array


async def test_forty_requests_through_four_rows(llama: Path) -> None:
    """Every tenth client goes away; all others finish, memory is where it was, and the counters add up."""
    engine = launch(llama, "fast", max_num_seqs=4)
    lengths = np.random.default_rng(5).integers(1, 150, 40)
    wanted = [request(500 + number, int(length), max_tokens=1 + number % 9) for number, length in enumerate(lengths)]

    async def go_away(one: GenerationRequest) -> None:
        await (await engine.submit(one)).aclose()

    leaving = wanted[::10]
    staying = [one for one in wanted if one not in leaving]
    outputs = await asyncio.gather(*(collect(engine, one) for one in staying), *(go_away(one) for one in leaving))
    assert [len(tokens) for tokens in outputs[: len(staying)]] == [one.max_tokens for one in staying]
    await collect(engine, request(999, 3))
    status = await engine.status()
    assert (status.num_running, status.num_waiting, status.memory.reserved_bytes) == (0, 0, 0)
    finished = dict(status.counters.finished)
    assert finished["length"] == len(staying) + 1
    assert finished["abort"] == len(leaving)
    assert status.counters.num_output_tokens == sum(one.max_tokens for one in staying) + 16
    assert status.counters.num_prompt_tokens == sum(len(one.prompt) for one in staying) + 3
    engine.stop()
