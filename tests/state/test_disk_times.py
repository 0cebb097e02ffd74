"""When reading beats computing."""

from __future__ import annotations

import pytest

from headrace.state import disk_times
from headrace.state.disk_times import DiskTimes


def test_assumptions_hold_until_two_measurements() -> None:
    times = DiskTimes(prefill_tokens_per_s=200.0)
    assert times.compute_s(100) == 0.5
    assert times.read_s(500_000_000, 0) == pytest.approx(1.0 + disk_times.READ_START_S)
    times.observe_prefill(1000, 1.0)
    times.observe_read(2_000_000_000, 1.0)
    assert times.compute_s(100) == 0.5
    times.observe_prefill(4000, 1.0)
    times.observe_prefill(1000, 1.0)
    times.observe_read(2_000_000_000, 1.0)
    assert times.compute_s(100) == 0.1
    assert times.read_s(500_000_000, 0) == pytest.approx(0.25 + disk_times.READ_START_S)


def test_small_steps_and_small_reads_say_nothing() -> None:
    times = DiskTimes(prefill_tokens_per_s=200.0)
    for _ in range(9):
        times.observe_prefill(1, 1.0)
        times.observe_prefill(0, 1.0)
        times.observe_read(1000, 1.0)
    assert times.compute_s(100) == 0.5
    assert times.read_s(500_000_000, 0) < 2.0


def test_a_timeout_is_bounded_by_what_computing_would_take() -> None:
    times = DiskTimes(prefill_tokens_per_s=10.0)
    # 1,000 s of computing, 4 s of reading
    assert times.timeout_s(10_000, 2_000_000_000, 0) == pytest.approx(4 * (4.0 + disk_times.READ_START_S))
    # 5 s of computing
    assert times.timeout_s(50, 2_000_000_000, 0) == 5.0
    # and never so short that a busy machine counts as a broken disk
    assert times.timeout_s(1, 1, 1) == 2.0
