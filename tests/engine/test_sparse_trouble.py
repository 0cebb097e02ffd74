"""What goes wrong beside sparse prefill costs time, never an answer; what can't go right isn't begun."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from engine.asking import tokens
from engine.sparse_models import config, name_tokens, save
from models import tiny_head

from headrace.engine import prepare as prepare_module
from headrace.engine.commands import Abort, Command, LoopCall, Stop, Submit
from headrace.engine.delivery import Accepted, Item, OutputQueue
from headrace.engine.engine import Engine
from headrace.engine.loop import Loop
from headrace.engine.runner import Runner
from headrace.engine.sparse import draft as draft_module
from headrace.engine.sparse.draft import Importance, SparseDraft
from headrace.engine.turns import DeviceTurns
from headrace.errors import ConfigError, EngineDead, HeadraceError, ModelError, RequestCancelled
from headrace.scheduler.scheduler import Scheduler
from headrace.speculate.depth import DepthPlanner
from headrace.types.events import SparseUsage, TokenOutput
from headrace.types.request import GREEDY, Bypass, GenerationRequest, SparseOptions
from headrace.types.step import StepPlan, StepResult

pytestmark = pytest.mark.anyio

PROMPT = tokens(1, 230)
LONG = GenerationRequest("long", PROMPT, GREEDY, 6, sparse_options=SparseOptions(0.3))
FAILED = SparseUsage(230, 0, (Bypass.DRAFT_FAILED,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("draft"), seed=3)


@pytest.fixture
def engine(folder: Path, draft: Path) -> Iterator[Engine]:
    engine = Engine.launch(config(folder, draft))
    yield engine
    engine.stop()


async def ask(engine: Engine, request: GenerationRequest) -> tuple[list[int], SparseUsage | None]:
    said: list[int] = []
    usage = None
    async for part in await engine.submit(request):
        said += part.token_ids
        usage = part.sparse or usage
    return said, usage


def raises(*arguments: object, **options: object) -> None:
    raise RuntimeError("out of luck")


def failing_runner(patch: pytest.MonkeyPatch) -> None:
    """The draft model's steps fail; the served model's don't."""
    original = Runner.execute

    def execute(self: Runner, plan: StepPlan, requests: dict[str, GenerationRequest]) -> StepResult:
        if self._records_queries:
            self._compute = raises  # type: ignore[assignment,method-assign]
        return original(self, plan, requests)

    patch.setattr(Runner, "execute", execute)


