"""Ids that say which replica made them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.api.ids import name_replica, new_id, replica_of
from headrace.server.bookkeeping import LiveRequests


@pytest.fixture
def replica() -> Iterator[str]:
    name_replica("k3x9qa0z")
    yield "k3x9qa0z"
    name_replica("")


def test_ids_of_a_replica_name_it(replica: str) -> None:
    assert replica_of(new_id("resp_", 24)) == replica
    assert replica_of(LiveRequests().admit(None)) == replica
    # as the engine numbers the prompts of one request
    assert replica_of(f"{new_id('cmpl-')}-11") == replica


@pytest.mark.parametrize("id", ["my-request", "", "-r", "chatcmpl-0"])
def test_a_clients_own_id_names_none(id: str) -> None:
    assert replica_of(id) is None


def test_an_id_of_a_server_without_replicas_names_none() -> None:
    assert replica_of(new_id("resp_", 24)) is None
    assert replica_of(f"{new_id('cmpl-')}-1") is None


def test_an_id_of_a_replica_is_as_short_as_openai_allows(replica: str) -> None:
    """Items that are sent back may have ids of 64 characters."""
    assert len(new_id("resp_", 24)) <= 64
