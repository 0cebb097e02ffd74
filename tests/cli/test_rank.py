"""A rank other than 0, without its process."""

from __future__ import annotations

from typing import Any

import pytest
from embedding_models import FOLDER

from headrace.cli.rank import _take_part
from headrace.config import Config
from headrace.engine.thread import EngineThread


class FakeRanks:
    has_ended_well = True

    def __init__(self, config: Config) -> None:
        self._config = config

    def hear(self) -> Config:
        return self._config


@pytest.mark.parametrize("model", ["miniature", str(FOLDER / "bert_mean")])
def test_a_model_that_writes_no_text_is_launched_as_rank_0_launches_it(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[bool] = []

    class Launched:
        def wait_for_end(self) -> None:
            pass

    def launch(config: Config, constraints: object, **_: Any) -> Launched:
        launched.append(constraints is not None)
        return Launched()

    monkeypatch.setattr(EngineThread, "launch", launch)
    assert _take_part(FakeRanks(Config(model))) == 0  # type: ignore[arg-type]
    assert launched == [model == "miniature"]
