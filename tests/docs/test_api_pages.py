"""The pages about the APIs list what the code knows: no field, route or metric more, and none less."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEngine, app_over, fake_session
from starlette.routing import Route

from headrace.api.anthropic_body import MessagesBody
from headrace.api.json_body import StrictBody
from headrace.api.openai_chat import ChatCompletionBody
from headrace.api.openai_completion import CompletionBody
from headrace.api.openai_models import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from headrace.api.pooling_body import EmbeddingBody, RerankBody, ScoreBody
from headrace.api.responses_body import ResponsesBody
from headrace.api.responses_items import ITEM_BODIES, SKIPPED_ITEMS
from headrace.api.responses_tools import IGNORED_TOOLS, REFUSED_TOOLS
from headrace.config import ServerConfig
from headrace.metrics.prometheus import render
from headrace.metrics.stats import Stats
from headrace.types.ranks import RanksStatus
from headrace.types.status import (
    AdapterStatus,
    CacheStatus,
    DiskStatus,
    DraftStatus,
    EngineProcessStatus,
    EngineStatus,
    HandoverStatus,
    MemoryStatus,
    ProcessStatus,
    SparseStatus,
)

DOCS = Path(__file__).parent.parent.parent / "docs"

PAGES: Mapping[str, type[StrictBody]] = {
    "api-chat.md": ChatCompletionBody,
    "api-completions.md": CompletionBody,
    "api-responses.md": ResponsesBody,
    "api-messages.md": MessagesBody,
    "api-embeddings.md": EmbeddingBody,
}


def rows(page: str, section: str | None = None) -> list[list[str]]:
    """Cells of the rows of a section's table, without its head; of the text before all sections if None."""
    before, *sections = re.split(r"^## ", (DOCS / page).read_text(), flags=re.MULTILINE)
    if section is not None:
        (before,) = [text for text in sections if text.partition("\n")[0] == section]
    lines = [line for line in before.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names(page: str, section: str | None = None) -> list[str]:
    """First cells of a table, which are code."""
    return [cells[0].strip("`") for cells in rows(page, section)]


def same(listed: list[str], known: Any) -> bool:
    return sorted(listed) == sorted(known)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_lists_every_field_under_what_becomes_of_it(page: str) -> None:
    body = PAGES[page]
    assert same(names(page, "Supported"), body.model_fields)
    assert same(names(page, "Refused"), body.neutral_values)
    assert same(names(page, "Accepted without effect"), body.without_effect)


@pytest.mark.parametrize(("section", "body"), [("Reranking", RerankBody), ("Scores", ScoreBody)])
def test_the_page_of_embeddings_lists_the_fields_of_reranking_and_scores(section: str, body: type[StrictBody]) -> None:
    assert same(names("api-embeddings.md", section), body.model_fields)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_tells_which_values_of_a_refused_field_are_accepted(page: str) -> None:
    body = PAGES[page]
    for cell, values in rows(page, "Refused"):
        name = cell.strip("`")
        told = [json.loads(value) for value in re.findall(r"`([^`]*)`", values)]
        assert told == (list(body.neutral_values[name]) or [None]), name


@pytest.mark.parametrize(
    ("section", "bodies"),
    [
        ("POST /tokenize", (TokenizeTextBody, TokenizeChatBody)),
        ("POST /detokenize", (DetokenizeBody,)),
    ],
)
def test_fields_of_the_smaller_routes_are_listed_with_their_treatment(
    section: str, bodies: tuple[type[StrictBody], ...]
) -> None:
    treatment = {cells[0].strip("`"): cells[1] for cells in rows("api-server.md", section)}
    known = {name: "supported" for body in bodies for name in body.model_fields}
    assert treatment == {**known, **dict.fromkeys(bodies[0].neutral_values, "refused")}


@pytest.mark.parametrize(
    ("section", "known"),
    [
        ("Items", {*ITEM_BODIES, *SKIPPED_ITEMS, "item_reference"}),
        ("Tools", {"function", "custom", "namespace", *IGNORED_TOOLS, *REFUSED_TOOLS}),
    ],
)
def test_every_kind_of_item_and_tool_is_listed(section: str, known: set[str]) -> None:
    listed = " ".join(cells[0] for cells in rows("api-responses.md", section))
    assert same(re.findall(r"`(\w+)`", listed.replace("(or a `role`", "").replace("(or an `id`", "")), known)


def test_every_route_is_listed() -> None:
    app = app_over(fake_session(FakeEngine()), ServerConfig())
    known = [
        f"{method} {route.path.replace(':path', '')}"
        for route in app.routes
        if isinstance(route, Route)
        for method in route.methods - {"HEAD"}
    ]
    assert same(names("api-server.md"), known)


def test_every_metric_is_listed() -> None:
    cache = CacheStatus(*[0] * 8, disk=DiskStatus(*[0] * 11))
    sparse = SparseStatus("draft", 0, 0, 0, (), 0, 0, 0, 0)
    memory, drafts = MemoryStatus(*[0] * 9), DraftStatus(max_drafts=1, num_failures=0)
    ranks = RanksStatus("ring", (), 0, 0, 0.0, 0, 0.0, 0.0)
    adapters = AdapterStatus((), (), ())
    parts = {
        "drafts": drafts,
        "sparse": sparse,
        "handover": HandoverStatus(0, 0, 0),
        "ranks": ranks,
        "adapters": adapters,
        "engine_process": EngineProcessStatus(0, 0),
    }
    status = EngineStatus(0, 0, (), memory, Stats().counters(), cache, **parts)  # type: ignore[arg-type]  # by name
    page = render({"m": status}, ProcessStatus(0, 0, 0))
    known = [line.split(" ")[2] for line in page.splitlines() if line.startswith("# TYPE")]
    assert same(names("api-server.md", "GET /metrics"), known)
