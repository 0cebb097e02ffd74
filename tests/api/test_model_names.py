"""Which names a server answers to."""

from __future__ import annotations

import pytest
from openai.types import Model

from headrace.api.openai_models import answer_name, model_list, one_model
from headrace.errors import InvalidRequest, ModelNotFound

NAMES = ("small", "org/Small-1B")


def test_the_list_has_every_served_name() -> None:
    listed = model_list(NAMES, 5, 100, "headrace")
    assert [Model.model_validate(each).id for each in listed["data"]] == list(NAMES)
    assert listed["object"] == "list"
    assert listed["data"][0]["max_model_len"] == 100


def test_one_model_is_found_by_its_name_only() -> None:
    assert one_model("org/Small-1B", NAMES, 5, 100, "headrace")["id"] == "org/Small-1B"
    with pytest.raises(ModelNotFound):
        one_model("gpt-9", NAMES, 5, 100, "headrace")


def test_an_answer_carries_the_asked_name_if_it_is_served_else_the_first() -> None:
    assert answer_name("org/Small-1B", NAMES, strict=False) == "org/Small-1B"
    assert answer_name("gpt-9", NAMES, strict=False) == "small"
    assert answer_name(None, NAMES, strict=False) == "small"


def test_a_strict_server_serves_its_own_names_only() -> None:
    assert answer_name("small", NAMES, strict=True) == "small"
    with pytest.raises(ModelNotFound, match="gpt-9"):
        answer_name("gpt-9", NAMES, strict=True)
    with pytest.raises(InvalidRequest):
        answer_name(None, NAMES, strict=True)
