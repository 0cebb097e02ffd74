"""The engine view in a browser, with a real server and real requests."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from attack.running import KEY, RunningServer, running_server
from page.visits import Visit, open_visit
from playwright.sync_api import Browser, Page, expect

from headrace.server.status_stream import MAX_WATCHERS

PATIENCE_S = 30
NUM_ROWS = 4
SECRET = "a quiet heron by the mill pond"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("server"), "--max-num-seqs", str(NUM_ROWS)) as server:
        yield server


def ask(url: str, number: int) -> httpx.Response:
    """A request that ends when it is cancelled."""
    body = {
        "messages": [{"role": "user", "content": f"{SECRET} {number}"}],
        "max_tokens": 16000,
        "ignore_eos": True,
        "user": "watched",
    }
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S)


@contextmanager
def requests_in_progress(url: str, number: int) -> Iterator[list[Future[httpx.Response]]]:
    """Requests of one session; those that are left are cancelled at the end."""
    with ThreadPoolExecutor(number) as pool:
        asked = [pool.submit(ask, url, each) for each in range(number)]
        try:
            yield asked
        finally:
            while any(not each.done() for each in asked):
                for request in httpx.get(f"{url}/v1/status").json()["requests"]:
                    httpx.post(f"{url}/v1/requests/{request['request_id']}/cancel")


def engine_page(visit: Visit) -> Page:
    visit.page.get_by_role("link", name="Engine", exact=True).click()
    expect(visit.page.get_by_text("Live", exact=True)).to_be_visible()
    return visit.page


def rows(page: Page, table: str) -> Any:
    # the first row has the columns' names
    return page.get_by_role("table", name=table).get_by_role("row").filter(has=page.get_by_role("cell"))


def test_running_and_waiting_requests_are_shown_and_cancelled_by_the_button(visit: Visit) -> None:
    page = engine_page(visit)
    expect(page.get_by_text("No request is running or waiting.")).to_be_visible()
    with requests_in_progress(visit.url, NUM_ROWS + 1) as asked:
        requests = rows(page, "Requests")
        expect(requests).to_have_count(NUM_ROWS + 1)
        expect(requests.filter(has_text="decode")).to_have_count(NUM_ROWS)
        waiting = requests.filter(has_text="queued")
        expect(waiting).to_have_count(1)
        expect(waiting).to_contain_text("waits for a free row")
        expect(page.get_by_role("definition").first).to_have_text("4 of 4 rows")
        running = requests.filter(has_text="decode").first
        id = running.locator("code").inner_text()
        assert id in [each["request_id"] for each in httpx.get(f"{visit.url}/v1/status").json()["requests"]]
        page.get_by_role("button", name=f"Cancel {id}").click()
        expect(requests).to_have_count(NUM_ROWS)
        # the waiting one got its row
        expect(requests.filter(has_text="decode")).to_have_count(NUM_ROWS)
        assert sum(each.done() for each in asked) == 1
    assert [each.result().status_code for each in asked] == [499] * (NUM_ROWS + 1)
    expect(page.get_by_text("No request is running or waiting.")).to_be_visible()
    expect(rows(page, "Recent errors").filter(has_text="request_cancelled")).to_have_count(NUM_ROWS + 1)


def test_figures_lookups_and_settings_are_shown_without_content(visit: Visit) -> None:
    body = {"messages": [{"role": "user", "content": SECRET * 20}], "max_tokens": 8}
    for _ in range(2):
        answer = httpx.post(f"{visit.url}/v1/chat/completions", json=body, timeout=PATIENCE_S).json()
    page = engine_page(visit)
    lookup = rows(page, "Where prompts parted").first
    expect(lookup).to_contain_text(answer["id"])
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    expect(lookup).to_contain_text(f"{cached} of {answer['usage']['prompt_tokens']}")
    weights = httpx.get(f"{visit.url}/v1/status").json()["memory"]["weights_bytes"]
    expect(page.get_by_role("row", name=re.compile("^Weights"))).to_contain_text(f"{weights / 1e6:.1f} MB")
    expect(page.get_by_role("img", name="Generated tokens/s: now")).to_be_visible()
    settings = page.get_by_role("region", name="Settings for agents")
    expect(settings).to_contain_text(f"{visit.url}/v1")
    expect(settings).to_contain_text("headrace-miniature")
    assert SECRET not in page.content()


def test_the_settings_of_a_chosen_client_are_shown(visit: Visit) -> None:
    clients = {each["id"]: each for each in httpx.get(f"{visit.url}/v1/clients").json()["data"]}
    chosen = next(each for each in clients.values() if each["files"] and each["id"] != next(iter(clients)))
    settings = engine_page(visit).get_by_role("region", name="Settings for agents")
    settings.get_by_role("combobox", name="Client").select_option(chosen["id"])
    shown = [block.text_content() for block in settings.locator("pre").all()]
    assert shown == [chosen["launch"], *(file["text"] for file in chosen["files"]), chosen["command"]]
    visit.context.grant_permissions(["clipboard-read", "clipboard-write"])
    settings.get_by_role("button", name=f"Copy {chosen['files'][0]['path']}").click()
    expect(visit.page.locator("#announce")).to_have_text("Copied")
    assert visit.page.evaluate("navigator.clipboard.readText()") == chosen["files"][0]["text"]


def test_the_view_opens_with_the_server_s_history(visit: Visit) -> None:
    num_seconds = 0
    while num_seconds < 4:
        with httpx.stream("GET", f"{visit.url}/v1/status/stream") as response:
            first = next(line for line in response.iter_lines() if line.startswith("data: "))
        num_seconds = len(json.loads(first[6:])["history"]["num_steps"])
    assert SECRET not in first
    page = engine_page(visit)
    expect(page.get_by_role("img", name="Engine busy: now")).to_be_visible()
    line = page.locator("[aria-label^='Engine busy'] .line").get_attribute("d")
    assert line is not None
    assert len(line.split("L")) >= num_seconds - 1


def test_the_stream_ends_with_the_view(visit: Visit) -> None:
    for _ in range(3):
        engine_page(visit)
        visit.page.get_by_role("link", name="Chat", exact=True).click()
    deadline = time.monotonic() + PATIENCE_S
    with httpx.Client() as client, ExitStack() as watchers:
        num_open = 0
        while num_open < MAX_WATCHERS:  # as many as there may be, so the page has none
            assert time.monotonic() < deadline
            response = client.send(client.build_request("GET", f"{visit.url}/v1/status/stream"), stream=True)
            if response.status_code == 200:
                watchers.callback(response.close)
                num_open += 1
            else:
                response.close()


def test_a_server_that_is_gone_is_reported(browser: Browser, tmp_path: Path) -> None:
    with running_server(tmp_path, key=KEY) as server:
        visit = open_visit(browser, server.url, "/#/engine")
        page = visit.page
        page.get_by_label("API key").fill(KEY)
        page.get_by_label("API key").press("Enter")
        expect(page.get_by_text("Live", exact=True)).to_be_visible()
        assert server.stop() == 0
        # a watcher is no request that the end waits for
        assert "may go on" not in server.log_text()
        expect(page.locator(".live.error")).to_contain_text("is shutting down")
        expect(page.locator(".live.error")).to_contain_text("The server does not answer")
        visit.context.close()
        visit.check()


def test_a_phone_shows_everything_without_scrolling_sideways(browser: Browser, server: RunningServer) -> None:
    visit = open_visit(browser, server.url, "/#/engine", viewport={"width": 390, "height": 844})
    page = visit.page
    expect(page.get_by_text("Live", exact=True)).to_be_visible()
    with requests_in_progress(server.url, 1):
        expect(page.get_by_role("cell", name="decode")).to_be_visible()
        assert page.evaluate("document.querySelector('.engine').scrollWidth <= innerWidth")
        page.get_by_role("button", name="Cancel ").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_text("No request is running or waiting.")).to_be_visible()
    visit.context.close()
    visit.check()
