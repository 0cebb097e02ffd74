"""What users do in the chat, by what they see: labels, roles and texts."""

from __future__ import annotations

import re
from pathlib import Path

from playwright.sync_api import Locator, Page, expect


def field(page: Page) -> Locator:
    return page.get_by_label("Message", exact=True)


def answers(page: Page) -> Locator:
    return page.get_by_role("article", name="Answer of")


def say(page: Page, text: str) -> Locator:
    """Send a message. The answer's element, complete."""
    count = answers(page).count()
    field(page).fill(text)
    field(page).press("Enter")
    return complete(page, count + 1)


def complete(page: Page, count: int = 1) -> Locator:
    """The last of this many answers, complete."""
    expect(answers(page)).to_have_count(count)
    answer = answers(page).last
    for each in (answer, answer.locator(".prose")):
        expect(each).to_have_attribute("aria-busy", "false", timeout=20_000)
    return answer


def set_up(page: Page, **values: str) -> None:
    """Fill fields of the conversation's settings by their labels."""
    page.get_by_role("button", name="Settings of this conversation").click()
    for label, value in values.items():
        box = page.get_by_role("dialog").get_by_label(re.compile(f"^{label.replace('_', ' ')}"))
        if label == "Thinking":
            box.select_option(value)
        else:
            box.fill(value)
    page.get_by_role("button", name="Save").click()


def conversations(page: Page) -> Locator:
    return page.get_by_role("navigation", name="Conversations").get_by_role("link")


def more(page: Page, action: str) -> None:
    page.get_by_role("button", name="More about this conversation").click()
    page.get_by_role("button", name=action, exact=True).click()


def import_file(page: Page, file: Path) -> None:
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Import").click()
    chooser.value.set_files(file)
