"""Adapters as models with separate names, through OpenAI's client and a real server with the bundled model."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from fakes import FakeEngine, app_over, fake_session
from loopback import served
from mlx_lm.utils import load_model
from models.adapter_folders import write_mlx_lm
from prometheus_client.parser import text_string_to_metric_families

import headrace
from headrace.config import Config, EngineConfig, ModelConfig, ServerConfig
from headrace.engine.engine import Engine
from headrace.session.model_entry import ModelEntry, ModelSource
from headrace.session.models import Models
from headrace.session.session import Session
from headrace.session.text_pipeline import load_text_pipeline
from headrace.types.memory import MemoryShare
from headrace.types.model import ModelOutline

MINIATURE = Path(headrace.__file__).parent / "miniature"
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
NUM_ADAPTERS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With adapters that visibly change the answers, and broken ones."""
    root = tmp_path_factory.mktemp("adapters")
    for number in range(NUM_ADAPTERS):
        model, _ = load_model(MINIATURE)
        write_mlx_lm(model, root / str(number), number, rank=2 + number, dora=number == 1, size=0.15)
    (root / "empty").mkdir()
    shutil.copytree(root / "0", root / "other_rank")
    config = json.loads((root / "0" / "adapter_config.json").read_text())
    config["lora_parameters"]["rank"] = 9
    (root / "other_rank" / "adapter_config.json").write_text(json.dumps(config))
    return root


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """A server with adapter 0 under the name `poet`, which takes others of the folder."""
    words = load_text_pipeline(MINIATURE, "qwen3_5")
    models = ModelConfig(adapter=(f"poet={folder / '0'}",), self_check=False)
    engine = Engine.launch(Config("miniature", models, EngineConfig(max_num_seqs=8)), words.constraints)
    with served(Session.for_engine(engine, words), ServerConfig(adapter_dir=str(folder))) as base:
        yield base
    engine.stop()


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, model: str) -> str:
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=6)
    assert answer.model == model
    return answer.choices[0].message.model_dump_json(include={"content", "reasoning_content"})


def load(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/load_lora_adapter", json=body)


def unload(url: str, name: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": name})


def param_of(response: httpx.Response, status: int) -> str:
    assert response.status_code == status
    param: str = response.json()["error"]["param"]
    return param


def test_a_client_chooses_the_adapter_by_the_model(client: openai.OpenAI, url: str) -> None:
    base = client.models.list().data[0].id
    assert ask(client, "poet") != ask(client, base)
    listed = {each.id: each.model_extra for each in client.models.list()}
    assert {name: (extra or {})["parent"] for name, extra in listed.items()} == {base: None, "poet": base}
    assert client.models.retrieve("poet").id == "poet"
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as other:
        message = other.messages.create(model="poet", messages=QUESTION, max_tokens=4)
    assert message.model == "poet"
    completion = client.completions.create(model="poet", prompt="The capital", max_tokens=4, temperature=0)
    assert completion.choices[0].text != (
        client.completions.create(model=base, prompt="The capital", max_tokens=4, temperature=0).choices[0].text
    )
    response = client.responses.create(model="poet", input="hello", max_output_tokens=4)
    assert response.model == "poet"


def test_adapters_come_and_go(client: openai.OpenAI, url: str) -> None:
    added = load(url, lora_name="judge", lora_path="1")
    assert (added.status_code, added.text) == (200, "Success: LoRA adapter 'judge' added successfully.")
    poet, judge = ask(client, "poet"), ask(client, "judge")
    assert poet != judge
    assert param_of(load(url, lora_name="judge", lora_path="0"), 400) == "lora_name"
    assert ask(client, "judge") == judge
    assert load(url, lora_name="judge", lora_path="0", load_inplace=True).status_code == 200
    assert ask(client, "judge") == poet, "of the same numbers"
    removed = unload(url, "judge")
    assert (removed.status_code, removed.text) == (200, "Success: LoRA adapter 'judge' removed successfully.")
    assert ask(client, "poet") == poet, "which shares the numbers of the one that is gone"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("judge")
    assert param_of(unload(url, "judge"), 404) == "lora_name"


def test_metrics_name_the_adapters_that_have_requests(client: openai.OpenAI, url: str) -> None:
    def adapters() -> dict[str, str]:
        page = httpx.get(f"{url}/metrics").text
        families = {family.name: family for family in text_string_to_metric_families(page)}
        (sample,) = families["vllm:lora_requests_info"].samples
        return {name: text for name, text in sample.labels.items() if "lora" in name}

    assert adapters() == {"running_lora_adapters": "", "waiting_lora_adapters": "", "max_lora": "1"}
    asked: dict[str, Any] = {"messages": QUESTION, "max_tokens": 4000, "extra_body": {"min_tokens": 4000}}
    with client.chat.completions.create(model="poet", stream=True, **asked) as stream:
        next(stream)
        assert adapters()["running_lora_adapters"] == "poet"
    with client.chat.completions.create(model="headrace-miniature", stream=True, **asked) as stream:
        next(stream)
        assert adapters()["running_lora_adapters"] == ""


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_path": "0"}, "lora_name"),
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": "", "lora_path": "0"}, "lora_name"),
        ({"lora_name": "x", "lora_path": 1}, "lora_path"),
        ({"lora_name": "x", "lora_path": "nowhere"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "empty"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "other_rank"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "../0"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "/etc"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "a\0b"}, "lora_path"),
        ({"lora_name": "headrace-miniature", "lora_path": "0"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "0", "model": "poet"}, "model"),
        ({"lora_name": "x", "lora_path": "0", "load_inplace": "yes"}, "load_inplace"),
    ],
)
def test_a_wrong_load_changes_nothing(client: openai.OpenAI, url: str, body: dict[str, Any], param: str) -> None:
    before = [each.id for each in client.models.list()]
    response = load(url, **body)
    assert param_of(response, 400) == param
    assert [each.id for each in client.models.list()] == before


