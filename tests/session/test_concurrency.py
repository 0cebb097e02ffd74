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
from headrace.session import concurrency
from headrace.session.concurrency import BoundedExecutor
from headrace.session.constraint import ChatConstraints
from headrace.types.chat import ChatMessage, ChatRequest, Structure, TextPart


def test_no_more_calls_run_at_once_than_there_are_threads_and_no_more_wait_than_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(concurrency, "MAX_CALLS", 3)
    go_on, running, most = threading.Event(), [0], [0]

    def call(number: int) -> int:
        running[0] += 1
        most[0] = max(most[0], running[0])
        assert go_on.wait(30)
        running[0] -= 1
        return number

    async def ask() -> list[int | BaseException]:
        work = BoundedExecutor(1, "test", "too many")
        tasks = [asyncio.create_task(work.run(call, number)) for number in range(5)]
        await asyncio.sleep(0)
        tasks[2].cancel()
        await asyncio.sleep(0)
        assert work.start_in_background(call, 9)  # the cancelled one has left
        await asyncio.sleep(0)
        assert not work.start_in_background(call, 10)
        go_on.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, second, third, *refused = asyncio.run(ask())
    assert (first, second) == (0, 1)
    assert isinstance(third, asyncio.CancelledError)
    assert [type(each) for each in refused] == [Overloaded, Overloaded]
    assert most == [1]


def test_a_gate_without_a_refusal_lets_any_number_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "MAX_CALLS", 1)

    async def ask() -> list[int]:
        executor = BoundedExecutor(1, "test")
        return await asyncio.gather(*(executor.run(abs, -number) for number in range(5)))

    assert asyncio.run(ask()) == list(range(5))


def test_what_another_call_has_brought_meanwhile_is_not_made_again() -> None:
    made: dict[str, int] = {}
    calls = []

    def make() -> int:
        calls.append(threading.current_thread().name)
        return 7

    async def ask(executor: BoundedExecutor) -> int:
        made["key"] = await executor.run(make, unless=lambda: made.get("key"))
        return made["key"]

    async def ask_all() -> list[int]:
        executor = BoundedExecutor(1, "gate")
        return await asyncio.gather(*(ask(executor) for _ in range(4)))

    assert asyncio.run(ask_all()) == [7] * 4
    assert len(calls) == 1
    assert calls[0].startswith("gate")  # not a thread that other work of the event loop waits for


def test_a_grammar_that_others_take_the_place_of_meanwhile_is_not_compiled_on_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    factory = ConstraintFactory(Vocabulary(ByteTokenizer(())))
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
