"""GET /v1/loads: SGLang's fields, computed by hand from a status."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.api.loads_body import loads_body, read_sections
from headrace.errors import InvalidRequest, UnsupportedField
from headrace.types.recent import StepHistory
from headrace.types.status import (
    CacheStatus,
    Counters,
    DeviceStatus,
    DraftCounters,
    DraftStatus,
    EngineStatus,
    Histogram,
    MemoryStatus,
    Phase,
    RequestStatus,
)

NONE = Histogram((1.0,), (0, 0), 0.0)
REQUESTS = tuple(
    RequestStatus(phase, phase, num_prompt, num_computed, 0, 0, 0.0, 1.0, "", 0)
    for phase, num_prompt, num_computed in (
        (Phase.QUEUED, 700, 0),
        (Phase.PREFILL, 100, 40),
        (Phase.DECODE, 50, 60),
        (Phase.PREEMPTED, 20, 25),
    )
)
STATUS = EngineStatus(
    num_running=2,
    num_waiting=2,
    requests=REQUESTS,
    memory=MemoryStatus(4 << 30, 3 << 29, 1 << 30, 0, 0, 0, 0, 0, 0, capacity_tokens=5000),
    counters=Counters(0, 0, 0, 0, 0, (), DraftCounters(10, 40, (8, 4)), NONE, NONE, NONE, NONE),
    cache=CacheStatus(0, 0, 0, 0, 9, 5, 800, 200),
    drafts=DraftStatus(4, 0),
    max_num_seqs=8,
    device=DeviceStatus("cuda", "a card", 1, 1),
    history=StepHistory(start=5, num_output_tokens=(1, 70, 3)),
)


def body(include: str = "all", status: EngineStatus = STATUS) -> dict[str, object]:
    return loads_body(status, read_sections({"include": include}), version="9", now=1.5)


def test_the_load_counts_requests_tokens_and_memory() -> None:
    told = body()
    assert (told["version"], told["accelerator"], told["num_accelerators"]) == ("9", "a card", 1)
    assert told["timestamp"] == "1970-01-01T00:00:01.500000+00:00"
    (load,) = told["loads"]
    assert load == {
        "dp_rank": 0,
        "timestamp": 1.5,
        "num_running_reqs": 2,
        "num_waiting_reqs": 2,
        "num_waiting_uncached_tokens": 700,
        "num_used_tokens": 40 + 60 + 25,
        "num_total_tokens": 40 + 60 + 25 + 700,
        "max_total_num_tokens": 5000,
        "token_usage": 0.25,
        "gen_throughput": 70.0,  # of the last whole second
        "cache_hit_rate": 0.25,
        "utilization": 0.25,
        "max_running_requests": 8,
        "memory": {"weight_gb": 1.5, "kv_cache_gb": 4.0, "graph_gb": 0.0, "token_capacity": 5000},
        "speculative": {"accept_length": 1 + 12 / 10, "accept_rate": 12 / 40},
        "queues": {"waiting": 1, "grammar": 0, "paused": 0, "retracted": 1},
    }


def test_preempted_choices_of_a_request_that_runs_on_are_not_queued() -> None:
    """One queued request and three preempted sequences, of which one request has two and still decodes with a third."""
    (load,) = body(status=replace(STATUS, num_waiting=4))["loads"]
    assert (load["num_waiting_reqs"], load["queues"]["waiting"], load["queues"]["retracted"]) == (4, 1, 3)


def test_rows_count_as_utilization_where_they_are_scarcer_than_memory() -> None:
    (load,) = body(status=replace(STATUS, num_running=6))["loads"]
    assert load["utilization"] == 0.75


def test_an_idle_server_without_cache_and_drafts_has_zeros() -> None:
    idle = replace(STATUS, num_running=0, requests=(), cache=None, drafts=None, history=StepHistory(), device=None)
    (load,) = body(status=replace(idle, memory=MemoryStatus(0, 0, 0, 0, 0, 0, 0, 0, 0)))["loads"]
    assert (load["token_usage"], load["gen_throughput"], load["cache_hit_rate"], load["utilization"]) == (0, 0, 0, 0)
    assert "speculative" not in load


def test_only_the_sections_that_are_asked_for_come_besides_the_core() -> None:
    (load,) = body("core, queues,disagg")["loads"]
    assert "queues" in load
    assert not {"memory", "speculative"} & set(load)


@pytest.mark.parametrize(
    ("query", "param", "kind"),
    [
        ({"include": "core,heads"}, "include", InvalidRequest),
        ({"dp_rank": "1"}, "dp_rank", InvalidRequest),
        ({"format": "prometheus"}, "format", UnsupportedField),
    ],
)
def test_a_wrong_query_is_refused_by_its_field(query: dict[str, str], param: str, kind: type[InvalidRequest]) -> None:
    with pytest.raises(kind) as caught:
        read_sections(query)
    assert caught.value.param == param
