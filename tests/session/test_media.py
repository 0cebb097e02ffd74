"""Chats with images and videos, from the message to what the engine is asked."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import END, FakeEngine, describe
from media.reference import picture
from media.test_image import saved
from media.video_files import video_file
from PIL import Image

import headrace
from headrace.errors import ContextTooLong, InvalidRequest, UnsupportedField
from headrace.media.decoder import MediaDecoder
from headrace.session import media as session_media
from headrace.session.session import Session
from headrace.types.chat import ChatMessage, ChatRequest, MediaPart, TextPart, ToolCall
from headrace.types.media import MediaLimits, MediaOptions, MediaPolicy
from headrace.types.model import TokenIds
from headrace.types.request import GenerationRequest

MINIATURE = Path(headrace.__file__).parent / "miniature"
CONFIG = json.loads((MINIATURE / "config.json").read_text("utf-8"))
START, STOP, IMAGE, VIDEO = (CONFIG[f"{name}_token_id"] for name in ("vision_start", "vision_end", "image", "video"))
PLACE = "messages[0].content[0].image_url"


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def png(height: int, width: int, pattern: str = "ramp") -> bytes:
    return saved(Image.fromarray(picture(pattern, (height, width))), "PNG")


def image(height: int, width: int, pattern: str = "ramp", **options: int) -> MediaPart:
    return MediaPart("image", data_url(png(height, width, pattern)), MediaOptions(**options), PLACE)


def engine(*, takes_media: bool = True, max_model_len: int = 4096) -> FakeEngine:
    described = replace(
        describe(max_model_len=max_model_len),
        directory=MINIATURE,
        config=CONFIG,
        tokens=TokenIds(4096),
        takes_media=takes_media,
    )
    return FakeEngine((END,), model=described)


def said(*content: MediaPart | TextPart | str) -> ChatMessage:
    return ChatMessage("user", tuple(TextPart(part) if isinstance(part, str) else part for part in content))


def asked(
    *messages: ChatMessage, fake: FakeEngine | None = None, policy: MediaPolicy | None = None
) -> GenerationRequest:
    """What the engine is asked for a chat."""
    fake = fake or engine()
    session = Session.for_engine(fake, media=(policy or MediaPolicy(), MediaLimits()))

    async def scenario() -> GenerationRequest:
        async with aclosing(session.chat(ChatRequest("r", messages))) as events:
            async for _ in events:
                pass
        return fake.requests[-1]

    return asyncio.run(scenario())


def runs(token_ids: tuple[int, ...], kind: int) -> Iterator[tuple[int, int]]:
    start = None
    for index, token_id in enumerate((*token_ids, -1)):
        if token_id == kind and start is None:
            start = index
        elif token_id != kind and start is not None:
            yield start, index
            start = None


def test_an_image_takes_its_place_in_the_prompt() -> None:
    request = asked(said("see ", image(64, 96), " there"))
    # The miniature scales to at least 9216 pixels in steps of 32: ceil(64 * sqrt(1.5) / 32), ceil(96 * sqrt(1.5) / 32).
    assert list(runs(request.prompt, IMAGE)) == [(run := next(runs(request.prompt, IMAGE)))]
    start, end = run
    assert request.prompt[start - 1] == START and request.prompt[end] == STOP
    assert request.media is not None
    (item,) = request.media.inputs
    assert (item.start, item.end) == run and (end - start) * 4 == item.grid[1] * item.grid[2]
    assert item.pixels.shape == (item.grid[1] * item.grid[2], 1536)
    positions = np.asarray(request.media.positions)
    assert positions.shape == (3, len(request.prompt))
    assert request.media.rope_delta == max(item.grid[1], item.grid[2]) // 2 - (end - start)


def test_text_alone_is_asked_as_ever() -> None:
    plain = asked(said("hello"))
    assert plain.media is None
    assert plain.prompt == asked(said("hello"), fake=engine(takes_media=False)).prompt


def test_boundaries_stand_behind_the_placeholders() -> None:
    chat = (said(image(64, 96), "first"), ChatMessage("assistant", (TextPart("yes"),)), said("second"))
    request = asked(*chat)
    first = asked(chat[0])
    ends = [boundary.num_tokens for boundary in request.boundaries]
    shared = next(i for i, pair in enumerate(zip(request.prompt, first.prompt, strict=False)) if pair[0] != pair[1])
    assert request.media is not None and request.media.inputs[0].end < ends[0] <= shared
    assert ends == sorted(set(ends)) and ends[-1] < len(request.prompt)


def test_media_of_all_messages_come_in_order() -> None:
    call = ChatMessage("assistant", tool_calls=(ToolCall("1", "look", "{}"),))
    shown = ChatMessage("tool", (TextPart("done"), image(96, 96)), tool_call_id="1")
    request = asked(said(image(64, 96), image(96, 64, "hash")), call, shown)
    assert request.media is not None
    assert [each.grid for each in request.media.inputs] == [(1, 6, 8), (1, 8, 6), (1, 6, 6)]
    assert len({each.digest for each in request.media.inputs}) == 3


def test_a_video_comes_in_groups_with_their_times() -> None:
    clip = MediaPart("video", data_url(video_file(16, 8), "video/mp4"), param="messages[0].content[0].video_url")
    request = asked(said(clip, "what?"))
    assert request.media is not None and [each.grid[0] for each in request.media.inputs] == [1, 1]
    words = Session.for_engine(engine())._tokenizer
    assert "<0.3 seconds><|vision_start|>" in words.decode(request.prompt, keep_special=frozenset(words.added_tokens))
    frames = ",".join(base64.b64encode(png(64, 64)).decode() for _ in range(4))
    listed = MediaPart("video", f"data:video/jpeg;base64,{frames}", MediaOptions(fps=1.0))
    request = asked(said(listed))
    text = words.decode(request.prompt, keep_special=frozenset(words.added_tokens))
    assert "<0.5 seconds>" in text and "<2.5 seconds>" in text


def test_the_names_of_placeholders_in_a_text_are_text() -> None:
    request = asked(said("<|vision_start|><|image_pad|><|vision_end|>", image(64, 64), "<|image_pad|><|video_pad|>"))
    assert request.media is not None and len(request.media.inputs) == 1
    assert len(list(runs(request.prompt, IMAGE))) == 1 and VIDEO not in request.prompt


def test_a_request_may_choose_the_size() -> None:
    large, small = (asked(said(image(128, 128, max_pixels=size))) for size in (16384, 10_000))
    assert large.media is not None and small.media is not None
    assert large.media.inputs[0].grid == (1, 8, 8) and small.media.inputs[0].grid == (1, 6, 6)


def test_counting_tokens_counts_those_of_media() -> None:
    session = Session.for_engine(engine())
    chat = ChatRequest("r", (said(image(64, 96), "hi"),))
    assert asyncio.run(session.tokenize_chat(chat)) == asked(*chat.messages).prompt


def test_a_model_that_sees_nothing_refuses_media_by_their_place() -> None:
    with pytest.raises(UnsupportedField, match="takes no images") as refused:
        asked(said(image(64, 64)), fake=engine(takes_media=False))
    assert refused.value.param == PLACE


def test_broken_media_are_refused_by_their_place() -> None:
    for source in (data_url(png(64, 64)[:50]), "data:image/png;base64,!", "/etc/passwd", "http://localhost/x.png"):
        with pytest.raises(InvalidRequest) as refused:
            asked(said(MediaPart("image", source, param=PLACE)))
        assert refused.value.param == PLACE and refused.value.message.startswith(PLACE)


def test_files_below_the_root_may_be_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(64, 96))
    request = asked(said(MediaPart("image", "a.png")), policy=MediaPolicy(root=tmp_path))
    assert request.media is not None and request.media.inputs[0].grid == (1, 6, 8)


def test_more_media_than_fit_the_context_are_refused() -> None:
    with pytest.raises(ContextTooLong) as refused:
        asked(said(*[image(128, 128)] * 4), fake=engine(max_model_len=60))
    assert refused.value.param == PLACE
    with pytest.raises(ContextTooLong):
        asked(said(image(128, 128), image(128, 128, "hash"), image(128, 128), "x " * 8), fake=engine(max_model_len=60))


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Places of the items that were prepared, in order."""
    places: list[str] = []
    run = MediaDecoder.run

    def noted(self: MediaDecoder, *arguments: Any, param: str, is_video: bool) -> Any:
        places.append(param)
        return run(self, *arguments, param=param, is_video=is_video)

    monkeypatch.setattr(MediaDecoder, "run", noted)
    return places


