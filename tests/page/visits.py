"""Pages of a server in a browser, watched for what must never happen."""

from __future__ import annotations

from dataclasses import dataclass, field

from playwright.sync_api import Browser, BrowserContext, Page, Route


@dataclass
class Visit:
    """A page in an empty profile. A request to another origin, an error and a dialog of a script are recorded."""

    page: Page
    context: BrowserContext
    url: str
    strangers: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def check(self) -> None:
        assert self.strangers == []
        assert self.complaints == []


def open_visit(browser: Browser, url: str, path: str = "/", **settings: object) -> Visit:
    context = browser.new_context(**settings)  # type: ignore[arg-type]
    context.set_default_timeout(10_000)
    visit = Visit(context.new_page(), context, url)

    def judge(route: Route) -> None:
        if route.request.url.startswith((url, "blob:", "data:")):
            route.fallback()
        else:
            visit.strangers.append(route.request.url)
            route.abort()

    context.route("**/*", judge)
    watch(visit, visit.page)
    visit.page.goto(url + path)
    return visit


def watch(visit: Visit, page: Page) -> None:
    page.on("pageerror", lambda error: visit.complaints.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (visit.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on(
        "console",
        lambda message: (
            visit.complaints.append(f"console: {message.text}")
            if message.type == "error" and "Failed to load resource" not in message.text
            else None
        ),
    )
