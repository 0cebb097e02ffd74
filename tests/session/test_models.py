"""Which model a request means, and when models are loaded and unloaded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from fakes import FakeEngine, fake_session

from headrace.cancellation import check_cancelled
from headrace.errors import InvalidRequest, ModelError, ModelNotFound, ModelUnavailable, RequestCancelled
from headrace.session.embeddings import AnySession
from headrace.session.model_entry import ModelEntry, ModelSource
from headrace.session.models import Models
from headrace.session.session import Session
from headrace.types.memory import MemoryShare, ModelMemory
from headrace.types.model import ModelOutline
from headrace.types.model_status import ModelState
from headrace.types.status import WaitReason

NAMES = ("small", "org/Small-1B")


def entry(name: str, word: str = "") -> ModelEntry:
    source = ModelSource(word or name, lambda: 0, lambda share: fake_session(FakeEngine()), ModelOutline)
    return ModelEntry((name,), source)


def of(takes_any_name: bool) -> Models:
    return Models.of(fake_session(FakeEngine()), NAMES, takes_any_name=takes_any_name)


def test_an_answer_carries_the_asked_name_if_it_is_served_else_the_first() -> None:
    models = of(takes_any_name=True)
    for asked, shown in (("org/Small-1B", "org/Small-1B"), ("gpt-9", "small"), (None, "small")):
        assert models.resolve(asked).name == shown


def test_other_names_are_refused_with_the_list() -> None:
    models = of(takes_any_name=False)
    assert models.resolve("small").name == "small"
    with pytest.raises(ModelNotFound, match="gpt-9.*small, org/Small-1B") as refused:
        models.resolve("gpt-9")
    assert refused.value.param == "model"


def test_a_request_without_a_name_means_the_only_model_but_never_one_of_several() -> None:
    assert of(takes_any_name=False).resolve(None).name == "small"
    several = Models([entry("a"), entry("b")])
    with pytest.raises(InvalidRequest, match="served: a, b"):
        several.resolve(None)
    with pytest.raises(InvalidRequest):
        Models([entry("a")], needs_name=True).resolve(None)


def test_the_word_of_the_command_line_names_a_model_too() -> None:
    models = Models([entry("headrace-miniature", "miniature")])
    assert models.resolve("miniature").name == "headrace-miniature"


class Shelf:
    """Models of 500 bytes of weights and 100 of least state each, of which `total` bytes hold some.

    engines: those loaded so far, by name. Loads wait for `may_load`, and fail with `failure`.
    """

    def __init__(self, total: int, *names: str, keep: tuple[str, ...] = (), idle_s: float | None = None) -> None:
        self.engines: dict[str, list[FakeEngine]] = {name: [] for name in names}
        self.failure: ModelError | None = None
        self.shares: list[MemoryShare | None] = []
        entries = [
            ModelEntry((name,), self._source(name), is_kept=name in keep, idle_unload_s=idle_s) for name in names
        ]
        self.models = Models(entries, total, drain_after_s=0.05)

    def _source(self, name: str) -> ModelSource:
        def load(share: MemoryShare | None) -> Session:
            self.shares.append(share)
            if self.failure is not None:
                raise self.failure
            self.engines[name].append(FakeEngine("hi"))
            return fake_session(self.engines[name][-1])

        return ModelSource(name, lambda: 500, load, ModelOutline)

    def entry(self, name: str) -> ModelEntry:
        return self.models.resolve(name).entry

    async def touch(self, name: str, number: int = 0) -> None:
        async with self.models.use(self.entry(name), f"touch {name}{number or ''}"):
            pass

    @property
    def loaded(self) -> list[str]:
        return [entry.name for entry, _ in self.models.loaded()]


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_the_least_recently_used_model_gives_way_and_a_kept_one_never() -> None:
    shelf = Shelf(1300, "a", "b", "c", "kept", keep=("kept",))

    async def scenario() -> None:
        for name, loaded in (("a", ["a"]), ("b", ["a", "b"]), ("a", ["a", "b"]), ("c", ["a", "c"])):
            await shelf.touch(name)
            assert shelf.loaded == loaded
        await shelf.touch("kept")
        for name in ("a", "b", "c"):
            await shelf.touch(name)
            assert shelf.loaded == [name, "kept"]
        assert all(engine.stopped for engine in (*shelf.engines["b"], shelf.engines["a"][0]))

    play(scenario)


def test_budgets_add_up_to_the_memory_and_none_is_under_what_a_context_needs() -> None:
    shelf = Shelf(10_000, "a", "b", "c")

    async def scenario() -> None:
        for name in ("a", "b", "c"):
            await shelf.touch(name)
            live = [engines[-1] for engines in shelf.engines.values() if engines]
            assert sum(500 + engine.budget_bytes for engine in live) <= 10_000
            assert all(engine.budget_bytes >= 100 for engine in live)
        assert [engine.budget_bytes for engine in live] == [(10_000 - 3 * 500) // 3] * 3
        await shelf.models.unload(shelf.entry("b"))
        assert shelf.engines["a"][0].budget_bytes == (10_000 - 2 * 500) // 2

    play(scenario)


def test_a_model_never_gives_way_while_it_serves_and_new_requests_wait_for_the_other_one() -> None:
    shelf = Shelf(700, "a", "b")

    async def scenario() -> None:
        async with shelf.models.use(shelf.entry("a"), "first"):
            waiting = asyncio.create_task(shelf.touch("b"))
            while not shelf.entry("a").is_draining:
                await asyncio.sleep(0.01)
            (shown,) = shelf.models.waiting(shelf.entry("b"))
            assert (shown.request_id, shown.waits_for) == ("touch b", WaitReason.MODEL)
            later = asyncio.create_task(shelf.touch("a"))
            await asyncio.sleep(0.05)
            assert shelf.loaded == ["a"]
            assert not shelf.engines["a"][0].stopped
        await waiting
        await later
        assert (len(shelf.engines["a"]), len(shelf.engines["b"])) == (2, 1)
        assert shelf.loaded == ["a"]

    play(scenario)


def test_a_waiting_request_is_cancelled_by_its_id() -> None:
    shelf = Shelf(700, "a", "b")

    async def scenario() -> None:
        async with shelf.models.use(shelf.entry("a"), "first"):
            waiting = asyncio.create_task(shelf.touch("b"))
            await asyncio.sleep(0.02)
            assert await shelf.models.abort("touch b")
            with pytest.raises(RequestCancelled):
                await waiting
            assert not await shelf.models.abort("touch b")

    play(scenario)


def test_a_model_that_cant_fit_beside_kept_ones_is_refused_with_the_sizes() -> None:
    shelf = Shelf(1000, "kept", "b", keep=("kept",))

    async def scenario() -> None:
        await shelf.touch("kept")
        with pytest.raises(ModelUnavailable, match="kept loaded"):
            await shelf.touch("b")
        assert shelf.entry("b").state is ModelState.FAILED
        assert shelf.loaded == ["kept"]

    play(scenario)


def test_a_failed_load_touches_no_other_model_and_is_tried_again_on_request() -> None:
    shelf = Shelf(10_000, "a", "b")

    async def scenario() -> None:
        await shelf.touch("a")
        shelf.failure = ModelError("no weights")
        for _ in range(2):
            with pytest.raises(ModelUnavailable, match="no weights"):
                await shelf.touch("b")
        assert len(shelf.shares) == 2, "the second request gets the first one's error"
        assert (shelf.loaded, shelf.models.health()) == (["a"], None)
        shelf.failure = None
        await shelf.models.load(shelf.entry("b"))
        assert (shelf.loaded, shelf.entry("b").reason) == (["a", "b"], None)

    play(scenario)


def test_a_dead_engine_is_removed_and_the_others_go_on() -> None:
    shelf = Shelf(10_000, "a", "b")

    async def scenario() -> None:
        await shelf.touch("a")
        await shelf.touch("b")
        shelf.engines["a"][0].sick = "it fell"
        shelf.models.tick()
        while shelf.loaded != ["b"]:
            await asyncio.sleep(0.01)
        assert "it fell" in str(shelf.entry("a").status().reason)
        assert shelf.models.health() is None
        await shelf.models.load(shelf.entry("a"))
        assert shelf.loaded == ["a", "b"]

    play(scenario)


def test_an_idle_model_is_unloaded_but_not_while_it_serves() -> None:
    shelf = Shelf(10_000, "a", "b", idle_s=0.05)

    async def scenario() -> None:
        async with shelf.models.use(shelf.entry("a"), "long"):
            await asyncio.sleep(0.1)
            shelf.models.tick()
            await asyncio.sleep(0.05)
            assert shelf.loaded == ["a"]
        while shelf.loaded:
            shelf.models.tick()
            await asyncio.sleep(0.01)
        assert shelf.entry("a").state is ModelState.SLEEPING
        await shelf.touch("a")

    play(scenario)


def test_an_idle_model_is_unloaded_by_one_task_however_long_another_is_loaded() -> None:
    shelf = SlowShelf(10_000, "a", "b")

    async def scenario() -> None:
        a = shelf.entry("a")
        for _ in range(2):
            shelf.may_end.set()
            await shelf.touch("a")
            shelf.may_end.clear()
            shelf.begun.clear()
            a.idle_unload_s = 0.0
            other = asyncio.create_task(shelf.touch("b"))
            await shelf.has_begun("b")
            before = len(asyncio.all_tasks())
            for _ in range(20):
                shelf.models.tick()
            assert len(asyncio.all_tasks()) == before + 1
            shelf.may_end.set()
            await other
            while "a" in shelf.loaded:
                shelf.models.tick()
                await asyncio.sleep(0.01)
            await shelf.models.unload(shelf.entry("b"))

    play(scenario)


def test_a_model_that_serves_is_not_unloaded_by_hand() -> None:
    shelf = Shelf(10_000, "a", "b")

    async def scenario() -> None:
        async with shelf.models.use(shelf.entry("a"), "r"):
            with pytest.raises(InvalidRequest, match="serves 1 request"):
                await shelf.models.unload(shelf.entry("a"))
        await shelf.models.unload(shelf.entry("a"))
        assert shelf.loaded == []

    play(scenario)


def test_the_room_for_a_model_is_what_the_others_leave() -> None:
    shelf = Shelf(2_000, "a", "b")

    async def scenario() -> None:
        await shelf.touch("a")
        shelf.engines["a"][0].memory = ModelMemory(500, 300, 10_000)
        await shelf.touch("b")
        share = shelf.shares[-1]
        assert share is not None
        assert 500 + 300 + share.num_bytes <= 2_000
        assert (share.process_bytes, share.loaded_bytes) == (2_000, 500)

    play(scenario)


def test_a_model_whose_size_is_unknown_gets_room_too() -> None:
    shelf = Shelf(10_000, "a", "b")
    source = ModelSource("b", lambda: 0, shelf.entry("b").source.load, ModelOutline)
    shelf.entry("b").source = source

    async def scenario() -> None:
        await shelf.touch("a")
        await shelf.touch("b")
        assert shelf.loaded == ["a", "b"]

    play(scenario)


class SlowShelf(Shelf):
    """Loads end once `may_end` is set, or when they are cancelled."""

    def __init__(self, total: int, *names: str) -> None:
        super().__init__(total, *names)
        self.may_end = threading.Event()
        self.begun: list[str] = []
        for entry in self.models.entries:
            entry.source = replace(entry.source, load=partial(self._slowly, entry.name, entry.source.load))

    def _slowly(self, name: str, load: Callable[[MemoryShare | None], AnySession], share: MemoryShare | None) -> Any:
        self.begun.append(name)
        while not self.may_end.wait(0.005):
            check_cancelled()
        return load(share)

    async def has_begun(self, name: str) -> None:
        while name not in self.begun:
            await asyncio.sleep(0.005)

    async def leave(self, *requests: asyncio.Task[None]) -> None:
        """Their clients disconnect."""
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)


def test_a_load_without_clients_goes_on_until_another_model_is_wanted() -> None:
    shelf = SlowShelf(10_000, "a", "b")

    async def scenario() -> None:
        impatient = [asyncio.create_task(shelf.touch("a", number)) for number in range(2)]
        await shelf.has_begun("a")
        await shelf.leave(*impatient)
        await asyncio.sleep(0.05)
        assert shelf.entry("a").state is ModelState.LOADING, "for a client that asks again"
        other = asyncio.create_task(shelf.touch("b"))
        await shelf.has_begun("b")
        assert (shelf.entry("a").state, shelf.entry("a").loading_since) == (ModelState.SLEEPING, None)
        shelf.may_end.set()
        await other
        assert shelf.loaded == ["b"]
        await shelf.touch("a")
        assert shelf.loaded == ["a", "b"]

    play(scenario)


def test_a_load_that_clients_wait_for_is_not_cancelled_for_another() -> None:
    shelf = SlowShelf(10_000, "a", "b")

    async def scenario() -> None:
        patient, leaving = (asyncio.create_task(shelf.touch("a", number)) for number in range(2))
        await shelf.has_begun("a")
        other = asyncio.create_task(shelf.touch("b"))
        await shelf.leave(leaving)
        await asyncio.sleep(0.05)
        assert shelf.begun == ["a"]
        shelf.may_end.set()
        await asyncio.gather(patient, other)
        assert shelf.loaded == ["a", "b"]

    play(scenario)


def test_a_request_for_a_model_whose_load_is_being_cancelled_loads_it_again() -> None:
    shelf = SlowShelf(10_000, "a", "b")

    async def scenario() -> None:
        leaving = asyncio.create_task(shelf.touch("a"))
        await shelf.has_begun("a")
        await shelf.leave(leaving)
        other = asyncio.create_task(shelf.touch("b"))
        await asyncio.sleep(0)  # it has cancelled the load, which has not ended yet
        again = asyncio.create_task(shelf.touch("a"))
        shelf.may_end.set()
        await asyncio.gather(other, again)
        assert shelf.loaded == ["a", "b"]

    play(scenario)


def test_a_load_that_waits_for_memory_ends_with_its_last_client() -> None:
    shelf = SlowShelf(700, "a", "b")
    shelf.may_end.set()

    async def scenario() -> None:
        async with shelf.models.use(shelf.entry("a"), "long"):
            leaving = asyncio.create_task(shelf.touch("b"))
            await asyncio.sleep(0.02)
            await shelf.leave(leaving)
            while shelf.entry("b").state is not ModelState.SLEEPING:
                await asyncio.sleep(0.005)
        await shelf.touch("a")
        assert shelf.begun == ["a"], "it has not been unloaded for the one that left"

    play(scenario)


def test_a_load_is_ended_by_hand_unless_requests_wait_for_it() -> None:
    shelf = SlowShelf(10_000, "a")

    async def scenario() -> None:
        a = shelf.entry("a")
        request, operator = asyncio.create_task(shelf.touch("a")), asyncio.create_task(shelf.models.load(a))
        await shelf.has_begun("a")
        with pytest.raises(InvalidRequest, match="a is loaded for 1 request:"):
            await shelf.models.unload(a)
        await shelf.leave(request)
        await shelf.models.unload(a)
        with pytest.raises(RequestCancelled, match="loading a was cancelled"):
            await operator
        assert (a.state, shelf.loaded, shelf.models.waiting(a)) == (ModelState.SLEEPING, [], ())

    play(scenario)
