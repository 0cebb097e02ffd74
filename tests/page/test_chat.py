"""The chat in a browser, with the bundled model."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from end_to_end.test_pictures import RED, circle
from page.acts import answers, complete, conversations, field, import_file, more, say, set_up
from page.visits import Visit, watch
from playwright.sync_api import expect

from training.jobs import tools

SUM = "Ann has 12 pens. Ann buys 7 more. Then Ann loses 5. How many pens are left?"


def test_an_answer_has_its_thinking_folded_and_its_figures(visit: Visit) -> None:
    page = visit.page
    set_up(page, Temperature="0")
    answer = say(page, SUM)
    expect(answer.locator(".prose")).to_contain_text("14 pens")
    thoughts = answer.get_by_text("12 + 7 = 19. 19 - 5 = 14.")
    expect(thoughts).to_be_hidden()
    answer.get_by_text("Thought for").click()
    expect(thoughts).to_be_visible()
    stats = answer.locator(".stats")
    figures = r"[\d.,]+ tokens/s · \d+ tokens · first after [\d.]+ s · \d+\s% reused · \d+\s% drafted"
    expect(stats).to_have_text(re.compile(figures))
    expect(stats).to_contain_text("· 0 % reused")
    again = say(page, "Thank you")
    expect(again.locator(".stats")).to_have_text(re.compile(r"· [1-9]\d\s% reused"))
    used = int(re.match(r"[\d,]+", page.locator(".gauge").inner_text())[0].replace(",", ""))
    assert float(page.get_by_label("Context used").get_attribute("value")) == used > 0


def test_a_call_is_shown_and_its_result_goes_back(visit: Visit) -> None:
    page = visit.page
    sample = tools.make(random.Random("page"), True, "result")
    user, turn, result, last = sample.turns
    set_up(page, Temperature="0", Tools=json.dumps(sample.tools))
    say(page, user.text)
    call = page.get_by_role("region", name=f"Call of {turn.calls[0].name}")
    assert json.loads(call.locator("code").inner_text()) == turn.calls[0].arguments
    call.get_by_label("Result of").fill(result.text)
    call.get_by_role("button", name="Send result").click()
    expect(complete(page, 2).locator(".prose")).to_have_text(last.text)
    page.reload()
    expect(call).to_contain_text(result.text)
    expect(answers(page)).to_have_count(2)


def test_a_picture_is_attached_shown_and_seen(visit: Visit) -> None:
    page = visit.page
    set_up(page, Temperature="0")
    files = {"name": "red.png", "mimeType": "image/png", "buffer": circle(RED)}
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Attach pictures or videos").click()
    chooser.value.set_files([files, {**files, "name": "other.png"}])
    page.get_by_role("button", name="Remove other.png").click()
    answer = say(page, "What is in the picture?")
    expect(answer.locator(".prose")).to_contain_text("red circle")
    page.reload()
    picture = page.get_by_role("article", name="You").get_by_role("img", name="red.png")
    expect(picture).to_be_visible()
    assert picture.evaluate("(image) => image.naturalWidth") > 0


@pytest.mark.parametrize("how", ["paste", "drop"])
def test_a_picture_comes_by_the_clipboard_and_by_dragging(visit: Visit, how: str) -> None:
    page = visit.page
    expect(page.locator("#model")).to_have_text("headrace-miniature")
    field(page).evaluate(
        """(field, how) => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([new Uint8Array(8)], "seen.png", { type: "image/png" }));
            const [kind, name] = how === "paste" ? [ClipboardEvent, "clipboardData"] : [DragEvent, "dataTransfer"];
            field.dispatchEvent(new kind(how, { [name]: transfer, bubbles: true, cancelable: true }));
        }""",
        how,
    )
    expect(page.get_by_role("list", name="Attached").get_by_role("img", name="seen.png")).to_be_attached()


def test_an_answer_is_stopped_and_kept(visit: Visit) -> None:
    page = visit.page
    set_up(page, Thinking="off", Most_tokens_of_an_answer="3000", System_prompt="")
    page.route("**/v1/chat/completions", lambda route: route.continue_(post_data=endless(route.request.post_data)))
    for stop in (lambda: page.keyboard.press("Escape"), page.get_by_role("button", name="Stop").click):
        field(page).fill("tell me a story")
        field(page).press("Enter")
        expect(answers(page).last.locator(".prose")).to_have_text(re.compile(r"\w"))
        expect(answers(page).last).to_have_attribute("aria-busy", "true")
        stop()
        expect(answers(page).last.get_by_text("Stopped.")).to_be_visible()
    text = complete(page, 2).locator(".prose").inner_text()
    page.reload()
    assert complete(page, 2).locator(".prose").inner_text() == text
    expect(answers(page).last.get_by_text("Stopped.")).to_be_visible()


def endless(body: str | None) -> str:
    return json.dumps({**json.loads(body or ""), "ignore_eos": True})


def test_an_answer_in_progress_is_kept_over_a_reload_and_goes_on_behind_another_chat(visit: Visit) -> None:
    page = visit.page
    page.route("**/v1/chat/completions", lambda route: route.continue_(post_data=endless(route.request.post_data)))
    set_up(page, Thinking="off", Most_tokens_of_an_answer="3000")
    field(page).fill("tell me a story")
    field(page).press("Enter")
    prose = answers(page).locator(".prose")
    expect(prose).to_have_text(re.compile(r"\w"))
    page.get_by_role("link", name="New chat").click()
    expect(answers(page)).to_have_count(0)
    conversations(page).first.click()
    expect(answers(page)).to_have_attribute("aria-busy", "true")
    expect(answers(page).locator(".stats")).to_contain_text(" tokens ")
    length = len(prose.inner_text())
    for _ in range(300):  # it is stored once a second
        if page.evaluate(STORED_LENGTH) > length + 20:
            break
        page.wait_for_timeout(100)
    page.reload()
    expect(answers(page).get_by_text("Interrupted.")).to_be_visible()
    expect(answers(page).locator(".stats")).to_contain_text(" tokens ")
    assert len(prose.inner_text()) > length


STORED_LENGTH = """async () => {
    const { listChats, messagesOf } = await import("/page/store.js");
    const messages = [...(await messagesOf((await listChats())[0].id)).values()];
    return messages.find((each) => each.role === "assistant").text.length;
}"""


def test_two_tabs_show_the_same_conversations(visit: Visit) -> None:
    page = visit.page
    say(page, "hello")
    other = visit.context.new_page()
    watch(visit, other)
    other.goto(page.url)
    expect(answers(other)).to_have_count(1)
    field(other).fill("not sent yet")
    page.bring_to_front()
    text = say(page, "who are you?").locator(".prose").inner_text()
    expect(answers(other)).to_have_count(2)
    expect(answers(other).last.locator(".prose")).to_have_text(text)
    expect(field(other)).to_have_value("not sent yet")
    more(page, "Delete")
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(conversations(other)).to_have_count(0)
    expect(answers(other)).to_have_count(0)


def test_conversations_are_found_after_a_reload_searched_renamed_and_deleted(visit: Visit) -> None:
    page = visit.page
    for text in ("hello", "Good morning Oslo"):
        say(page, text)
        page.get_by_role("link", name="New chat").click()
        expect(answers(page)).to_have_count(0)
    page.reload()
    expect(conversations(page)).to_have_text(["Good morning Oslo", "hello"])
    conversations(page).last.click()
    expect(answers(page)).to_have_count(1)
    expect(page.get_by_role("article", name="You")).to_have_text("hello")

    more(page, "Rename")
    page.get_by_label("Title").fill("A greeting")
    page.get_by_label("Title").press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("A greeting")
    page.get_by_label("Search conversations").fill("OSLO")
    expect(conversations(page)).to_have_text(["Good morning Oslo"])
    page.get_by_label("Search conversations").fill("hello")  # it is in the message, no longer in the title
    expect(conversations(page)).to_have_text(["A greeting"])

    more(page, "Delete")
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(conversations(page)).to_have_count(1)
    more(page, "Delete")
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(conversations(page)).to_have_count(0)
    page.reload()
    expect(conversations(page)).to_have_text(["Good morning Oslo"])
    stored = page.evaluate(
        """async () => {
            const open = indexedDB.open("headrace");
            await new Promise((resolve) => (open.onsuccess = resolve));
            const all = open.result.transaction("messages").objectStore("messages").getAll();
            await new Promise((resolve) => (all.onsuccess = resolve));
            return all.result.map((each) => each.text);
        }"""
    )
    assert "hello" not in stored and len(stored) == 2


def test_editing_and_answering_again_make_branches(visit: Visit) -> None:
    page = visit.page
    set_up(page, Temperature="0", Thinking="off")
    say(page, "Say after me: one")
    say(page, "Say after me: two")
    first = page.get_by_role("article", name="You").first
    first.get_by_role("button", name="Edit and ask again").click()
    first.get_by_label("Edited message").fill("Say after me: three")
    first.get_by_role("button", name="Ask again").click()
    users = page.get_by_role("article", name="You")
    expect(users.locator(".bubble")).to_have_text(["Say after me: three"])
    expect(users.first).to_contain_text("2/2")
    complete(page).get_by_role("button", name="Answer again").click()
    complete(page)
    expect(answers(page).last).to_contain_text("2/2")
    users.first.get_by_role("button", name="Earlier version").click()
    expect(users.locator(".bubble")).to_have_text(["Say after me: one", "Say after me: two"])
    expect(answers(page)).to_have_count(2)
    page.reload()
    expect(users.locator(".bubble")).to_have_text(["Say after me: one", "Say after me: two"])
    users.first.get_by_role("button", name="Later version").click()
    expect(users.locator(".bubble")).to_have_text(["Say after me: three"])
    expect(answers(page).last).to_contain_text("2/2")


def test_conversations_are_exported_and_imported(visit: Visit, tmp_path: Path) -> None:
    page = visit.page
    set_up(page, System_prompt="Be brief.", Temperature="0")
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Attach pictures or videos").click()
    chooser.value.set_files([{"name": "red.png", "mimeType": "image/png", "buffer": circle(RED)}])
    text = say(page, "What is this?").locator(".prose").inner_text()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    file = tmp_path / "chats.json"
    download.value.save_as(file)
    more(page, "Delete")
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(conversations(page)).to_have_count(0)

    import_file(page, file)
    expect(conversations(page)).to_have_text(["What is this?"])
    expect(answers(page).locator(".prose")).to_have_text(text)
    expect(page.get_by_role("article", name="You").get_by_role("img", name="red.png")).to_be_visible()
    page.get_by_role("button", name="Settings of this conversation").click()
    expect(page.get_by_label("System prompt")).to_have_value("Be brief.")


def test_a_file_that_holds_no_conversations_is_refused(visit: Visit, tmp_path: Path) -> None:
    for number, content in enumerate(("no json", "[]", "null", '{"format": "headrace-chats", "chats": {}}')):
        file = tmp_path / f"{number}.json"
        file.write_text(content)
        import_file(visit.page, file)
        expect(visit.page.locator(".composer").get_by_role("alert")).to_contain_text("The file")
        expect(conversations(visit.page)).to_have_count(0)
