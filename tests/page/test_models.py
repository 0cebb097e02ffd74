"""Several models in the page: their states, loading and unloading, and which one a conversation uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from attack.running import KEY, RunningServer, running_server
from page.acts import answers, say
from page.test_engine_view import engine_page, rows
from page.visits import Visit, open_visit
from playwright.sync_api import Browser, Locator, Page, Route, expect

FIRST, SECOND = "headrace-miniature", "headrace-miniature-draft"
LOAD_MS = 90_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    words = ("miniature-draft", "--gpu-memory-utilization", "0.3")
    with running_server(tmp_path_factory.mktemp("server"), *words, key=KEY) as server:
        yield server


@pytest.fixture
def visit(browser: Browser, server: RunningServer) -> Iterator[Visit]:
    visit = open_visit(browser, server.url)
    visit.context.set_default_timeout(LOAD_MS)
    visit.page.get_by_label("API key").fill(KEY)
    visit.page.get_by_label("API key").press("Enter")
    expect(visit.page.locator("#model")).to_have_text("2 models")
    yield visit
    visit.context.close()
    visit.check()


def states(server: RunningServer) -> dict[str, str]:
    answer = httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {KEY}"})
    return {each["id"]: each["state"] for each in answer.json()["data"]}


def row(page: Page, name: str) -> Locator:
    found = rows(page, "Models").filter(has=page.get_by_text(name, exact=True))
    expect(found).to_have_count(1)
    return found


def test_models_are_unloaded_and_loaded_by_buttons(visit: Visit, server: RunningServer) -> None:
    page = engine_page(visit)
    expect(rows(page, "Models")).to_have_count(2)
    expect(row(page, SECOND).locator(".badge")).to_have_text("loaded")
    expect(row(page, SECOND)).to_contain_text("MB weights")
    page.get_by_role("button", name=f"Unload {SECOND}", exact=True).click()
    expect(row(page, SECOND).locator(".badge")).to_have_text("not loaded")
    assert states(server) == {FIRST: "loaded", SECOND: "sleeping"}
    page.get_by_role("button", name=f"Load {SECOND}", exact=True).click()
    expect(row(page, SECOND).locator(".badge")).to_have_text("loaded", timeout=LOAD_MS)
    assert states(server) == {FIRST: "loaded", SECOND: "loaded"}


def test_a_model_that_serves_is_not_unloaded_and_the_page_says_why(visit: Visit) -> None:
    page = engine_page(visit)
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {
        "model": FIRST,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{visit.url}/v1/chat/completions", json=body, headers=headers, timeout=60) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        next(lines)
        expect(rows(page, "Requests").first).to_contain_text(FIRST)
        page.get_by_role("button", name=f"Unload {FIRST}", exact=True).click()
        expect(page.get_by_role("region", name="Models").get_by_role("alert")).to_have_text(
            f"{FIRST} serves 1 request: it can be unloaded once they are over"
        )
        next(line for line in lines if line.startswith("data: "))  # it goes on


def test_a_conversation_keeps_the_model_that_was_chosen_which_an_answer_loads(
    visit: Visit, server: RunningServer
) -> None:
    unloaded = httpx.post(
        f"{server.url}/v1/models/{SECOND}/unload", headers={"Authorization": f"Bearer {KEY}"}, timeout=60
    )
    assert unloaded.json()["state"] == "sleeping"
    page = visit.page
    picker = page.get_by_label("Model", exact=True)
    expect(picker).to_have_value(FIRST)
    picker.focus()
    expect(picker.get_by_role("option")).to_have_text([FIRST, f"{SECOND} (not loaded)"])
    picker.select_option(SECOND)
    page.get_by_label("Message", exact=True).fill("hello")
    held: list[Route] = []
    # a small model may be loaded before its text is read
    page.route("**/v1/chat/completions", lambda route: held.append(route))
    page.get_by_label("Message", exact=True).press("Enter")
    expect(answers(page).get_by_text(f"Loading {SECOND}: ")).to_be_visible()
    held[0].continue_()
    page.unroute("**/v1/chat/completions")
    expect(answers(page)).to_have_attribute("aria-busy", "false", timeout=LOAD_MS)
    expect(page.get_by_role("article", name=f"Answer of {SECOND}")).to_be_visible()
    expect(picker.get_by_role("option")).to_have_text([FIRST, SECOND])
    page.reload()
    expect(page.get_by_role("article", name=f"Answer of {SECOND}")).to_be_visible()
    expect(picker).to_have_value(SECOND)
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "again")
    assert sent.value.post_data_json["model"] == SECOND
    page.get_by_role("link", name="New chat").click()
    expect(picker).to_have_value(FIRST)


def test_one_model_has_no_choice(browser: Browser, tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        visit = open_visit(browser, server.url)
        expect(visit.page.locator("#model")).to_have_text(FIRST)
        expect(visit.page.get_by_label("Model", exact=True)).to_be_hidden()
        visit.page.goto(f"{server.url}/#/engine")
        expect(row(visit.page, FIRST)).to_contain_text("for states and caches")
        visit.context.close()
        visit.check()
