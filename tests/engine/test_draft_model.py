"""A draft model for speculative decoding: which are taken, what they weigh, and the distribution of what is sampled."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from engine import tiny_tokens
from engine.always_drafts import draft_always
from engine.sparse_models import name_tokens, save
from models import tiny, tiny_head

from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.errors import ConfigError, ModelError
from headrace.speculate.drafts import Drafts, DraftSource
from headrace.speculate.ngram import NgramDrafter
from headrace.speculate.ranking import Ranking, RowAcceptance
from headrace.types.request import GREEDY, GenerationRequest


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("qwen3_5", tmp_path_factory.mktemp("draft"))


def launch(target: Path, draft: Path, **knobs: object) -> Engine:
    engine = EngineConfig(**{"prefill_chunk": 32, "draft_model": str(draft), **knobs})
    return Engine.launch(Config(str(target), ModelConfig(numerics="exact", self_check=False), engine))


def refusal(target: Path, draft: Path, **knobs: object) -> ConfigError | ModelError:
    with pytest.raises((ConfigError, ModelError)) as caught:
        launch(target, draft, **knobs)
    return caught.value


def test_what_can_not_draft_is_refused_by_the_name_of_its_flag(target: Path, draft: Path, tmp_path: Path) -> None:
    swapped = name_tokens(save("llama", tmp_path / "swapped"), t3=4, t4=3)
    error = refusal(target, swapped)
    assert error.param == "draft_model"
    assert str(error).startswith("--draft-model: swapped has other tokens than")
    assert "'t3' is token 3 in the served model and token 4 in the draft" in str(error)
    assert str(refusal(target, tmp_path / "nowhere")).startswith("--draft-model: there is no folder")
    assert refusal(target, draft, mtp="on").param == "mtp"
    assert refusal(target, draft, max_draft_tokens=0).param == "draft_model"


def test_a_draft_model_takes_the_place_of_a_head_and_the_report_names_both(draft: Path, tmp_path: Path) -> None:
    head = tiny_head.prefixed(tiny_head.draw("qwen3_5"))
    folder = name_tokens(tiny_head.save_with_head("qwen3_5", tmp_path / "headed", head))
    engine = launch(folder, draft)
    engine.stop()
    (by, instead) = [line for line in engine.model.report if line.startswith("drafts:")]
    assert f"by {draft.name}" in by
    assert instead == "drafts: the model's own prediction head is not used, as --draft-model is given"


def test_one_model_for_sparse_prefill_and_drafts_is_loaded_once(target: Path, draft: Path) -> None:
    """Its float32 weights, by arithmetic, are on the device once."""
    weights_bytes = sum(each.nbytes for each in tiny.parameters(tiny.build("qwen3_5")).values())

    async def weights(**knobs: object) -> int:
        gc.collect()  # engines that have ended count as long as they are there
        engine = launch(target, draft, **knobs)
        try:
            return (await engine.status()).memory.weights_bytes
        finally:
            engine.stop()

    alone = asyncio.run(weights())
    both = asyncio.run(weights(sparse_draft=str(draft)))
    assert abs(both - alone) < weights_bytes / 4


async def _answers(engine: Engine, wanted: Sequence[GenerationRequest]) -> list[tuple[int, ...]]:
    async def ask(one: GenerationRequest) -> tuple[int, ...]:
        return tuple([token async for output in await engine.submit(one) for token in output.token_ids])

    return list(await asyncio.gather(*map(ask, wanted)))


def _probabilities(logits: mx.array, top_k: int) -> dict[int, float]:
    numbers = np.array(logits, np.float64)
    likely = np.argsort(-numbers)[:top_k]
    masses = np.exp(numbers[likely] - numbers[likely].max())
    return dict(zip(likely.tolist(), (masses / masses.sum()).tolist(), strict=True))


@pytest.mark.parametrize(
    "family",
    ["llama", pytest.param("gpt_oss", marks=pytest.mark.slow), pytest.param("qwen3_5", marks=pytest.mark.slow)],
)
def test_what_is_sampled_with_drafts_is_distributed_as_the_model_alone_says(
    family: str, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second and third tokens, of three choices each, of 600 answers, against mlx-lm's logits."""
    draft_always(monkeypatch)
    model, prompt, number = tiny.build(family), tiny.PROMPT, 600
    sampling = replace(GREEDY, temperature=1.0, top_k=3)
    wanted = [
        GenerationRequest(f"r{seed}", prompt, replace(sampling, seed=seed), 4, max_draft_tokens=2)
        for seed in range(number)
    ]
    engine = launch(save(family, tmp_path / family), draft, max_num_seqs=24)
    try:
        found = Counter(asyncio.run(_answers(engine, wanted)))
    finally:
        engine.stop()
    counted = Counter(answer[:3] for answer in found.elements())
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        expected = {
            (*text, token): chance * share
            for text, chance in expected.items()
            for token, share in _probabilities(tiny.reference(model, [*prompt, *text])[-1], 3).items()
        }
    assert counted.keys() <= expected.keys()
    squares = sum((counted[text] - number * chance) ** 2 / (number * chance) for text, chance in expected.items())
    # chi-square with 26 degrees of freedom is over 54 once in a thousand times
    assert squares < 54
    assert counted.total() == number


