"""What the chat's commands change, and the chat with a server."""

from __future__ import annotations

import asyncio
import base64
import json
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from fakes import END, FakeEngine, PlainTemplate, describe, fake_session
from loopback import serving
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from headrace.cli.chat_remote import RemoteChat
from headrace.cli.chat_state import COMMANDS, ChatCommands, ChatState
from headrace.config import ServerConfig
from headrace.errors import ConfigError, GenerationFailed
from headrace.session.model_entry import ModelEntry, ModelSource
from headrace.session.models import Models
from headrace.session.session import Session
from headrace.types.chat import ChatMessage, MediaPart, TextPart
from headrace.types.events import Event, Finished, Reasoning, Text
from headrace.types.model import ModelOutline


def run(state: ChatState, *lines: str) -> list[str]:
    said: list[str] = []
    commands = ChatCommands(state, said.append)
    assert all(commands.run(line) for line in lines)
    return said


def test_help_names_every_command() -> None:
    said = "\n".join(run(ChatState(), "/help"))
    assert all(usage in said for usage in COMMANDS)


def test_an_unknown_command_is_told_apart_from_the_advice() -> None:
    assert run(ChatState(), "/xyzzy") == ["there is no command /xyzzy; /help lists them"]


def test_settings_go_into_the_request_and_back_to_the_models() -> None:
    state = ChatState()
    run(state, "/set temperature 0.5", "/set top_k 3", "/set max_tokens 7", "/set thinking off", "/system Be brief.")
    request = state.request("id", "hi")
    assert state.settings == {"temperature": 0.5, "top_k": 3, "max_tokens": 7}
    assert request.enable_thinking is False
    assert request.messages == (
        ChatMessage("system", (TextPart("Be brief."),)),
        ChatMessage("user", (TextPart("hi"),)),
    )
    run(state, "/set temperature default", "/set thinking default", "/system")
    request = state.request("id", "hi")
    assert "temperature" not in state.settings
    assert request.enable_thinking is None
    assert len(request.messages) == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/set heat 1", "no setting 'heat'"),
        ("/set temperature warm", "temperature can't be 'warm'"),
        ("/set thinking maybe", "thinking can't be 'maybe'"),
        ("/set temperature", "usage: /set NAME VALUE"),
        ("/image", "usage: /image FILE"),
        ("/image 'half", "No closing quotation"),
        ("/image /no/such/file", "can't be read"),
        ("/load /no/such/file", "can't be read"),
        ("/save /no/such/folder/file", "can't be written"),
        ("/sav x", "did you mean /save?"),
    ],
)
def test_a_mistake_is_told_and_changes_nothing(line: str, said: str) -> None:
    state = ChatState()
    assert said in run(state, line)[0]
    assert state == ChatState()


def test_an_image_goes_with_the_next_question_only(tmp_path: Path) -> None:
    (tmp_path / "a picture.png").write_bytes(b"pixels")
    state = ChatState()
    run(state, f"/image '{tmp_path / 'a picture.png'}'")
    first = state.request("id", "what is it?")
    expected = MediaPart("image", f"data:image/png;base64,{base64.b64encode(b'pixels').decode()}")
    assert first.messages[-1].content == (expected, TextPart("what is it?"))
    state.keep(first, ChatMessage("assistant", (TextPart("a dot"),)))
    second = state.request("id", "sure?")
    assert second.messages[0].content[0] == expected
    assert second.messages[-1].content == (TextPart("sure?"),)


def test_a_saved_conversation_is_loaded_as_it_was(tmp_path: Path) -> None:
    state = ChatState(system="Be brief.")
    state.messages = [
        ChatMessage("user", (MediaPart("video", "data:video/mp4;base64,AAAA"), TextPart("ß?"))),
        ChatMessage("assistant", (TextPart("yes"),), reasoning="hm"),
    ]
    run(state, f"/save {tmp_path / 'file'}")
    loaded = ChatState()
    assert run(loaded, f"/load {tmp_path / 'file'}") == ["2 messages loaded"]
    assert (loaded.system, loaded.messages) == (state.system, state.messages)


@pytest.mark.parametrize("text", ["", "{", "[1]", '[{"role": "root", "content": "x"}]', '[{"role": "user"}]'])
def test_what_is_no_conversation_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    state = ChatState(system="stays")
    assert "no saved conversation" in run(state, f"/load {tmp_path / 'file'}")[0]
    assert state.system == "stays"


