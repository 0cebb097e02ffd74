"""The engine view of a model that is split over ranks, in a browser, with a real server."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import httpx
from attack.running import RunningServer, running_server
from page.visits import open_visit
from playwright.sync_api import Browser, expect

QUESTION = {"messages": [{"role": "user", "content": "What is 12 plus 30?"}], "max_tokens": 8}


def test_ranks_are_shown_with_their_memory_and_their_time_in_collectives(browser: Browser, tmp_path: Path) -> None:
    with running_server(tmp_path, "--ranks", "2") as server:
        httpx.post(f"{server.url}/v1/chat/completions", json=QUESTION, timeout=60).raise_for_status()
        visit = open_visit(browser, server.url, "/#/engine", viewport={"width": 390, "height": 844})
        panel = visit.page.get_by_role("region", name="Ranks")
        expect(panel).to_contain_text("2 ranks share the model over ring")
        expect(panel).to_contain_text(re.compile(r"Collectives: 16 in a forward, about \d+ % of the time of steps"))
        rows = panel.get_by_role("row").filter(has=visit.page.get_by_role("cell"))
        expect(rows).to_have_count(2)
        for rank in range(2):
            expect(rows.nth(rank)).to_contain_text(f"{rank}{socket.gethostname()}")
            expect(rows.nth(rank)).to_contain_text(re.compile(r"[\d.]+ MB used, [\d.]+ GB available of [\d.]+ GB"))
        assert visit.page.evaluate("document.querySelector('.engine').scrollWidth <= innerWidth")
        visit.context.close()
        visit.check()


def test_a_model_on_one_device_has_no_ranks(browser: Browser, server: RunningServer) -> None:
    visit = open_visit(browser, server.url, "/#/engine")
    expect(visit.page.get_by_text("Live", exact=True)).to_be_visible()
    expect(visit.page.get_by_role("heading", name="Ranks")).to_be_hidden()
    visit.context.close()
    visit.check()