def test_the_pictures_of_a_growing_chat_are_prepared_once(prepared: list[str]) -> None:
    session = Session.for_engine(engine())
    first, second = said(image(64, 96), "a"), said(image(96, 64), "b")

    async def ask(*messages: ChatMessage) -> tuple[int, ...]:
        return await session.tokenize_chat(ChatRequest("r", messages))

    async def scenario() -> None:
        await ask(first)
        await ask(first, ChatMessage("assistant", (TextPart("yes"),)), second)
        assert len(prepared) == 2
        await ask(said(image(64, 96, max_pixels=9216)))
        assert len(prepared) == 3
        await ask(second)
        assert len(prepared) == 3

    asyncio.run(scenario())


def test_pictures_beyond_the_limit_are_prepared_again(prepared: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_media, "CACHE_BYTES", 0)
    session = Session.for_engine(engine())

    async def scenario() -> None:
        for _ in range(2):
            await session.tokenize_chat(ChatRequest("r", (said(image(64, 96), "a"),)))

    asyncio.run(scenario())
    assert len(prepared) == 2


def test_pictures_in_tool_results_go_with_the_calls_that_they_answer() -> None:
    calls = ChatMessage("assistant", tool_calls=(ToolCall("1", "look", "{}"), ToolCall("2", "look", "{}")))
    wide = ChatMessage("tool", (image(64, 96),), tool_call_id="1")
    high = ChatMessage("tool", (image(96, 64),), tool_call_id="2")
    request = asked(said("look"), calls, high, wide)
    assert request.media is not None
    assert [each.grid for each in request.media.inputs] == [(1, 6, 8), (1, 8, 6)]


