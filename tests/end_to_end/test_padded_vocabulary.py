"""Rows of the weights that no token has take no part in anything: the answers are those of the model without them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import httpx
import pytest
from loopback import serving
from models import padded
from tokenizers import Tokenizer

from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.models.built_in import MINIATURE
from headrace.session.session import Session
from headrace.session.text_pipeline import TextPipeline, load_text_pipeline
from headrace.speculate.depth import DepthPlanner, DraftForecast
from headrace.types.events import TokenOutput
from headrace.types.request import GREEDY, ConstraintSpec, GenerationRequest
from training.chat import encode
from training.jobs import copying, recall

pytestmark = pytest.mark.anyio

WARM = replace(GREEDY, temperature=1.0)
END = 4072
ANY_LETTERS = ConstraintSpec('{"grammars": [{"lark_grammar": "start: /[a-z ]{1,60}/"}]}')
Outputs = dict[str, list[TokenOutput]]


@pytest.fixture(scope="module", autouse=True)
def _as_deep_as_asked() -> Iterator[None]:
    """The number of drafts follows from the request, not from the clock."""

    def plan(self: DepthPlanner, rows: Sequence[DraftForecast]) -> tuple[int, ...]:
        return tuple(len(row.survival) for row in rows)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DepthPlanner, "plan", plan)
        patched.setattr(DepthPlanner, "is_due", lambda self, rows: True)
        yield


@cache
def words() -> TextPipeline:
    return load_text_pipeline(MINIATURE, "qwen3_5")


def launch(model: str) -> Engine:
    knobs = ModelConfig(numerics="exact", self_check=False)
    return Engine.launch(Config(model, knobs, EngineConfig(prefill_chunk=64)), words().constraints)


def prompts() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """One to recall something from, and one to copy, where n-gram drafts are right."""
    tokenizer = Tokenizer.from_file(str(MINIATURE / "tokenizer.json"))
    stream = random.Random("padded")
    found = []
    for sample in (recall.make(stream, True, 200, 0.5), copying.make(stream, True)):
        encoded = encode(sample, tokenizer, random.Random(0))
        found.append(tuple(encoded.ids[: int(encoded.learned.argmax())].tolist()))
    return found[0], found[1]


def requests() -> list[GenerationRequest]:
    recalled, copied = prompts()
    made = [
        GenerationRequest("greedy", recalled, GREEDY, 24, max_draft_tokens=0),
        GenerationRequest("greedy, drafted", recalled, GREEDY, 24, max_draft_tokens=4),
        GenerationRequest("copied", copied, GREEDY, 32, max_draft_tokens=8),
        GenerationRequest("scored", recalled, WARM, 24, num_logprobs=5, num_prompt_logprobs=3),
        GenerationRequest("held", recalled, WARM, 24, constraint=ANY_LETTERS, max_draft_tokens=4),
        GenerationRequest("biased", recalled, replace(WARM, logit_bias=((5, 6.0), (4095, 2.0))), 24),
        GenerationRequest("cut", recalled, replace(WARM, top_k=50, top_p=0.9, min_p=0.01), 24),
        GenerationRequest("penalised", recalled, replace(WARM, repetition_penalty=1.4, presence_penalty=0.5), 24),
        GenerationRequest("several", recalled, replace(WARM, temperature=2.0), 24, num_choices=3),
        GenerationRequest("hot, drafted", recalled, replace(WARM, temperature=2.0), 24, max_draft_tokens=4),
    ]
    return [replace(one, stop_token_ids=frozenset({END})) for one in made]


async def outputs_of(engine: Engine, request: GenerationRequest) -> list[TokenOutput]:
    return [output async for output in await engine.submit(request)]


async def together(engine: Engine) -> Outputs:
    """All requests at once, by their names."""
    asked = requests()
    found = await asyncio.gather(*(outputs_of(engine, one) for one in asked))
    return {one.request_id: outputs for one, outputs in zip(asked, found, strict=True)}


@pytest.fixture(scope="module")
def expected() -> Outputs:
    engine = launch("miniature")
    found = asyncio.run(together(engine))
    engine.stop()
    return found


@pytest.fixture(
    scope="module",
    params=[
        "random, untied",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("random, tied", "zeros, tied")),
    ],
)
def padded_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    rows, ends = request.param.split(", ")
    folder = tmp_path_factory.mktemp("models") / "padded"
    engine = launch(str(padded.save(folder, is_random=rows == "random", is_tied=ends == "tied")))
    yield engine
    engine.stop()


async def test_answers_are_those_of_the_model_without_the_rows(padded_engine: Engine, expected: Outputs) -> None:
    found = await together(padded_engine)
    assert (await padded_engine.status()).counters.drafts.num_drafted > 0
    for name, outputs in expected.items():
        for choice in range(3):
            assert ids_of(found[name], choice) == ids_of(outputs, choice), (name, choice)
        assert [one.logprobs for one in found[name]] == [one.logprobs for one in outputs], name
        assert [one.prompt_logprobs for one in found[name]] == [one.prompt_logprobs for one in outputs], name


CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
TEXT = {"prompt": "hello", "max_tokens": 1}
RESPONSE = {"input": "hello", "max_output_tokens": 1}
CONTROLS: dict[str, Callable[[int], object]] = {
    "logit_bias": lambda token_id: {str(token_id): 5},
    "allowed_token_ids": lambda token_id: [5, token_id],
    "stop_token_ids": lambda token_id: [token_id],
}


def asked_with(token_id: int) -> list[tuple[str, str, dict[str, object]]]:
    """Every field of every API that takes token ids: path, name, body."""
    paths = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT, "/v1/responses": RESPONSE}
    found = [
        (path, name, {"model": "any", **body, name: value(token_id)})
        for path, body in paths.items()
        for name, value in CONTROLS.items()
    ]
    for prompt in ([5, token_id], [[5], [token_id, 5]]):
        found.append(("/v1/completions", "prompt", {**TEXT, "prompt": prompt}))
    return [*found, ("/detokenize", "tokens", {"tokens": [5, token_id]})]


async def test_ids_of_such_rows_are_refused_by_every_field(padded_engine: Engine) -> None:
    session = Session.for_engine(padded_engine, words())
    async with serving(session) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        for token_id in (padded.NUM_TOKENS, padded.NUM_TOKENS + padded.NUM_ADDED - 1, 10**6):
            for path, name, body in asked_with(token_id):
                answer = await client.post(path, json=body)
                assert answer.status_code == 400, (path, name, answer.text)
                assert answer.json()["error"]["param"] == name
                assert name in answer.json()["error"]["message"]
        for path, name, body in asked_with(padded.NUM_TOKENS - 1):
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, (path, name, answer.text)


def ids_of(outputs: Sequence[TokenOutput], choice: int) -> list[int]:
    return [token for output in outputs if output.choice == choice for token in output.token_ids]
