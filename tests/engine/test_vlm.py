"""Models that only mlx-vlm supports: from a chat to the tokens that mlx-vlm alone gives for the whole prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from engine.asking import answer_to
from media.test_image import saved
from mlx_vlm.utils import load_processor
from models.tiny_vlm import LLAVA, PIXTRAL, SMOLVLM, TinyVlm
from PIL import Image
from session.test_media import data_url

from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.errors import InvalidRequest, ModelError, UnsupportedField
from headrace.session.session import Session
from headrace.types.chat import ChatMessage, ChatRequest, MediaPart, TextPart
from headrace.types.media import MediaOptions
from headrace.types.request import GREEDY, Boundary, BoundaryKind, GenerationRequest

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
NUM_TOKENS = 6
counter = iter(range(1_000_000))


@dataclass(frozen=True)
class Served:
    """A tiny model that runs, and its reference."""

    reference: TinyVlm
    folder: Path
    engine: Engine
    session: Session


@pytest.fixture(scope="module", params=[LLAVA, SMOLVLM, PIXTRAL], ids=["llava", "smolvlm", "pixtral"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    reference = TinyVlm(request.param)
    folder = reference.save(tmp_path_factory.mktemp(reference.name))
    engine = Engine.launch(Config(str(folder), ModelConfig(), EngineConfig(prefill_chunk=10)))
    yield Served(reference, folder, engine, Session.for_engine(engine))
    engine.stop()


def picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (40 + seed, 70, 3), dtype=np.uint8)


def png_of(pixels: np.ndarray) -> bytes:
    return saved(Image.fromarray(pixels), "PNG")


def part(file: bytes, **options: int) -> MediaPart:
    return MediaPart("image", data_url(file), MediaOptions(**options), "messages[0].content[0].image_url")


async def prepared(served: Served, *content: MediaPart | str) -> GenerationRequest:
    parts = tuple(TextPart(one) if isinstance(one, str) else one for one in content)
    prompt, media = await served.session._chats._prompt(ChatRequest("r", (ChatMessage("user", parts),)), 512)
    name, boundaries = f"r{next(counter)}", (Boundary(len(prompt.token_ids) - 2, BoundaryKind.MESSAGE),)
    return GenerationRequest(name, prompt.token_ids, GREEDY, NUM_TOKENS, boundaries=boundaries, media=media)


async def answer(served: Served, request: GenerationRequest) -> tuple[list[int], int]:
    """The output's tokens, and how many of the prompt's were cached."""
    return await answer_to(served.engine, replace(request, request_id=f"r{next(counter)}"))


async def test_chats_get_the_tokens_of_the_whole_prompt_alone_at_once_and_from_the_cache(served: Served) -> None:
    assert served.engine.model.takes_media
    chats = [(["What is it?"], []), ([1, "What is this?"], [1]), (["a", 2, "b", 1, "which?"], [2, 1]), ([3, "?"], [3])]
    processor = load_processor(served.folder, add_detokenizer=False, trust_remote_code=False)
    requests, wanted = [], []
    for content, seeds in chats:
        shown = [part(png_of(picture(one))) if isinstance(one, int) else one for one in content]
        requests.append(await prepared(served, *shown))
        text = "".join(served.reference.mark if isinstance(one, int) else one for one in content)
        rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant"
        images = {"images": [Image.fromarray(picture(seed)) for seed in seeds]} if seeds else {}
        made = dict(processor(text=[rendered], **images))
        ids = np.array(made.pop("input_ids"))[0].tolist()
        del made["attention_mask"]
        assert list(requests[-1].prompt) == ids
        tokens, lead = served.reference.greedy(ids, made, NUM_TOKENS)
        assert lead > 1e-3, "the reference itself has to be sure"
        wanted.append(tokens)
    alone = [await answer(served, request) for request in requests]
    assert [tokens for tokens, _ in alone] == wanted
    again = [await answer(served, request) for request in requests]
    assert [tokens for tokens, _ in again] == wanted
    # shorter ones leave no snapshot before their last token
    num_cached = [each for (_, each), request in zip(again, requests, strict=True) if len(request.prompt) > 20]
    assert num_cached and all(num_cached)
    await served.engine.clear_cache()
    at_once = await asyncio.gather(*(answer(served, request) for request in requests))
    assert [tokens for tokens, _ in at_once] == wanted


async def test_what_can_t_be_done_with_a_picture_is_refused_by_its_name(served: Served) -> None:
    with pytest.raises(UnsupportedField, match=r"messages\[0\]\.content\[0\]\.image_url: .*max_pixels"):
        await prepared(served, part(png_of(picture(1)), max_pixels=100))
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.content\[0\]\.image_url"):
        await prepared(served, part(png_of(picture(1))[:200]))


async def test_without_vision_the_text_part_serves_where_mlx_lm_knows_it(served: Served) -> None:
    config = Config(str(served.folder), ModelConfig(vision="off"), EngineConfig())
    if served.reference.name == "smolvlm":
        with pytest.raises(ModelError, match="smolvlm"):
            Engine.launch(config)
        return
    engine = Engine.launch(config)
    try:
        assert not engine.model.takes_media
        request = await prepared(served, "What is it?")
        assert (await answer(replace(served, engine=engine), request))[0] == (await answer(served, request))[0]
    finally:
        engine.stop()
