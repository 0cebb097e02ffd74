"""Compiling and checking beside the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest
from fakes import PlainTemplate, thinking_family
from grammar.call_answers import ByteTokenizer

from headrace.errors import Overloaded
from headrace.grammar import factory as factories
from headrace.grammar.compile import OutputForm
from headrace.grammar.factory import NUM_KEPT, ConstraintFactory
from headrace.grammar.vocabulary import Vocabulary
from headrace.session import bounded_work
from headrace.session.bounded_work import BoundedWork
from headrace.session.constraint import ChatConstraints
from headrace.text.fences import LineTracker
from headrace.types.chat import ChatMessage, ChatRequest, Structure, TextPart


def test_no_more_calls_run_at_once_than_there_are_threads_and_no_more_wait_than_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounded_work, "MAX_WAITING", 3)
    go_on, running, most = threading.Event(), [0], [0]

    def call(number: int) -> int:
        running[0] += 1
        most[0] = max(most[0], running[0])
        assert go_on.wait(30)
        running[0] -= 1
        return number

    async def ask() -> list[int | BaseException]:
        work = BoundedWork(1)
        tasks = [asyncio.create_task(work.run(call, number)) for number in range(5)]
        await asyncio.sleep(0)
        tasks[2].cancel()
        await asyncio.sleep(0)
        assert work.start(call, 9)  # the cancelled one has made room
        await asyncio.sleep(0)
        assert not work.start(call, 10)
        go_on.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, second, third, *refused = asyncio.run(ask())
    assert (first, second) == (0, 1)
    assert isinstance(third, asyncio.CancelledError)
    assert [type(each) for each in refused] == [Overloaded, Overloaded]
    assert most == [1]


def test_a_grammar_that_others_take_the_place_of_meanwhile_is_not_compiled_on_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    factory = ConstraintFactory(Vocabulary(ByteTokenizer(())), LineTracker)
    constraints = ChatConstraints(thinking_family(), PlainTemplate(), factory)
    request = ChatRequest("r", (ChatMessage("user", (TextPart("?"),)),), structure=Structure("regex", "first"))
    prompt = PlainTemplate().render(request)
    compiled_by: list[threading.Thread] = []
    compiled_grammar, known = factories.compiled_grammar, factory.known

    def compiled(*args: object) -> object:
        compiled_by.append(threading.current_thread())
        return compiled_grammar(*args)

    def known_and_crowded_out(form: OutputForm, *rest: object) -> object:
        found = known(form, *rest)
        for number in range(NUM_KEPT):
            factory.output(OutputForm(Structure("regex", f"other {number}"), None, None, None))
        return found

    monkeypatch.setattr(factories, "compiled_grammar", compiled)

    async def ask() -> object:
        first, _ = await constraints.spec(request, prompt)
        monkeypatch.setattr(factory, "known", known_and_crowded_out)
        second, _ = await constraints.spec(request, prompt)
        assert first == second
        return second

    assert asyncio.run(ask())
    assert len(compiled_by) == 1 + NUM_KEPT
    assert threading.current_thread() not in compiled_by
