"""What the flags about defaults and media become."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from fakes import ByteTokenizer, FakeEngine, PlainTemplate, describe, thinking_family

from headrace.api.openai_chat import read_chat_completion
from headrace.cli.configured import (
    configured_session,
    configured_text_pipeline,
    media_limits,
    media_policy,
    server_defaults,
)
from headrace.config_loading import load_config
from headrace.errors import ConfigError
from headrace.models.built_in import MINIATURE
from headrace.session.session import Session
from headrace.types.chat import ChatMessage, ChatRequest, TextPart
from headrace.types.media import MediaLimits, MediaPolicy
from headrace.types.request import GenerationRequest

FLAGS = (
    *("--default-temperature", "0.3", "--default-top-p", "0.9", "--default-top-k", "7", "--default-min-p", "0.05"),
    *("--default-repetition-penalty", "1.1", "--default-max-tokens", "12"),
)
MODEL = describe(generation_config={"temperature": 0.6, "top_k": 20, "presence_penalty": 0.5})


def submitted(flags: Sequence[str], **fields: Any) -> GenerationRequest:
    """What the engine gets of a request with these fields to a server with these flags."""
    engine = FakeEngine("x", model=MODEL)
    defaults = server_defaults(load_config(flags, {}).defaults)
    session = Session(engine, ByteTokenizer(), PlainTemplate(), thinking_family(), defaults=defaults)

    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()
    call = read_chat_completion(body, session.traits)

    async def drain() -> None:
        async for _ in session.chat(call.request):
            pass

    asyncio.run(drain())
    return engine.requests[0]


def test_each_flag_is_the_default_of_its_field() -> None:
    got = submitted(FLAGS)
    assert (got.sampling.temperature, got.sampling.top_p, got.sampling.top_k) == (0.3, 0.9, 7)
    assert (got.sampling.min_p, got.sampling.repetition_penalty, got.max_tokens) == (0.05, 1.1, 12)
    assert got.sampling.presence_penalty == 0.5


def test_a_request_wins_over_every_flag() -> None:
    fields = {"temperature": 1.5, "top_p": 0.5, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    got = submitted(FLAGS, **fields, max_tokens=900)
    assert (got.sampling.temperature, got.sampling.top_p, got.sampling.top_k) == (1.5, 0.5, -1)
    assert (got.sampling.min_p, got.sampling.repetition_penalty, got.max_tokens) == (0.0, 1.0, 900)


def test_without_flags_the_models_values_hold_and_the_context_is_the_limit() -> None:
    got = submitted(())
    assert (got.sampling.temperature, got.sampling.top_p, got.sampling.top_k) == (0.6, 1.0, 20)
    assert got.max_tokens == MODEL.max_model_len - len(got.prompt)


def test_a_limit_over_what_the_context_leaves_is_cut_to_it() -> None:
    got = submitted(("--default-max-tokens", "5000"))
    assert got.max_tokens == MODEL.max_model_len - len(got.prompt)


def test_the_flag_for_system_notes_reaches_the_template() -> None:
    said = [("user", "question"), ("system", "late note"), ("user", "again")]
    chat = ChatRequest("r", tuple(ChatMessage(role, (TextPart(text),)) for role, text in said))
    for flags, comes_first in (((), "question"), (("--system-notes", "hoist"), "late note")):
        text = configured_text_pipeline(load_config(flags, {})).template.render(chat).text
        assert min(("question", "late note"), key=text.index) == comes_first


def test_by_default_nothing_outside_of_the_request_is_read() -> None:
    config = load_config([], {}).media
    assert media_policy(config) == MediaPolicy(hosts=(), root=None)
    assert media_limits(config) == MediaLimits()


def test_flags_reach_the_policy_and_the_limits(tmp_path: Path) -> None:
    flags = ["--media-hosts", "a.example", "--media-hosts", "*.b.example", "--media-root", str(tmp_path)]
    flags += ["--media-max-bytes", "9", "--media-timeout-s", "2", "--image-max-pixels", "8", "--video-fps", "0.5"]
    flags += ["--video-max-frames", "7", "--video-max-s", "6"]
    config = load_config(flags, {}).media
    assert media_policy(config) == MediaPolicy(("a.example", "*.b.example"), tmp_path, 9, 2.0)
    assert media_limits(config) == MediaLimits(image_pixels=8, video_s=6.0, sampled_frames=7, fps=0.5)


def test_a_media_folder_that_is_none_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--media-root"):
        media_policy(load_config(["--media-root", str(tmp_path / "none")], {}).media)


@pytest.mark.parametrize(
    ("flags", "template", "warns"),
    [
        ((), "{{ tools | tojson }}{{ '>>>' + messages[0].content }}", True),
        (("--tool-format", "llama_json"), "{{ tools | tojson }}{{ '>>>' + messages[0].content }}", False),
        ((), "{{ tools | tojson }}{{ '<tool_call>' + messages[0].content }}", False),
        ((), "{{ messages[0].content }}", False),
    ],
)
def test_a_template_with_calls_in_an_unknown_syntax_is_named_at_the_start(
    flags: Sequence[str], template: str, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "odd-model"
    shutil.copytree(MINIATURE, folder, ignore=shutil.ignore_patterns("draft"))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    config = load_config((str(folder), *flags), {})
    model = describe("odd-model")
    configured_session(config, cast(Any, FakeEngine("x", model=model)), configured_text_pipeline(config))
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [("odd-model" in text, "plain text" in text) for text in said] == ([(True, True)] if warns else [])
