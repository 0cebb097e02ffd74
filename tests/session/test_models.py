"""Which model a request means, and when models are loaded and unloaded."""

from __future__ import annotations

import pytest
from fakes import FakeEngine, fake_session

from headrace.errors import InvalidRequest, ModelNotFound
from headrace.session.models import ModelEntry, Models

NAMES = ("small", "org/Small-1B")


def of(takes_any_name: bool) -> Models:
    return Models.of(fake_session(FakeEngine()), NAMES, takes_any_name=takes_any_name)


def test_an_answer_carries_the_asked_name_if_it_is_served_else_the_first() -> None:
    models = of(takes_any_name=True)
    for asked, shown in (("org/Small-1B", "org/Small-1B"), ("gpt-9", "small"), (None, "small")):
        assert models.resolve(asked).name == shown


def test_other_names_are_refused_with_the_list() -> None:
    models = of(takes_any_name=False)
    assert models.resolve("small").name == "small"
    with pytest.raises(ModelNotFound, match="gpt-9.*small, org/Small-1B") as refused:
        models.resolve("gpt-9")
    assert refused.value.param == "model"


def test_a_request_without_a_name_means_the_only_model_but_never_one_of_several() -> None:
    assert of(takes_any_name=False).resolve(None).name == "small"
    session = fake_session(FakeEngine())
    several = Models([ModelEntry(("a",), "a", session), ModelEntry(("b",), "b", session)])
    with pytest.raises(InvalidRequest, match="served: a, b"):
        several.resolve(None)
    with pytest.raises(InvalidRequest):
        Models([ModelEntry(("a",), "a", session)], needs_name=True).resolve(None)


def test_the_word_of_the_command_line_names_a_model_too() -> None:
    models = Models([ModelEntry(("headrace-miniature",), "miniature", fake_session(FakeEngine()))])
    assert models.resolve("miniature").name == "headrace-miniature"
