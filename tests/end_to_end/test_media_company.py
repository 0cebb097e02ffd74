"""Requests with pictures and videos beside each other: each gets the answer that it gets alone."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator

import numpy as np
import pytest
from end_to_end.test_images import counter, question, samples
from end_to_end.test_pictures import BLUE, RED, circle
from media.video_files import video_file
from PIL import Image
from session.test_media import data_url

from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.session.session import Session
from headrace.types.chat import ChatMessage, ChatRequest, GenerationOptions, MediaPart, TextPart
from headrace.types.events import Finished, Text
from headrace.types.request import SamplingParams

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine.launch(
        Config("miniature", ModelConfig(self_check=False), EngineConfig(max_num_seqs=16, prefill_chunk=96))
    )
    yield engine
    engine.stop()


async def say(session: Session, message: ChatMessage, max_tokens: int = 8) -> str:
    request = ChatRequest(
        f"c{next(counter)}",
        (message,),
        options=GenerationOptions(sampling=SamplingParams(temperature=0.0), max_tokens=max_tokens),
        enable_thinking=False,
    )
    said = ""
    async for event in session.chat(request):
        if isinstance(event, Text):
            said += event.text
        elif isinstance(event, Finished):
            assert event.usage.num_output_tokens <= max_tokens
    return said


def shown(file: bytes, media_type: str = "image/png", words: str = "What is this?") -> ChatMessage:
    part = MediaPart("video" if "video" in media_type else "image", data_url(file, media_type))
    return ChatMessage("user", (part, TextPart(words)))


def jpeg(png: bytes) -> bytes:
    """Files of one size and quality, whose heads are equal to the byte."""
    file = io.BytesIO()
    Image.open(io.BytesIO(png)).save(file, "JPEG", quality=90)
    return file.getvalue()


def clip() -> bytes:
    frames = [Image.open(io.BytesIO(circle(BLUE, x))).convert("RGB") for x in (0.2, 0.4, 0.6, 0.8)]
    return video_file(4, 2, (128, 128), pictures=[np.asarray(frame) for frame in frames])


async def test_twenty_pictures_get_equal_answers_one_by_one_by_four_and_by_sixteen(engine: Engine) -> None:
    session, asked = Session.for_engine(engine), [question(sample) for sample in samples(20)]
    answers = []
    for at_once in (1, 4, 16):
        await engine.clear_cache()
        gate = asyncio.Semaphore(at_once)

        async def ask(message: ChatMessage, gate: asyncio.Semaphore = gate) -> str:
            async with gate:
                return await say(session, message)

        answers.append(await asyncio.gather(*(ask(message) for message in asked)))
    assert answers[0] == answers[1] == answers[2]
    assert len(set(answers[0])) > 5


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
async def test_a_red_picture_and_a_blue_one_are_never_swapped(engine: Engine, form: str) -> None:
    files = [circle(RED), circle(BLUE)]
    media_type = "image/png"
    if form == "JPEG":
        files, media_type = [jpeg(file) for file in files], "image/jpeg"
    assert files[0][:100] == files[1][:100] or form == "PNG"
    session = Session.for_engine(engine)
    red, blue = (shown(file, media_type) for file in files)
    await engine.clear_cache()
    in_turn = [await say(session, message) for message in (red, blue, red, blue)]
    await engine.clear_cache()
    at_once = await asyncio.gather(*(say(session, message) for message in (red, blue) * 4))
    for answers in (in_turn, at_once):
        assert all("red" in answer and "blue" not in answer for answer in answers[::2])
        assert all("blue" in answer and "red" not in answer for answer in answers[1::2])


async def test_when_one_of_several_ends_the_others_go_on_as_if_alone(engine: Engine) -> None:
    session, asked = Session.for_engine(engine), [question(sample) for sample in samples(26)[20:]]
    asked += [shown(clip(), "video/mp4"), ChatMessage("user", (TextPart("hello"),))]
    lengths = [1, 24, 3, 24, 12, 24, 24, 24]
    alone = [await say(session, message, length) for message, length in zip(asked, lengths, strict=True)]
    await engine.clear_cache()
    beside = await asyncio.gather(
        *(say(session, message, length) for message, length in zip(asked, lengths, strict=True))
    )
    assert beside == alone
    await engine.clear_cache()

    async def given_up(message: ChatMessage) -> None:
        task = asyncio.create_task(say(session, message, 24))
        await asyncio.sleep(0)
        while not (await engine.status()).num_running:
            await asyncio.sleep(0)
        task.cancel()

    survivors = asyncio.gather(*(say(session, message, 24) for message in asked[3:4] + asked[5:]))
    await given_up(asked[0])
    assert await survivors == alone[3:4] + alone[5:]


async def test_text_that_goes_on_while_and_after_a_video_is_what_it_is_alone(engine: Engine) -> None:
    session = Session.for_engine(engine)
    words = [ChatMessage("user", (TextPart(text),)) for text in ("hello", "What can you do?", "Count to five.")]
    alone = [await say(session, message, 24) for message in words]
    await engine.clear_cache()
    assert "blue circle" in await say(session, shown(clip(), "video/mp4", "What happens in the clip?"), 30)
    assert [await say(session, message, 24) for message in words] == alone
    await engine.clear_cache()
    beside = await asyncio.gather(
        say(session, words[0], 24),
        say(session, shown(clip(), "video/mp4", "What happens in the clip?"), 30),
        say(session, words[1], 24),
        say(session, words[2], 24),
    )
    assert [beside[0], *beside[2:]] == alone