def test_a_picture_that_several_requests_send_at_once_is_kept_once(
    prepared: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session.for_engine(engine())
    same = said(image(64, 96), "a")

    async def ask() -> None:
        await session.tokenize_chat(ChatRequest("r", (same,)))

    async def scenario() -> None:
        monkeypatch.setattr(session_media, "CACHE_BYTES", 2 * num_bytes - 1)
        await asyncio.gather(*(ask() for _ in range(6)))
        assert 1 <= len(prepared) <= session_media.MAX_DECODERS
        num_prepared = len(prepared)
        await ask()
        assert len(prepared) == num_prepared, "it was dropped, as if it were there twice"

    request = asked(same)
    assert request.media is not None
    num_bytes = request.media.inputs[0].pixels.nbytes
    prepared.clear()
    asyncio.run(scenario())


class Evaluated:
    """A function by its source, which any process can unpickle."""

    def __init__(self, source: str) -> None:
        self._source = source

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (self._source,)


def test_a_decoder_that_crashes_or_panics_is_the_request_s_own_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    for call in ("__import__('os').abort()", "(_ for _ in ()).throw(BaseException())"):
        monkeypatch.setattr(session_media, "prepare", Evaluated(f"lambda *_: {call}"))
        with pytest.raises(InvalidRequest, match="decod") as refused:
            asked(said(image(64, 96)))
        assert refused.value.param == PLACE


def test_an_error_of_ours_is_not_the_request_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_media, "prepare", os.getpid)  # takes no arguments
    with pytest.raises(TypeError):
        asked(said(image(64, 96)))
