"""When reading beats computing."""

from __future__ import annotations

import pytest

from headrace.state import disk_pace
from headrace.state.disk_pace import DiskPace


def test_guesses_hold_until_two_measurements() -> None:
    pace = DiskPace(prefill_tokens_per_s=200.0)
    assert pace.compute_s(100) == 0.5
    assert pace.read_s(500_000_000, 0) == pytest.approx(1.0 + disk_pace.READ_START_S)
    pace.observe_prefill(1000, 1.0)
    pace.observe_read(2_000_000_000, 1.0)
    assert pace.compute_s(100) == 0.5
    pace.observe_prefill(4000, 1.0)
    pace.observe_prefill(1000, 1.0)
    pace.observe_read(2_000_000_000, 1.0)
    assert pace.compute_s(100) == 0.1
    assert pace.read_s(500_000_000, 0) == pytest.approx(0.25 + disk_pace.READ_START_S)


def test_small_steps_and_small_reads_say_nothing() -> None:
    pace = DiskPace(prefill_tokens_per_s=200.0)
    for _ in range(9):
        pace.observe_prefill(1, 1.0)
        pace.observe_prefill(0, 1.0)
        pace.observe_read(1000, 1.0)
    assert pace.compute_s(100) == 0.5
    assert pace.read_s(500_000_000, 0) < 2.0


def test_patience_is_bounded_by_what_computing_would_take() -> None:
    pace = DiskPace(prefill_tokens_per_s=10.0)
    # 1,000 s of computing, 4 s of reading
    assert pace.patience_s(10_000, 2_000_000_000, 0) == pytest.approx(4 * (4.0 + disk_pace.READ_START_S))
    # 5 s of computing
    assert pace.patience_s(50, 2_000_000_000, 0) == 5.0
    # and never so short that a busy machine counts as a broken disk
    assert pace.patience_s(1, 1, 1) == 2.0
