"""Messages between ranks, over real connections on the loopback interface."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import AuthenticationError

import pytest

from headrace.errors import EngineDead
from headrace.ranks.channel import Meeting, Ranks, join
from headrace.ranks.layout import read_layout
from headrace.ranks.start import Invitation, read_invitation


@contextmanager
def met(size: int) -> Iterator[list[Ranks]]:
    layout = read_layout(str(size), "ring")
    meeting = Meeting(layout)
    with ThreadPoolExecutor(size) as threads:
        joining = [threads.submit(join, meeting.address, rank, layout) for rank in range(1, size)]
        ranks = [meeting.gather(), *(one.result() for one in joining)]
        meeting.close()
        try:
            yield ranks
        finally:
            for each in ranks:
                each.close()


def test_all_ranks_get_every_rank_s_value_and_rank_0_s_first() -> None:
    with met(3) as ranks, ThreadPoolExecutor(3) as threads:
        assert list(threads.map(lambda each: each.all(each.rank * 10), ranks)) == [[0, 10, 20]] * 3
        assert list(threads.map(lambda each: each.first(f"of {each.rank}"), ranks)) == ["of 0"] * 3
        assert len(set(threads.map(Ranks.clock, ranks))) == 1


def test_messages_come_in_order_and_are_counted() -> None:
    with met(2) as (first, second):
        for number in range(100):
            first.tell((number, "x" * number))
        assert [second.hear() for _ in range(100)] == [(number, "x" * number) for number in range(100)]
        assert first.traffic.num_messages == 100
        assert first.traffic.num_bytes > sum(range(100))


def test_each_rank_gets_what_the_others_report() -> None:
    with met(3) as ranks:
        assert ranks[0].reports == [None, None]
        for each in ranks[1:]:
            each.report(partial(str, each.rank))
        until = time.monotonic() + 30
        while ranks[0].reports != ["1", "2"]:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert ranks[1].reports == [None]  # rank 0 reports nothing


def test_a_rank_that_leaves_is_no_failure_and_one_that_ends_is() -> None:
    ended = threading.Event()
    with met(2) as (first, second):
        second.watch(lambda reason: ended.set())
        first.leave()
        assert second.hear() is None
        assert second.has_ended_well
        assert not ended.wait(0.5)
    reasons: list[str] = []
    with met(2) as (first, second):
        second.watch(lambda reason: (reasons.append(reason), ended.set()))
        first.close()
        assert ended.wait(30)
        assert reasons == ["rank 0 has ended"]
        with pytest.raises(EngineDead, match="rank 0 has ended"):
            second.hear()
        assert not second.has_ended_well
    late: list[str] = []
    second.watch(late.append)  # it may end before anybody watches
    assert late == [] or late == ["rank 0 has ended"]


def test_a_rank_that_fails_tells_the_others_why() -> None:
    heard: list[str] = []
    with met(2) as (first, second):
        first.watch(heard.append)
        second.fail("its model is missing")
        with pytest.raises(EngineDead, match="rank 1: its model is missing"):
            first.all(0)
        assert heard == ["rank 1: its model is missing"]


def test_strangers_are_not_let_in() -> None:
    layout = read_layout("2", "ring")
    meeting = Meeting(layout)
    with ThreadPoolExecutor(3) as threads:
        gathering = threads.submit(meeting.gather)
        with pytest.raises((AuthenticationError, EOFError, OSError)):
            join(replace(meeting.address, key="wrong"), 1, layout)
        with socket.create_connection((meeting.address.host, meeting.address.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        second = threads.submit(join, meeting.address, 1, layout).result(30)
        first = gathering.result(30)
        first.tell("welcome")
        assert second.hear() == "welcome"
        first.close()
        second.close()
        meeting.close()


def test_an_invitation_is_read_back_from_its_line() -> None:
    layout = read_layout("2", "ring")
    meeting = Meeting(layout)
    invitation = Invitation(1, meeting.address, layout)
    meeting.close()
    assert read_invitation(invitation.line()) == invitation
