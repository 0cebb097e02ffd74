"""Chats with Gemma 3 about pictures and videos, from the message to what the engine is asked."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes import END, FakeEngine, describe
from media.video_files import video_file
from models.tiny_gemma3 import CONFIG
from session.test_media import MINIATURE, data_url, png

from headrace.errors import ContextTooLong, InvalidRequest
from headrace.media import prepare
from headrace.media.profile import read_profile
from headrace.session.session import Session
from headrace.types.chat import ChatMessage, ChatRequest, MediaPart, TextPart
from headrace.types.media import Bidirectional, MediaLimits, MediaOptions, MediaPolicy
from headrace.types.model import TokenIds
from headrace.types.request import GenerationRequest

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<start_of_image>{% elif part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled tokenizer with Gemma's tokens, and a template that writes what Gemma's does for a picture."""
    folder = tmp_path_factory.mktemp("gemma3")
    tokenizer = json.loads((MINIATURE / "tokenizer.json").read_text("utf-8"))
    first = 1 + max(each["id"] for each in tokenizer["added_tokens"])
    first = max(first, len(tokenizer["model"]["vocab"]))
    for offset, text in enumerate(("<start_of_image>", "<end_of_image>", "<image_soft_token>")):
        tokenizer["added_tokens"].append(
            {
                "id": first + offset,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        )
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    for name in ("tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((MINIATURE / name).read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    config = {
        **CONFIG,
        "boi_token_index": first,
        "eoi_token_index": first + 1,
        "image_token_index": first + 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def session_of(folder: Path, max_model_len: int = 4096) -> tuple[Session, FakeEngine]:
    config = json.loads((folder / "config.json").read_text())
    described = replace(
        describe(max_model_len=max_model_len),
        directory=folder,
        config=config,
        tokens=TokenIds(4200),
        takes_media=True,
        model_type="gemma3",
    )
    fake = FakeEngine((END,), model=described)
    return Session.for_engine(fake, media=(MediaPolicy(), MediaLimits())), fake


def asked(folder: Path, *content: MediaPart | str) -> tuple[GenerationRequest, Session]:
    session, fake = session_of(folder)
    parts = tuple(TextPart(part) if isinstance(part, str) else part for part in content)

    async def scenario() -> GenerationRequest:
        async with aclosing(session.chat(ChatRequest("r", (ChatMessage("user", parts),)))) as events:
            async for _ in events:
                pass
        return fake.requests[-1]

    return asyncio.run(scenario()), session


def spelled(session: Session, token_ids: Sequence[int]) -> str:
    return asyncio.run(session.detokenize(tuple(token_ids)))


IMAGE = MediaPart("image", data_url(png(40, 60)), MediaOptions(), "messages[0].content[1].image_url")


def test_a_picture_stands_between_its_tokens_and_blank_lines_as_the_processor_writes_it(folder: Path) -> None:
    request, session = asked(folder, "What is this?", IMAGE, "Say.")
    pictures = "<start_of_image>" + "<image_soft_token>" * 16 + "<end_of_image>"
    text = spelled(session, request.prompt)
    assert f"user\nWhat is this?\n\n{pictures}\n\nSay.<|im_end|>" in text
    # as one text to the tokenizer, so that newlines join as they do in the processor's
    plain = asyncio.run(session.tokenize(text, adds_special_tokens=False))
    assert request.prompt == plain
    assert (
        request.media is not None
        and request.media.bidirectional is Bidirectional.EVERYWHERE
        and request.media.positions is None
    )
    (one,) = request.media.inputs
    config = json.loads((folder / "config.json").read_text())
    assert set(request.prompt[one.start : one.end]) == {config["image_token_index"]} and one.end - one.start == 16
    assert (one.grid, one.pixels.shape) == ((1, 8, 8), (64, 48))


def test_a_picture_s_mark_that_somebody_types_stays_text(folder: Path) -> None:
    request, session = asked(folder, "a <start_of_image> b", IMAGE)
    text = spelled(session, request.prompt)
    assert "a <start_of_image> b\n\n<start_of_image><image_soft_token>" in text
    assert request.media is not None and len(request.media.inputs) == 1


def test_a_video_is_shown_as_its_frames_and_the_log_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    frames = [np.full((48, 64, 3), 40 * number, np.uint8) for number in range(6)]
    clip = MediaPart("video", data_url(video_file(6, 2, (48, 64), pictures=frames), "video/mp4"), MediaOptions())
    with caplog.at_level(logging.INFO, "headrace.session"):
        request, session = asked(folder, IMAGE, "and", clip, "?")
    # three seconds at one frame a second
    assert request.media is not None and len(request.media.inputs) == 1 + 3
    assert "knows no videos, it is shown [3] frames as images" in caplog.text
    levels = [float(np.asarray(one.pixels).mean()) for one in request.media.inputs[1:]]
    assert levels == sorted(levels) and levels[0] < 5 and levels[-1] > 190
    assert spelled(session, request.prompt).count("<image_soft_token>") == 4 * 16


def test_a_video_of_pictures_is_shown_as_these(folder: Path) -> None:
    source = "data:video/jpeg;base64," + ",".join([data_url(png(20, 20)).partition(",")[2]] * 3)
    request, _ = asked(folder, MediaPart("video", source, MediaOptions()), "?")
    assert request.media is not None and len(request.media.inputs) == 3


def test_frames_that_don_t_fit_the_context_are_counted_before_they_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = [np.full((48, 64, 3), number, np.uint8) for number in range(200)]
    options = MediaOptions(num_frames=200)
    clip = video_file(200, 10, (48, 64), pictures=frames)
    profile = read_profile(folder, json.loads((folder / "config.json").read_text()))
    assert profile is not None
    monkeypatch.setattr(prepare, "read_frames", lambda *arguments: pytest.fail("the frames were read"))
    item = prepare.MediaFiles("video", (clip,), False, options, "there")
    with pytest.raises(ContextTooLong, match="3200"):
        prepare.prepare(item, profile.vision, MediaLimits(tokens=3000))
    part = MediaPart("video", data_url(clip, "video/mp4"), options, "there")
    session, _ = session_of(folder, max_model_len=3000)
    with pytest.raises(ContextTooLong, match="3200"):
        asyncio.run(session.tokenize_chat(ChatRequest("r", (ChatMessage("user", (part,)),))))


def test_a_video_that_is_none_is_named(folder: Path) -> None:
    broken = MediaPart("video", data_url(b"no video", "video/mp4"), MediaOptions(), "messages[0].content[0].video_url")
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.content\[0\]\.video_url"):
        asked(folder, broken, "?")
