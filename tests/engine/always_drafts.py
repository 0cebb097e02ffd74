"""Drafts for every row that may have some, whatever they cost, so that no test depends on measured times."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headrace.speculate.depth import DepthPlanner, DraftForecast


def draft_always(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(self: DepthPlanner, rows: Sequence[DraftForecast]) -> tuple[int, ...]:
        return tuple(len(row.survival) for row in rows)

    def prefills(self: DepthPlanner, rows: Sequence[DraftForecast]) -> list[int]:
        return [number for number, row in enumerate(rows) if row.prefill_s]

    monkeypatch.setattr(DepthPlanner, "plan", plan)
    monkeypatch.setattr(DepthPlanner, "prefills", prefills)
    monkeypatch.setattr(DepthPlanner, "is_due", lambda self, rows: True)
