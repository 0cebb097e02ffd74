"""The bundled model describes pictures and clips that come over HTTP."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from loopback import serving
from media.video_files import video_file
from PIL import Image, ImageDraw

from headrace.config import Config, EngineConfig
from headrace.engine.engine import Engine
from headrace.models.built_in import MINIATURE
from headrace.session.session import Session
from headrace.session.text_pipeline import load_text_pipeline
from headrace.types.media import MediaLimits, MediaPolicy

pytestmark = pytest.mark.slow

RED, BLUE = (220, 30, 30), (40, 80, 220)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    constraints = load_text_pipeline(MINIATURE, "qwen3_5").constraints
    engine = Engine.launch(Config("miniature", engine=EngineConfig(max_num_seqs=8)), constraints)
    yield engine
    engine.stop()


def circle(colour: tuple[int, int, int], x: float = 0.5, y: float = 0.5) -> bytes:
    image = Image.new("RGB", (128, 128), (250, 250, 250))
    left, top = x * 128 - 20, y * 128 - 20
    ImageDraw.Draw(image).ellipse((left, top, left + 40, top + 40), fill=colour)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def part(data: bytes, kind: str = "image", media_type: str = "image/png") -> dict[str, Any]:
    return {
        "type": f"{kind}_url",
        f"{kind}_url": {"url": f"data:{media_type};base64,{base64.b64encode(data).decode()}"},
    }


def answers(
    engine: Engine, *contents: list[Any], policy: MediaPolicy | None = None, **fields: Any
) -> list[dict[str, Any]]:
    """Answers to questions that are asked at the same time. fields: of all requests."""
    session = Session.for_engine(engine, media=(policy or MediaPolicy(), MediaLimits()))

    async def scenario() -> list[dict[str, Any]]:
        async with serving(session) as url, httpx.AsyncClient(base_url=url, timeout=120) as client:

            async def ask(content: list[Any]) -> dict[str, Any]:
                body = {
                    "messages": [{"role": "user", "content": content}],
                    "temperature": 0,
                    "max_tokens": 40,
                    "enable_thinking": False,
                    **fields,
                }
                return dict((await client.post("/v1/chat/completions", json=body)).json())

            return list(await asyncio.gather(*(ask(content) for content in contents)))

    return asyncio.run(scenario())


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def question(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def test_what_is_in_a_picture_is_seen_and_several_at_once_are_kept_apart(engine: Engine) -> None:
    pictures = [circle(RED), circle(BLUE), circle(BLUE, 1 / 6, 1 / 6)]
    told = answers(engine, *([part(each), question("What is in the picture?")] for each in pictures))
    red, blue, corner = map(text, told)
    assert "red circle" in red and "in the middle" in red
    assert "blue circle" in blue and "in the middle" in blue
    assert "blue circle" in corner and "at the top left" in corner
    assert {each["usage"]["prompt_tokens_details"]["route"] for each in told} == {"media"}
    # 128 x 128 pixels are 4 x 4 tokens.
    (plain,) = answers(engine, [question("What is in the picture?")])
    assert plain["usage"]["prompt_tokens_details"]["route"] == "text"
    assert told[0]["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] + 16 + 2


def test_the_same_question_about_another_picture_gets_another_answer(engine: Engine) -> None:
    for colour, name in ((RED, "red"), (BLUE, "blue"), (RED, "red")):
        (told,) = answers(engine, [part(circle(colour)), question("What is this?")])
        assert name in text(told)


def test_what_goes_with_text_goes_with_pictures(engine: Engine) -> None:
    colours = {"enum": ["green", "red", "blue"]}
    schema = {
        "type": "object",
        "properties": {"colour": colours},
        "required": ["colour"],
        "additionalProperties": False,
    }
    asked = [[part(circle(colour)), question("Which colour has the shape?")] for colour in (RED, BLUE)]
    fields: dict[str, Any] = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "seen", "schema": schema}},
        "logprobs": True,
        "top_logprobs": 2,
        "n": 2,
    }
    alone = [answers(engine, one, **fields)[0] for one in asked]
    beside = answers(engine, *asked, **fields)
    for one, other in zip(alone, beside, strict=True):
        assert [choice["message"] for choice in one["choices"]] == [choice["message"] for choice in other["choices"]]
        for choice in one["choices"]:
            seen = json.loads(choice["message"]["content"])
            assert seen.keys() == {"colour"} and seen["colour"] in colours["enum"]
            found = choice["logprobs"]["content"]
            assert found and all(len(token["top_logprobs"]) == 2 for token in found)
        assert one["usage"]["prompt_tokens_details"]["route"] == "media"


def test_a_clip_is_looked_at(engine: Engine) -> None:
    frames = [Image.open(io.BytesIO(circle(BLUE, x))) for x in (0.2, 0.35, 0.5, 0.65, 0.8, 0.8, 0.8, 0.8)]
    data = video_file(8, 4, (128, 128), pictures=[np.asarray(frame.convert("RGB")) for frame in frames])
    (told,) = answers(engine, [part(data, "video", "video/mp4"), question("What happens in the clip?")])
    assert "blue circle" in text(told)


def test_a_picture_that_can_t_be_read_is_named_by_its_place(engine: Engine) -> None:
    broken, remote = answers(
        engine,
        [question("What is this?"), part(circle(RED)[:60])],
        [{"type": "image_url", "image_url": "http://127.0.0.1/x.png"}],
    )
    assert broken["error"]["param"] == "messages[0].content[1].image_url"
    assert remote["error"]["param"] == "messages[0].content[0].image_url"
    assert {broken["error"]["type"], remote["error"]["type"]} == {"invalid_request_error"}


def test_a_file_in_the_media_folder_may_be_named(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(circle(RED))
    (told,) = answers(
        engine,
        [{"type": "image_url", "image_url": {"url": "red.png"}}, question("What is this?")],
        policy=MediaPolicy(root=tmp_path),
    )
    assert "red circle" in text(told)
