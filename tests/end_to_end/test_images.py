"""Pictures through the engine that serves text: seen, told apart, cached, drafted for, beside others."""

import asyncio
import base64
import io
import random
from collections.abc import Iterator, Sequence

import pytest
from PIL import Image, ImageDraw

from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.models.chunked import ChunkedEncoding
from headrace.models.vision_tower import MediaEmbeddings, VisionTower
from headrace.session.session import Session
from headrace.speculate.depth import DepthPlanner, DraftForecast
from headrace.types.chat import (
    ChatMessage,
    ChatRequest,
    GenerationOptions,
    MediaPart,
    TextPart,
)
from headrace.types.events import Finished, Text, Usage
from headrace.types.media import MediaInput
from headrace.types.request import SamplingParams
from training.jobs import pictures
from training.sample import Drawing, Sample

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

MARKUP = "<|vision_start|><|image_pad|><|vision_end|>"
COLORS = {
    "red": (220, 30, 30),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (245, 220, 50),
    "orange": (245, 140, 30),
    "purple": (140, 60, 180),
    "black": (20, 20, 20),
    "white": (250, 250, 250),
}
GROUNDS = {"white": (250, 250, 250), "grey": (150, 150, 150), "pale": (200, 222, 238)}
FINENESS = 4
"""Pictures are drawn so many times as large and made smaller, for soft edges."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine.launch(
        Config("miniature", ModelConfig(self_check=False), EngineConfig(max_num_seqs=8, prefill_chunk=24))
    )
    yield engine
    engine.stop()


@pytest.fixture
async def session(engine: Engine) -> Session:
    return Session.for_engine(engine)


def picture(drawing: Drawing, size: tuple[int, int]) -> MediaPart:
    """A drawing of circles and squares as a PNG in a data URL."""
    height, width = (FINENESS * each for each in size)
    image = Image.new("RGB", (width, height), GROUNDS[drawing.ground])
    brush = ImageDraw.Draw(image)
    for shape in drawing.shapes:
        x, y, radius = shape.x * width, shape.y * height, shape.radius * min(width, height)
        if shape.kind == "circle":
            brush.ellipse((x - radius, y - radius, x + radius, y + radius), COLORS[shape.color])
        else:
            radius *= 0.88
            brush.rectangle((x - radius, y - radius, x + radius, y + radius), COLORS[shape.color])
    held = io.BytesIO()
    image.resize((size[1], size[0]), Image.Resampling.BOX).save(held, "PNG")
    return MediaPart("image", "data:image/png;base64," + base64.b64encode(held.getvalue()).decode())


def samples(count: int) -> list[Sample]:
    """Held-out questions about pictures that this file can draw."""
    stream = random.Random("pictures of circles and squares")
    found: list[Sample] = []
    while len(found) < count:
        sample = pictures.make(stream, True)
        if all(shape.kind in ("circle", "square") for drawing in sample.drawings for shape in drawing.shapes):
            found.append(sample)
    return found


def question(sample: Sample) -> ChatMessage:
    parts: list[TextPart | MediaPart] = []
    drawings = iter(sample.drawings)
    for index, text in enumerate(sample.turns[0].text.split(MARKUP)):
        if index:
            parts.append(picture(next(drawings), sample.size))
        if text:
            parts.append(TextPart(text))
    return ChatMessage("user", tuple(parts))


counter = iter(range(1_000_000))


async def say(session: Session, *messages: ChatMessage, depth: int | None = None) -> tuple[str, Usage]:
    request = ChatRequest(
        f"r{next(counter)}",
        messages,
        options=GenerationOptions(max_draft_tokens=depth, sampling=SamplingParams(temperature=0.0), max_tokens=24),
        enable_thinking=False,
    )
    said, usage = "", None
    async for event in session.chat(request):
        if isinstance(event, Text):
            said += event.text
        elif isinstance(event, Finished):
            usage = event.usage
    assert usage is not None
    return said, usage


async def test_it_answers_questions_about_pictures_at_once_and_one_by_one(session: Session) -> None:
    asked = samples(10)
    answers = await asyncio.gather(*(say(session, question(sample)) for sample in asked))
    num_right = sum(said == sample.turns[1].text for (said, _), sample in zip(answers, asked, strict=True))
    assert num_right >= 9  # its card says 95 % or more, of pictures with the training's own edges
    for sample, (said, _) in list(zip(asked, answers, strict=True))[:3]:
        assert (await say(session, question(sample)))[0] == said


async def test_drafts_of_answers_about_pictures_are_mostly_right_and_change_nothing(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(self: DepthPlanner, rows: Sequence[DraftForecast]) -> tuple[int, ...]:
        return tuple(len(row.survival) for row in rows)

    monkeypatch.setattr(DepthPlanner, "plan", plan)
    monkeypatch.setattr(DepthPlanner, "is_due", lambda self, rows: True)
    num_drafted = num_accepted = 0
    for sample in samples(13)[10:]:
        drafted, usage = await say(session, question(sample), depth=3)
        assert drafted == (await say(session, question(sample), depth=0))[0]
        num_drafted += usage.num_drafted_tokens
        num_accepted += usage.num_accepted_tokens
    assert num_accepted > 0.5 * num_drafted > 0


async def test_the_same_words_about_another_picture_get_another_answer(session: Session) -> None:
    first, second = (
        next(each for each in samples(60) if len(each.drawings) == 1 and each.drawings[0].shapes[0].color == color)
        for color in ("red", "blue")
    )
    words = TextPart("Which colour has the shape?")
    red = ChatMessage("user", (picture(first.drawings[0], first.size), words))
    blue = ChatMessage("user", (picture(second.drawings[0], first.size), words))
    answers = [await say(session, message) for message in (red, blue, red)]
    assert answers[0][0] == answers[2][0] != answers[1][0]
    assert answers[2][1].num_cached_tokens > answers[1][1].num_cached_tokens


async def test_a_picture_is_not_looked_at_again_in_the_next_turn(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = VisionTower.begin
    looked_at: list[MediaInput] = []

    def counted(self: VisionTower, one: MediaInput) -> ChunkedEncoding[MediaEmbeddings]:
        looked_at.append(one)
        return begin(self, one)

    monkeypatch.setattr(VisionTower, "begin", counted)
    (sample,) = samples(31)[30:]
    asked = question(sample)
    said, _ = await say(session, asked)
    assert len(looked_at) == len(sample.drawings)
    _, usage = await say(
        session, asked, ChatMessage("assistant", (TextPart(said),)), ChatMessage("user", (TextPart("hello"),))
    )
    assert len(looked_at) == len(sample.drawings)
    assert usage.num_cached_tokens > 16


async def test_a_tower_that_fails_costs_its_request_and_nobody_elses(
    session: Session, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: VisionTower, one: MediaInput) -> ChunkedEncoding[MediaEmbeddings]:
        raise RuntimeError("blind")

    hello = ChatMessage("user", (TextPart("hello"),))
    expected, _ = await say(session, hello)
    with monkeypatch.context() as patch:
        patch.setattr(VisionTower, "begin", broken)
        sample = samples(41)[40]
        seen, greeted = await asyncio.gather(
            say(session, question(sample)), say(session, hello), return_exceptions=True
        )
    assert isinstance(seen, Exception)
    assert "vision tower" in str(seen)
    assert greeted[0] == expected
    assert "blind" in caplog.text
    assert await say(session, question(sample))