def test_the_routes_need_a_folder(folder: Path) -> None:
    async def exchange() -> tuple[int, int]:
        transport = httpx.ASGITransport(app_over(fake_session(FakeEngine("hi")), ServerConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            loading = await client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": str(folder)})
            unloading = await client.post("/v1/unload_lora_adapter", json={"lora_name": "a"})
        assert "--adapter-dir" in loading.json()["error"]["message"]
        return loading.status_code, unloading.status_code

    assert asyncio.run(exchange()) == (404, 404)


def test_an_adapter_of_a_sleeping_model_goes_without_a_load(folder: Path) -> None:
    words = load_text_pipeline(MINIATURE, "qwen3_5")
    config = ModelConfig(adapter=(f"poet={folder / '0'}", f"judge={folder / '1'}"), self_check=False)
    engines: list[Engine] = []

    def load_session(share: MemoryShare | None) -> Session:
        engines.append(Engine.launch(Config("miniature", config, EngineConfig(max_num_seqs=2)), words.constraints))
        return Session.for_engine(engines[-1], words)

    source = ModelSource("miniature", lambda: 0, load_session, ModelOutline, ("poet", "judge"))
    models = Models([ModelEntry(("miniature",), source)])

    def names() -> set[str]:
        return {each["id"] for each in httpx.get(f"{url}/v1/models").json()["data"]}

    with served(models, ServerConfig(adapter_dir=str(folder))) as url:
        assert unload(url, "poet").status_code == 200
        assert param_of(unload(url, "poet"), 404) == "lora_name"
        assert (names(), engines) == ({"miniature", "judge"}, [])
        assert httpx.post(f"{url}/v1/models/miniature/load", timeout=60).status_code == 200
        assert names() == {"miniature", "judge"}
        assert load(url, lora_name="critic", lora_path="0").status_code == 200
        assert httpx.post(f"{url}/v1/models/miniature/unload").status_code == 200
        assert unload(url, "judge").status_code == 200
        assert (names(), len(engines)) == ({"miniature", "critic"}, 1)
        assert httpx.post(f"{url}/v1/models/miniature/load", timeout=60).status_code == 200
        assert names() == {"miniature", "critic"}
    engines[-1].stop()
