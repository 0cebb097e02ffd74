"""Prompts with media through the engine: transformers' tokens, whatever is cut, cached, shared or going on beside."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from engine.asking import answer_to
from models.test_media import CASES, FOLDERS, expected, media_of

from headrace.backend import device
from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.models.source import read_files
from headrace.models.vision import load_tower
from headrace.models.weights import parameters_of
from headrace.types.media import PromptMedia, Route
from headrace.types.request import GREEDY, Boundary, BoundaryKind, GenerationRequest

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

DATA = Path(__file__).parent.parent / "data"
CHUNK = 7
counter = iter(range(1_000_000))


@pytest.fixture(scope="module", params=FOLDERS)
def folder(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(folder: str) -> Iterator[Engine]:
    """Its prompts are cut into pieces smaller than a picture."""
    config = Config(str(DATA / folder), ModelConfig(), EngineConfig(prefill_chunk=CHUNK))
    engine = Engine.launch(config)
    yield engine
    engine.stop()


@cache
def digested(folder: str, case: str) -> PromptMedia:
    """The case's media with digests as the session gives them."""
    media = media_of(folder, case)
    inputs = tuple(replace(each, digest=sha256(each.pixels).digest()) for each in media.inputs)
    return PromptMedia(inputs, media.positions, media.rope_delta)


async def ask(
    engine: Engine, prompt: list[int], media: PromptMedia | None, num_tokens: int = 5
) -> tuple[list[int], int]:
    """The output's tokens, and how many of the prompt's were cached."""
    boundaries = (Boundary(len(prompt) - 2, BoundaryKind.MESSAGE),)
    request = GenerationRequest(
        f"r{next(counter)}", tuple(prompt), GREEDY, num_tokens, boundaries=boundaries, media=media
    )
    return await answer_to(engine, request)


def case_of(folder: str, case: str) -> tuple[list[int], list[int]]:
    """The case's prompt and the tokens that transformers says to it."""
    numbers = expected(folder, case)
    return numbers["input_ids"].tolist(), numbers["greedy_tokens"].tolist()


async def test_the_model_says_that_it_takes_media(engine: Engine) -> None:
    assert engine.model.takes_media
    assert any(line.startswith("vision tower: ") for line in engine.model.report)


async def test_without_vision_only_the_tower_is_not_there(folder: str) -> None:
    files = read_files("x", DATA / folder)
    found = load_tower(files, dtype="float32", device=device.current(), has_axes=True)
    assert found is not None
    tower_bytes = sum(array.nbytes for array in parameters_of(found[0].module).values())
    del found
    prompt, answer = case_of(folder, "text40")
    held = []
    for vision in ("auto", "off"):
        gc.collect()
        before = mx.get_active_memory()
        engine = Engine.launch(Config(str(DATA / folder), ModelConfig(vision=vision), EngineConfig(prefix_cache="off")))
        held.append((await engine.status()).memory.weights_bytes - before)
        assert await ask(engine, prompt, None) == (answer, 0)
        assert engine.model.takes_media == (vision == "auto")
        engine.stop()
    # besides its weights a tower has some constants, and of earlier tests a few small arrays may lie around
    assert abs(held[0] - held[1] - tower_bytes) < tower_bytes / 20


@pytest.mark.parametrize("case", CASES)
async def test_a_prompt_in_small_pieces_gets_the_reference_s_answer_and_again_from_the_cache(
    engine: Engine, folder: str, case: str
) -> None:
    await engine.clear_cache()
    prompt, answer = case_of(folder, case)
    assert await ask(engine, prompt, digested(folder, case)) == (answer, 0)
    again, num_cached = await ask(engine, prompt, digested(folder, case))
    assert again == answer and num_cached >= len(prompt) - CHUNK - 2


async def test_prompts_with_and_without_media_run_side_by_side(engine: Engine, folder: str) -> None:
    await engine.clear_cache()
    wanted = [(case, *case_of(folder, case)) for case in (*CASES, "text40", "text200")]
    asked = [ask(engine, prompt, digested(folder, case) if case in CASES else None) for case, prompt, _ in wanted]
    assert [output for output, _ in await asyncio.gather(*asked)] == [answer for *_, answer in wanted]


async def test_another_picture_in_the_same_text_is_not_answered_from_the_cache(engine: Engine, folder: str) -> None:
    await engine.clear_cache()
    prompt, answer = case_of(folder, "image")
    media = digested(folder, "image")
    (image,) = media.inputs
    pixels = np.ascontiguousarray(255 - np.asarray(image.pixels))
    other = replace(image, pixels=pixels.data, digest=sha256(pixels).digest())
    assert (await ask(engine, prompt, media))[0] == answer
    negative, num_cached = await ask(engine, prompt, PromptMedia((other,), media.positions, media.rope_delta))
    assert negative != answer and num_cached <= image.start
    again, num_cached = await ask(engine, prompt, media)
    assert again == answer and num_cached > image.end


async def test_requests_count_by_route_once_they_are_queued(engine: Engine, folder: str) -> None:
    before = dict((await engine.status()).counters.routes)
    await ask(engine, case_of(folder, "image")[0], digested(folder, "image"), 1)
    await ask(engine, case_of(folder, "text40")[0], None, 1)
    routes = dict((await engine.status()).counters.routes)
    assert routes == {Route.TEXT: before[Route.TEXT] + 1, Route.MEDIA: before[Route.MEDIA] + 1}
