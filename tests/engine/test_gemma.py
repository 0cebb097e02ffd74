"""Gemma 3 and 4 with pictures through the engine: the reference's tokens, cut, cached, beside text."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine.asking import answer_to
from models.test_gemma_media import MODELS
from models.tiny_gemma3 import TinyGemma3
from models.tiny_gemma4 import TinyGemma4

from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.types.media import PromptMedia
from headrace.types.request import GREEDY, Boundary, BoundaryKind, GenerationRequest

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

CHUNK = 10
"""Less than a picture has tokens."""
counter = iter(range(1_000_000))


@pytest.fixture(scope="module", params=MODELS)
def reference(request: pytest.FixtureRequest) -> TinyGemma3 | TinyGemma4:
    return MODELS[request.param]()


@pytest.fixture(scope="module")
def folder(reference: TinyGemma3 | TinyGemma4, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference.save(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    engine = Engine.launch(Config(str(folder), ModelConfig(), EngineConfig(prefill_chunk=CHUNK)))
    yield engine
    engine.stop()


async def ask(engine: Engine, ids: list[int], media: PromptMedia | None) -> tuple[list[int], int]:
    """The output's tokens, and how many of the prompt's were cached."""
    boundaries = (Boundary(len(ids) - 2, BoundaryKind.MESSAGE),)
    request = GenerationRequest(f"r{next(counter)}", tuple(ids), GREEDY, 6, boundaries=boundaries, media=media)
    return await answer_to(engine, request)


async def test_prompts_with_and_without_pictures_get_the_reference_s_tokens_alone_at_once_and_from_the_cache(
    engine: Engine, reference: TinyGemma3 | TinyGemma4, folder: Path
) -> None:
    assert engine.model.takes_media
    one, two, three = (reference.picture(seed) for seed in (1, 2, 3))
    shown = [[one, two], [two], [three, one]]
    asked = [(*reference.prompt(pictures, folder), pictures) for pictures in shown]
    text = [11, 12, 13, 14, 15] * 6
    wanted = []
    for ids, _, pictures in (*asked, (text, None, [])):
        tokens, lead = reference.greedy(ids, pictures, 6)
        assert lead > 1e-3, "the reference itself has to be sure"
        wanted.append(tokens)
    alone = [await ask(engine, ids, media) for ids, media, _ in asked] + [await ask(engine, text, None)]
    assert [tokens for tokens, _ in alone] == wanted
    await engine.clear_cache()
    at_once = await asyncio.gather(*(ask(engine, ids, media) for ids, media, _ in asked), ask(engine, text, None))
    assert [tokens for tokens, _ in at_once] == wanted
    again, num_cached = await ask(engine, *asked[0][:2])
    assert again == wanted[0] and num_cached >= asked[0][1].inputs[-1].end


async def test_another_picture_under_the_same_text_is_another_prompt(
    engine: Engine, reference: TinyGemma3 | TinyGemma4, folder: Path
) -> None:
    await engine.clear_cache()
    answers = []
    for seed in (4, 7, 4):
        ids, media = reference.prompt([reference.picture(9), reference.picture(seed)], folder)
        answers.append(await ask(engine, ids, media))
    assert answers[1][1] <= media.inputs[1].start
    assert answers[0][0] == answers[2][0]
    assert answers[2][1] >= media.inputs[1].end