def remote(engine: FakeEngine, key: str | None = None, *, lines: tuple[str, ...] = ()) -> tuple[list[Event], str]:
    """The events of one question to our own server, which speaks that API."""

    async def scenario() -> tuple[list[Event], str]:
        async with serving(fake_session(engine, PlainTemplate()), ServerConfig(api_key="k" if key else None)) as url:
            chat = RemoteChat(f"{url}/v1", None, key)
            state = ChatState()
            run(state, *lines)
            try:
                name = await chat.prepare()
                return [event async for event in chat.chat(state.request("id", "hi"), state.settings)], name
            finally:
                await chat.aclose()

    return asyncio.run(scenario())


def test_a_server_answers_like_a_model_of_this_process() -> None:
    engine = FakeEngine("<think>hm</think>", "yes", (END,))
    events, name = remote(engine, "k", lines=("/set temperature 0.5", "/set seed 3"))
    assert name == "fake-model"
    assert "".join(event.text for event in events if isinstance(event, Reasoning)) == "hm"
    assert "".join(event.text for event in events if isinstance(event, Text)) == "yes"
    end = events[-1]
    assert isinstance(end, Finished)
    assert (end.reason, end.usage.num_output_tokens) == ("stop", len("<think>hm</think>yes") + 1)
    assert (engine.requests[0].sampling.temperature, engine.requests[0].sampling.seed) == (0.5, 3)


def test_a_refusal_of_the_server_is_told_in_its_words() -> None:
    with pytest.raises(GenerationFailed, match="temperature"):
        remote(FakeEngine("a"), lines=("/set temperature 9",))
    with pytest.raises(ConfigError, match="refuses this key: give it with --url-key KEY"):
        remote(FakeEngine("a"), "wrong")


def test_where_nothing_listens_the_address_is_told() -> None:
    async def scenario() -> None:
        await RemoteChat("http://127.0.0.1:9", None, None).prepare()

    with pytest.raises(ConfigError, match="nothing answers at http://127.0.0.1:9"):
        asyncio.run(scenario())


def test_a_saved_file_is_json_of_the_chat_api(tmp_path: Path) -> None:
    state = ChatState()
    state.keep(state.request("id", "q"), ChatMessage("assistant", (TextPart("a"),)))
    state.save(str(tmp_path / "file"))
    assert json.loads((tmp_path / "file").read_text()) == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ]


def answering(name: str, abilities: tuple[str, ...] = ()) -> ModelEntry:
    def load(_: object) -> Session:
        return fake_session(FakeEngine(f"I am {name}", (END,), model=describe(name)), PlainTemplate())

    return ModelEntry((name,), ModelSource(name, lambda: 0, load, lambda: ModelOutline(abilities=abilities)))


def prepared(name: str, *, takes_any_name: bool = False) -> str:
    """The model that a chat begins with that was asked for this one."""
    entry = answering("one")
    entry.source = replace(entry.source, spec="org/first")
    models = Models([answering("vectors", ("embedding",)), entry], 10_000, takes_any_name=takes_any_name)

    async def scenario() -> str:
        async with serving(models) as url, aclosing(RemoteChat(url, name, None)) as chat:
            return await chat.prepare()

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("name", "message"), [("org/no", r"`org/no` does not exist; served: vectors, one$"), ("vectors", r"do: one$")]
)
def test_a_model_that_the_server_has_not_for_chats_is_refused_at_the_start(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepared(name)


def test_a_name_that_the_server_knows_and_does_not_list_is_taken() -> None:
    assert prepared("org/first") == "org/first"
    assert prepared("org/no", takes_any_name=True) == "org/no"


def test_another_server_is_asked_for_a_name_that_it_does_not_list() -> None:
    """Some take names that they don't list."""
    listed = {"object": "list", "data": [{"id": "listed"}]}
    app = Starlette(routes=[Route("/v1/models", lambda request: JSONResponse(listed))])

    async def scenario() -> str:
        async with aclosing(RemoteChat("http://server", "other", None)) as chat:
            chat._http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")
            return await chat.prepare()

    assert asyncio.run(scenario()) == "other"


def test_one_of_a_servers_models_is_chosen() -> None:
    models = Models([answering("vectors", ("embedding",)), answering("one"), answering("two")], 10_000)

    async def scenario() -> list[str]:
        said = []
        async with serving(models) as url:
            chat = RemoteChat(url, None, None)
            assert await chat.prepare() == "one"
            state = ChatState(models=chat.models)
            assert run(state, "/model") == ["one, two"]
            assert run(state, "/model tow") == ["there is no model 'tow'; did you mean two?; served: one, two"]
            for line in ("", "/model two", "/model one"):
                run(state, *([line] if line else ()))
                answer = chat.chat(state.request("id", "hi"), state.settings)
                said.append("".join([event.text async for event in answer if isinstance(event, Text)]))
            await chat.aclose()
        return said

    assert asyncio.run(scenario()) == ["I am one", "I am two", "I am one"]
    assert "only a server has several" in run(ChatState(), "/model two")[0]
