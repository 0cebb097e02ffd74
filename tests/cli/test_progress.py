"""The line that rewrites itself."""

from __future__ import annotations

import asyncio
import io
import logging
import threading
from pathlib import Path

import pytest
from fakes import FakeEngine, fake_session, models_of

from headrace.cli.progress import PromptProgress, loading_progress, preparing_text, show_prompts
from headrace.cli.progress_line import ProgressLine, Waiting
from headrace.config import Config
from headrace.session.model_entry import ModelEntry, ModelSource
from headrace.session.models import Models
from headrace.types.model import ModelOutline
from headrace.types.status import EngineStatus, Phase, RequestStatus

CLEAR = "\r\x1b[K"


class Terminal(io.StringIO):
    def __init__(self, *, is_terminal: bool = True) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def prompt(id: str, computed: int, total: int, cached: int = 0, phase: Phase = Phase.PREFILL) -> RequestStatus:
    return RequestStatus(id, phase, total, computed, cached, 0, 0.0, 99.0, "", 0)


def test_share_speed_and_time_left_follow_from_two_looks() -> None:
    progress = PromptProgress()
    # 4,000 of the 10,000 tokens were cached, so they say nothing about the speed.
    assert progress.text([prompt("a", 4000, 10_000, 4000)], 100.0) == ""
    # 2,000 tokens in 4 s: 500 a second, and 4,000 more take 8 s.
    said = progress.text([prompt("a", 6000, 10_000, 4000)], 104.0)
    assert said == "prompt: 6000 of 10000 tokens, 60%, 500 tokens/s, 8 s left"


def test_short_prompts_and_other_phases_show_nothing() -> None:
    progress = PromptProgress()
    waiting = [prompt("a", 0, 50_000, phase=Phase.QUEUED), prompt("b", 9, 9, phase=Phase.DECODE)]
    for now in (0.0, 10.0):
        assert progress.text(waiting, now) == ""
    assert progress.text([prompt("a", 1, 50_000)], 11.0) == ""
    assert progress.text([prompt("a", 1, 50_000)], 11.5) == ""
    assert progress.text([], 12.0) == ""
    # Its time begins anew after it was gone.
    assert progress.text([prompt("a", 1, 50_000)], 13.0) == ""


def test_of_several_the_longest_is_shown_and_the_others_are_counted() -> None:
    progress = PromptProgress()
    both = [prompt("a", 100, 1000), prompt("b", 100, 9000)]
    progress.text(both, 0.0)
    assert progress.text(both, 2.0) == "prompt: 100 of 9000 tokens, 1%; 1 more"


def test_the_line_is_rewritten_cut_and_cleared() -> None:
    out = Terminal()
    line = ProgressLine(out)
    line.show("one")
    line.show("x" * 200)
    line.clear()
    line.clear()
    assert out.getvalue() == f"{CLEAR}one{CLEAR}{'x' * 79}{CLEAR}"


def test_where_there_is_no_terminal_nothing_is_written() -> None:
    out = Terminal(is_terminal=False)
    with Waiting(lambda seconds: "loading", ProgressLine(out)):
        pass
    assert out.getvalue() == ""


def test_log_lines_come_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    out, shown = Terminal(), threading.Event()
    handler = logging.StreamHandler(out)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])

    def text(seconds: float) -> str:
        shown.set()
        return "loading"

    with Waiting(text, ProgressLine(out)):
        assert shown.wait(30)
        logging.getLogger("headrace").warning("a word")
    assert handler.filters == []
    # What a terminal shows of each line comes behind its last return to the start.
    assert [line.rpartition(CLEAR)[2] for line in out.getvalue().split("\n")] == ["a word", ""]


def test_a_dead_engine_ends_the_watch_and_a_live_one_is_asked_until_it_is_cancelled() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        watch = asyncio.create_task(show_prompts(models_of(fake_session(engine)), ProgressLine(Terminal())))
        await asyncio.sleep(0)
        watch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watch
        engine.health = lambda: "gone"  # type: ignore[method-assign]
        await asyncio.wait_for(show_prompts(models_of(fake_session(engine)), ProgressLine(Terminal())), 30)

    asyncio.run(scenario())


def test_the_watch_goes_on_beside_an_engine_that_is_dead() -> None:
    async def scenario() -> None:
        dead, live = FakeEngine(), FakeEngine()
        dead.sick = "gone"
        asked = asyncio.Event()

        async def status() -> EngineStatus:
            asked.set()
            return await FakeEngine().status()

        live.status = status  # type: ignore[method-assign]
        source = ModelSource("x", lambda: 0, lambda share: fake_session(live), ModelOutline)
        models = Models([ModelEntry((name,), source) for name in "ab"], 10_000)
        for entry, engine in zip(models.entries, (dead, live), strict=True):
            entry.session = fake_session(engine)
        watch = asyncio.create_task(show_prompts(models, ProgressLine(Terminal())))
        await asyncio.wait_for(asked.wait(), 30)
        asked.clear()
        await asyncio.wait_for(asked.wait(), 30)
        watch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watch

    asyncio.run(scenario())


def test_preparing_shows_its_seconds(tmp_path: Path) -> None:
    for name in ("smollm2", "owner/name"):
        assert preparing_text(Config(name))(3.2) == f"preparing {name}: 3 s"
    assert preparing_text(Config(str(tmp_path)))(3.2) == f"preparing {tmp_path}: 3 s"


def test_loading_tells_share_size_and_time_left() -> None:
    gb = 1_000_000_000
    # 1 GB in 4 s: 3 more take 12 s.
    assert loading_progress(1 * gb, 4 * gb, 4.0) == "25% of 4.00 GB, 12 s left"
    assert loading_progress(0, 4 * gb, 4.0) == "0% of 4.00 GB, 4 s"
    # A speed from less than a second is noise.
    assert loading_progress(1 * gb, 4 * gb, 0.5) == "25% of 4.00 GB, 0 s"
    # The self-check's own arrays come on top.
    assert loading_progress(5 * gb, 4 * gb, 9.0) == "4.00 GB in memory, checking, 9 s"