def test_memory_counts_the_draft_model_s_states_and_they_end_with_their_sequences(target: Path, draft: Path) -> None:
    async def run(engine: Engine) -> tuple[int, int, int]:
        stream = await engine.submit(GenerationRequest("r", tiny.PROMPT * 2, GREEDY, 300))
        seen = 0
        async for _ in stream:
            status = await engine.status()
            assert status.drafts is not None
            seen = max(seen, status.drafts.state_bytes)
            reserved = status.memory.reserved_bytes
            assert reserved == 0 or status.drafts.state_bytes <= status.memory.state_bytes
        status = await engine.status()
        assert status.drafts is not None
        return seen, status.drafts.state_bytes, status.drafts.weights_bytes

    with pytest.MonkeyPatch.context() as patch:
        draft_always(patch)
        engine = launch(target, draft, prefix_cache="off")
        try:
            seen, left, weights_bytes = asyncio.run(run(engine))
        finally:
            engine.stop()
    assert seen > 0
    assert left == 0
    assert weights_bytes > 0


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 24}, "kind": {"enum": ["ship", "boat"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_answers_of_a_schema_are_drafted_and_stay_the_same(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model is the target, so that it is right wherever the schema allows what it wants to write."""
    draft_always(monkeypatch)
    monkeypatch.setattr(NgramDrafter, "propose", lambda self, max_tokens: None)
    accepted, report = Counter[DraftSource](), Ranking.report

    def counted(self: Ranking, record: RowAcceptance, verified: Drafts, num_accepted: int) -> None:
        accepted.update(draft.source for draft in verified.ranked[:num_accepted])
        report(self, record, verified, num_accepted)

    monkeypatch.setattr(Ranking, "report", counted)
    model = ModelConfig(numerics="exact", self_check=False)
    knobs = EngineConfig(prefill_chunk=32, draft_model=str(save(family, tmp_path / "draft")), prefix_cache="off")
    engine = Engine.launch(Config(str(save(family, tmp_path / family)), model, knobs), tiny_tokens.factory())
    warm = replace(GREEDY, temperature=0.8, top_k=8)
    wanted = [
        GenerationRequest(
            f"r{number}",
            tiny.PROMPT[number:] * 2,
            GREEDY if number % 2 else replace(warm, seed=number),
            80,
            frozenset([tiny_tokens.END]),
            constraint=tiny_tokens.schema_constraint(SCHEMA),
        )
        for number in range(6)
    ]

    async def run() -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        plain = [replace(each, request_id=f"plain {each.request_id}", max_draft_tokens=0) for each in wanted]
        alone = [(await _answers(engine, [each]))[0] for each in plain]
        return alone, await _answers(engine, wanted)

    try:
        alone, drafted = asyncio.run(run())
    finally:
        engine.stop()
    assert drafted == alone
    for answer in alone:
        found = json.loads(tiny_tokens.text_of(answer))
        assert found.keys() == {"name", "kind"}
        assert found["kind"] in ("ship", "boat")
    assert accepted[DraftSource.MODEL] > 12
    assert accepted[DraftSource.FORCED] > 12
