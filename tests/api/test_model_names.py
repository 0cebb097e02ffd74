"""The list of models in the form of OpenAI's clients."""

from __future__ import annotations

import pytest
from openai.types import Model

from headrace.api.openai_models import ListedModel, model_list, one_model
from headrace.errors import ModelNotFound
from headrace.types.model import ModelOutline
from headrace.types.model_status import ModelState

MODELS = {
    "small": ListedModel("small", None, ModelState.LOADED, None, ModelOutline(100, ("chat",), ("text", "image"))),
    "org/Small-1B": ListedModel("small", "small", ModelState.FAILED, "no weights", ModelOutline()),
}


def test_the_list_has_every_served_name() -> None:
    listed = model_list(MODELS, 5, "headrace")
    assert [Model.model_validate(each).id for each in listed["data"]] == list(MODELS)
    assert listed["object"] == "list"
    assert [each["max_model_len"] for each in listed["data"]] == [100, None]
    assert [each["state"] for each in listed["data"]] == ["loaded", "failed"]
    assert listed["data"][1]["state_reason"] == "no weights"
    assert listed["data"][0]["modalities"] == {"input": ["text", "image"], "output": ["text"]}
    assert [each["parent"] for each in listed["data"]] == [None, "small"]


def test_one_model_is_found_by_its_name_only() -> None:
    assert one_model("org/Small-1B", MODELS, 5, "headrace")["id"] == "org/Small-1B"
    with pytest.raises(ModelNotFound, match="small, org/Small-1B"):
        one_model("gpt-9", MODELS, 5, "headrace")
