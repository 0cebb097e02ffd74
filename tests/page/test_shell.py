"""The page's views, key and first paint, in a browser."""

from __future__ import annotations

from pathlib import Path

from attack.running import KEY, running_server
from page.acts import say
from page.visits import Visit, open_visit
from playwright.sync_api import Browser, expect

MAX_FIRST_PAINT_BYTES = 200_000


def test_the_views_change_with_the_address(visit: Visit) -> None:
    page = visit.page
    chat, engine = (page.get_by_role("link", name=name, exact=True) for name in ("Chat", "Engine"))
    expect(chat).to_have_attribute("aria-current", "page")
    engine.click()
    expect(page).to_have_url(f"{visit.url}/#/engine")
    expect(engine).to_have_attribute("aria-current", "page")
    page.go_back()
    expect(chat).to_have_attribute("aria-current", "page")


def test_a_view_may_be_left_while_it_loads(visit: Visit) -> None:
    """Whatever the chat waits for then finds its elements gone."""
    page = visit.page
    for delay in range(0, 60, 4):
        page.evaluate(
            """async (delay) => {
                location.hash = "#/chat/unknown";
                await new Promise((resolve) => setTimeout(resolve, delay));
                location.hash = "#/engine";
            }""",
            delay,
        )
    expect(page.get_by_role("link", name="Engine", exact=True)).to_have_attribute("aria-current", "page")
    page.get_by_role("link", name="Chat", exact=True).click()
    expect(page.get_by_label("Message", exact=True)).to_be_visible()


def test_the_theme_is_kept(visit: Visit) -> None:
    page = visit.page
    page.emulate_media(color_scheme="light")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.get_by_role("button", name="Theme: auto").click()
    page.get_by_role("button", name="Theme: light").click()
    dark = page.evaluate(background)
    assert dark != light
    page.reload()
    assert page.evaluate(background) == dark
    page.get_by_role("button", name="Theme: dark").click()
    assert page.evaluate(background) == light


NAMES = ("--served-model-name", "first", "--served-model-name", "org/second", "--strict-model-name")


def test_a_key_is_asked_for_and_kept_for_the_session_only(browser: Browser, tmp_path: Path) -> None:
    """Of a server that also has two names, and takes no pictures."""
    with running_server(tmp_path, *NAMES, "--vision", "off", key=KEY) as server:
        visit = open_visit(browser, server.url)
        page = visit.page
        dialog = page.get_by_role("dialog", name="This server needs a key")
        dialog.get_by_label("API key").fill("not it")
        dialog.get_by_label("API key").press("Enter")
        expect(dialog.get_by_role("alert")).to_contain_text("The API key is wrong")
        dialog.get_by_label("API key").fill(KEY)
        dialog.get_by_role("button", name="Use this key").click()
        expect(page.locator("#model")).to_have_text("first")
        expect(dialog).to_be_hidden()
        stored = "JSON.stringify([Object.values(sessionStorage), Object.values(localStorage), document.cookie])"
        assert page.evaluate(stored) == f'[["{KEY}"],[],""]'
        page.reload()
        expect(page.locator("#model")).to_have_text("first")
        expect(dialog).to_be_hidden()

        expect(page.get_by_role("button", name="Attach pictures or videos")).to_be_hidden()
        with page.expect_request("**/v1/chat/completions") as sent:
            say(page, "hello")
        assert sent.value.post_data_json["model"] == "first"
        page.get_by_label("Model", exact=True).select_option("org/second")
        with page.expect_request("**/v1/chat/completions") as sent:
            answer = say(page, "hello")
        assert sent.value.post_data_json["model"] == "org/second"
        expect(answer.get_by_role("alert")).to_be_hidden()

        server.stop()
        expect(say(page, "hello").get_by_role("alert")).to_have_text("The server does not answer. Is it still running?")
        visit.context.close()
        visit.check()


def test_the_first_paint_is_light(visit: Visit) -> None:
    visit.page.reload(wait_until="networkidle")
    sizes = visit.page.evaluate(
        "[...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]"
        ".map((entry) => entry.decodedBodySize)"
    )
    assert len(sizes) > 4
    assert sum(sizes) < MAX_FIRST_PAINT_BYTES