TROUBLES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "scoring": lambda patch: patch.setattr(draft_module, "importance", raises),
    "no numbers": lambda patch: patch.setattr(draft_module, "importance", lambda *_: [float("nan")] * 230),
    "a step": failing_runner,
    "all of it": lambda patch: patch.setattr(SparseDraft, "advance", raises),
    "its beginning": lambda patch: patch.setattr(SparseDraft, "begin", raises),
}


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_a_draft_that_raises_costs_the_prompt_its_thinning_and_is_counted_once(
    trouble: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = await ask(engine, replace(LONG, request_id="dense", sparse_options=None, cache_salt="other"))
    TROUBLES[trouble](monkeypatch)
    assert await ask(engine, LONG) == (expected, FAILED)
    status = await engine.status()
    assert status.sparse is not None
    assert {reason: count for reason, count in status.sparse.bypassed if count} == {Bypass.DRAFT_FAILED.value: 1}
    assert (status.sparse.num_scoring, status.sparse.state_bytes, status.num_running, status.num_waiting) == (0,) * 4


class Here:
    """A receiver in the engine's thread."""

    def receive(self, items: Sequence[tuple[OutputQueue, Item]]) -> None:
        for outputs, item in items:
            outputs.put(item)


class Scenario:
    """An engine's loop in this thread, told what to do between two steps of the draft model."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, draft: Path) -> None:
        self.inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        given = config(folder, draft), self.inbox, None, DeviceTurns(), None, None
        self.loop: Loop = prepare_module.prepare(*given)[0]  # type: ignore[assignment]
        self.heard: list[Accepted | TokenOutput | HeadraceError] = []
        self.num_steps = 0
        self.at_step: dict[int, Callable[[], None]] = {}
        original = SparseDraft.advance

        def advance(draft: SparseDraft, limit_s: float | None) -> dict[str, Importance | None]:
            self.num_steps += 1
            self.at_step.get(self.num_steps, lambda: None)()
            return original(draft, limit_s)

        patch.setattr(SparseDraft, "advance", advance)

    def submit(self, request: GenerationRequest) -> None:
        self.inbox.put(Submit(request, OutputQueue(Here(), self.heard.append, request.request_id), 0.0))


def test_a_request_that_is_aborted_while_it_is_scored_frees_all_it_has_before_the_next_chunk(
    folder: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = Scenario(monkeypatch, folder, draft)
    held: list[int] = []

    def give_up() -> None:
        held.append(scenario.loop.status().sparse.state_bytes)  # type: ignore[union-attr]
        scenario.inbox.put(Abort("long"))
        scenario.inbox.put(Stop())

    scenario.at_step[3] = give_up
    scenario.submit(LONG)
    scenario.loop.run()
    # the third of eight chunks was under way
    assert scenario.num_steps == 3
    assert held[0] > 0
    status = scenario.loop.status()
    assert status.sparse is not None
    assert (status.sparse.num_scoring, status.sparse.state_bytes, status.memory.reserved_bytes) == (0, 0, 0)
    assert (status.num_running, status.num_waiting) == (0, 0)
    assert isinstance(scenario.heard[1], RequestCancelled)


def test_running_streams_bear_the_prompts_of_one_model_at_a_time(
    folder: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a stream runs, a step computes prompts of the served model or leaves time to the draft model."""
    scenario = Scenario(monkeypatch, folder, draft)
    limits: list[tuple[str, float | None]] = []
    original = Scheduler.schedule

    def schedule(self: Scheduler, prompts_s: float | None = None) -> StepPlan:
        plan = original(self, prompts_s)
        of_target = self is scenario.loop._scheduler
        is_streaming = of_target and any(chunk.output_index > 0 for chunk in plan.chunks)
        if of_target and is_streaming:
            limits.append(("served", float(plan.num_prompt_tokens)))
        elif not of_target:
            limits.append(("draft", prompts_s))
        return plan

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    stream = GenerationRequest("stream", tokens(2, 20), GREEDY, 300)
    other = GenerationRequest("other", tokens(3, 400), GREEDY, 2)

    def join() -> None:
        scenario.submit(other)

    scenario.at_step[2] = join
    scenario.submit(stream)
    scenario.submit(LONG)
    scenario.submit(GenerationRequest("end", tokens(4, 5), GREEDY, 1))
    monkeypatch.setattr(Loop, "_end", _stop_after(scenario, {"stream", "long", "other", "end"}))
    scenario.loop.run()
    outputs = {each.request_id for each in scenario.heard if isinstance(each, TokenOutput)}
    assert outputs == {"stream", "long", "other", "end"}
    pairs = list(zip(limits, limits[1:], strict=False))
    streaming = [(first[1], second[1]) for first, second in pairs if (first[0], second[0]) == ("served", "draft")]
    assert any(num_prompt for num_prompt, _ in streaming), "the served model computed prompts beside the stream"
    assert any(limit for _, limit in streaming), "and the draft model did"
    assert all(limit == 0.0 for num_prompt, limit in streaming if num_prompt)


def _stop_after(scenario: Scenario, names: set[str]) -> Callable[[Loop, str, str | None], None]:
    original = Loop._end

    def end(self: Loop, request_id: str, reason: str | None) -> None:
        original(self, request_id, reason)
        names.discard(request_id)
        if not names:
            scenario.inbox.put(Stop())

    return end


async def test_the_draft_models_memory_is_accounted_and_its_cache_can_be_cleared(engine: Engine) -> None:
    await ask(engine, LONG)
    status = await engine.status()
    assert status.sparse is not None
    assert 0 < status.sparse.weights_bytes < status.memory.weights_bytes
    held = status.sparse.records_bytes
    assert held > 0
    # nothing of the selected prompt is kept by the served model
    assert status.memory.records_bytes == held
    assert await engine.clear_cache() == held
    status = await engine.status()
    assert status.sparse is not None
    assert (status.sparse.records_bytes, status.memory.records_bytes) == (0, 0)


async def test_the_draft_model_reads_only_what_is_new_to_it(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    original = Runner.execute

    def execute(self: Runner, plan: StepPlan, requests: dict[str, GenerationRequest]) -> StepResult:
        if self._records_queries:
            computed.append(plan.num_prompt_tokens)
        return original(self, plan, requests)

    monkeypatch.setattr(Runner, "execute", execute)
    await ask(engine, LONG)
    assert sum(computed) == 230
    computed.clear()
    await ask(engine, replace(LONG, request_id="next turn", prompt=(*PROMPT, *tokens(5, 40))))
    assert sum(computed) == 40


async def test_guesses_company_and_preemption_change_nothing_of_what_is_said_to_thinned_prompts(
    draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head processes the kept tokens at their positions; whatever it drafts, the answers are the same."""
    monkeypatch.setattr(DepthPlanner, "plan", lambda self, rows: tuple(len(row.survival) for row in rows))
    monkeypatch.setattr(DepthPlanner, "is_due", lambda self, rows: True)
    head = tiny_head.prefixed(tiny_head.draw("qwen3_5"))
    target = name_tokens(tiny_head.save_with_head("qwen3_5", tmp_path, head))
    engine = Engine.launch(config(target, draft, max_num_seqs=2))
    asked = [
        replace(LONG, request_id="first", max_tokens=60, priority=5),
        replace(LONG, request_id="second", prompt=tokens(6, 180), max_tokens=60, priority=5),
        replace(LONG, request_id="urgent", prompt=tokens(7, 150), max_tokens=24),
    ]
    try:
        plain = [
            await ask(engine, replace(each, request_id=f"{at}", max_draft_tokens=0)) for at, each in enumerate(asked)
        ]
        low = [asyncio.create_task(ask(engine, each)) for each in asked[:2]]
        while (await engine.status()).counters.drafts.num_drafted < 8:
            await asyncio.sleep(0)
        together = [await ask(engine, asked[2]), *[await each for each in low]]
        status = await engine.status()
    finally:
        engine.stop()
    assert all(usage is not None and usage.num_dropped > 0 for _, usage in plain)
    assert together == [plain[2], *plain[:2]]
    assert status.drafts is not None
    assert status.drafts.num_failures == 0
    assert status.counters.num_preemptions > 0


def refusal(target: Path, draft: Path, *, self_check: bool = False) -> ConfigError | ModelError:
    asked = config(target, draft)
    with pytest.raises((ConfigError, ModelError)) as caught:
        Engine.launch(replace(asked, models=replace(asked.models, self_check=self_check)))
    return caught.value


def test_a_draft_with_other_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    swapped = name_tokens(save("llama", tmp_path / "swapped"), t3=4, t4=3)
    error = refusal(folder, swapped)
    assert (error.param, "'t3' is token 3 in the served model and token 4 in the draft" in str(error)) == (
        "sparse_draft",
        True,
    )
    more = name_tokens(save("llama", tmp_path / "more"), extra=160)
    assert "'extra' is no token in the served model and token 160 in the draft" in str(refusal(folder, more))


def test_models_without_a_readable_vocabulary_are_refused(folder: Path, tmp_path: Path) -> None:
    bare = save("llama", tmp_path)
    (bare / "tokenizer.json").write_text("{}")
    assert "holds no vocabulary" in str(refusal(folder, bare))
    (bare / "tokenizer.json").unlink()
    assert "can't be read" in str(refusal(folder, bare))


def test_a_draft_that_is_not_there_is_refused_by_the_name_of_its_flag(folder: Path, tmp_path: Path) -> None:
    assert str(refusal(folder, tmp_path / "nowhere")).startswith("--sparse-draft: there is no folder")


def test_a_draft_none_of_whose_layers_attends_to_all_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    error = refusal(folder, save("mamba2", tmp_path))
    assert (error.param, "none of its layers attends to all of it" in str(error)) == ("sparse_draft", True)


def test_a_served_model_that_takes_no_positions_is_refused(draft: Path, tmp_path: Path) -> None:
    error = refusal(save("internlm3", tmp_path), draft, self_check=True)
    reason = (
        "can't compute prompts in part: Attention runs row by row, and its rope rotates by the length of the sequence"
    )
    assert (error.param, reason in str(error)) == ("sparse_draft", True)


def test_all_that_waits_learns_that_the_engine_has_ended(
    folder: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = Scenario(monkeypatch, folder, draft)
    call = LoopCall(Loop.status)
    scenario.submit(LONG)
    scenario.inbox.put(call)
    scenario.loop.fail_all(EngineDead("the device is gone"))
    assert [type(item) for item in (*scenario.heard, call.result.exception())] == [EngineDead, EngineDead]
