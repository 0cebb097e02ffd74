"""Nothing that a user, a file or a model writes runs in the page, is loaded, or breaks it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from page.acts import answers, complete, conversations, field, import_file, more, say
from page.hostile_forms import FORMS, PWN
from page.visits import Visit
from playwright.sync_api import Page, Route, expect

ALL = "\n\n".join(FORMS)


def check_harmless(page: Page) -> None:
    """Nothing ran, and no element could run, load or lead to anything but a web page."""
    page.wait_for_timeout(200)
    assert page.evaluate("window.pwned") is None
    found = page.evaluate(
        """() => [...document.querySelectorAll("main *")].flatMap((element) => {
            const names = element.getAttributeNames().filter((name) => name.startsWith("on") || name === "style");
            const tag = element.localName;
            const foreign = ["script", "iframe", "object", "embed", "style", "link", "base", "meta", "math", "animate"];
            const link = tag === "a" && !/^#|^(https?|mailto):/.test(element.getAttribute("href")) ? ["link"] : [];
            const open = tag === "a" && element.closest(".prose") && !/noopener/.test(element.rel) ? ["rel"] : [];
            const source = element.getAttribute("src") ?? "";
            return [...names, ...link, ...open, ...(foreign.includes(tag) ? [tag] : []),
                    ...(source && !source.startsWith("blob:") ? [source] : [])];
        })"""
    )
    assert found == []


def answer_with(page: Page, *deltas: dict[str, Any], error: str | None = None, end: str = "data: [DONE]\n\n") -> None:
    """Answer the page's next requests with a stream of these deltas."""
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    if error is not None:
        chunks.append({"error": {"message": error}})
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + end

    def answer(route: Route) -> None:
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", answer)


def test_a_models_answer_runs_nothing(visit: Visit) -> None:
    page = visit.page
    call = {"index": 0, "id": "1", "type": "function", "function": {"name": FORMS[2], "arguments": ALL}}
    answer_with(page, {"reasoning_content": ALL}, {"content": ALL}, {"tool_calls": [call]}, error=ALL)
    answer = say(page, "hello")
    expect(answer.locator(".prose a").first).to_be_visible()
    answer.locator("summary").first.click()
    check_harmless(page)
    page.reload()
    expect(answer.locator(".prose a").first).to_be_visible()
    check_harmless(page)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS[::3])
def test_an_answer_of_one_form_runs_nothing(visit: Visit, form: str) -> None:
    answer_with(visit.page, {"content": form})
    say(visit.page, form)
    check_harmless(visit.page)


def test_a_message_and_a_title_run_nothing(visit: Visit) -> None:
    page = visit.page
    answer_with(page, {"content": "hello"})
    say(page, ALL)
    assert page.get_by_role("article", name="You").locator(".text").text_content() == ALL
    check_harmless(page)
    for form in FORMS[:5]:
        more(page, "Rename")
        page.get_by_label("Title").fill(form)
        page.get_by_label("Title").press("Enter")
        expect(page.get_by_role("heading", level=1)).to_have_text(form)
        check_harmless(page)
    more(page, "Delete")
    check_harmless(page)


def test_an_imported_file_runs_nothing_and_replaces_nothing(visit: Visit, tmp_path: Path) -> None:
    page = visit.page
    answer_with(page, {"content": "hello"})
    say(page, "mine")
    mine = page.url.rpartition("/")[2]
    evil = dict.fromkeys(("text", "thinking", "model", "error", "finish", "name", "arguments", "result", "id"), ALL)
    media = [
        {"name": ALL, "url": "data:image/svg+xml;base64,PHN2ZyBvbmxvYWQ9IndpbmRvdy5wd25lZD0xIj4="},
        {"name": ALL, "url": "https://evil.example/x.png"},
        {"name": ALL, "url": "data:text/html;base64,AAAA"},
        {"name": ALL, "url": f"javascript:{PWN}"},
    ]
    messages = [
        {**evil, "id": "1", "role": "user", "parent": None, "media": media, "created": 1},
        {**evil, "id": "2", "role": "assistant", "parent": "1", "calls": [evil], "stats": evil, "created": ALL},
        {**evil, "id": "3", "role": "assistant", "parent": "4", "media": "x", "calls": {"a": 1}},
        {**evil, "id": "4", "role": "user", "parent": "3", "media": [None, 1]},
        {"role": "system", "id": "5", "__proto__": {"evil": 1}},
        None,
    ]
    chats = [
        {
            "id": mine,
            "title": ALL,
            "leaf": "2",
            "settings": {"system": ALL, "tools": ALL, "x": {}},
            "messages": messages,
        },
        {"id": mine, "title": "circle", "leaf": "3", "messages": messages},
        *({"title": title, "messages": title} for title in (None, 1, "", {})),
        7,
    ]
    file = tmp_path / "evil.json"
    file.write_text(json.dumps({"format": "headrace-chats", "version": 1, "chats": chats}))
    import_file(page, file)
    expect(conversations(page)).to_have_count(1 + len(chats))
    for index in range(1 + len(chats)):
        conversations(page).nth(index).click()
        check_harmless(page)
    page.get_by_label("Search conversations").fill("mine")
    conversations(page).first.click()
    expect(page.get_by_role("article", name="You")).to_have_text("mine")


@pytest.mark.parametrize("end", ["", "data: {broken\n\n", 'data: {"choices": []'])
def test_an_answer_that_breaks_off_says_so_and_keeps_its_text(visit: Visit, end: str) -> None:
    page = visit.page
    answer_with(page, {"content": "half an"}, end=end)
    answer = say(page, "hello")
    expect(answer.get_by_role("alert")).to_contain_text("The connection")
    expect(answer.locator(".prose")).to_have_text("half an")
    page.unroute("**/v1/chat/completions")
    answer.get_by_role("button", name="Answer again").click()
    complete(page)
    expect(answers(page).get_by_role("alert")).to_be_hidden()


def test_a_refusal_is_shown_with_its_reason(visit: Visit) -> None:
    page = visit.page
    page.get_by_role("button", name="Settings of this conversation").click()
    page.get_by_label("Most tokens of an answer").fill("5")
    page.get_by_label("Tools (JSON)").fill('[{"type": "nothing"}]')
    page.get_by_role("button", name="Save").click()
    answer = say(page, "hello")
    expect(answer.get_by_role("alert")).to_contain_text("tools[0]")


def test_odd_texts_come_back_as_they_were_written(visit: Visit) -> None:
    page = visit.page
    text = "שלום עולם\n\n  עם رموز 👩‍👩‍👧 e\u0301 \u202eright to left\u202c\nlast  "
    answer_with(page, {"content": "ok"})
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, text)
    assert sent.value.post_data_json["messages"] == [{"role": "user", "content": text.strip()}]
    bubble = page.get_by_role("article", name="You").locator(".text")
    assert bubble.text_content() == text.strip()
    assert bubble.evaluate("(element) => element.matches(':dir(rtl)')")


def test_keys_send_and_break_lines(visit: Visit) -> None:
    page = visit.page
    answer_with(page, {"content": "ok"})
    field(page).fill("first")
    field(page).press("Shift+Enter")
    field(page).press_sequentially("second")
    field(page).press("Control+Enter")
    complete(page)
    expect(page.get_by_role("article", name="You").locator(".text")).to_have_text("first\nsecond", use_inner_text=True)
    field(page).fill("   ")
    field(page).press("Enter")
    expect(answers(page)).to_have_count(1)
