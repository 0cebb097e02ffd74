"""Calls of /v1/responses for tests: bodies read without a server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from fakes import describe

from headrace.api.responses_body import ResponseCall, read_response
from headrace.errors import InvalidRequest, NotFound, PreviousResponseNotFound
from headrace.session.settings import check_options
from headrace.types.model import ModelTraits


class Remembered:
    """Conversations by the id of their last response, and single items."""

    def __init__(
        self,
        conversations: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
        items: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._conversations = conversations or {}
        self._items = {item["id"]: item for item in items}

    def conversation(self, response_id: str) -> Sequence[Mapping[str, Any]]:
        if response_id not in self._conversations:
            raise PreviousResponseNotFound("not there", param="previous_response_id")
        return self._conversations[response_id]

    def item(self, item_id: str) -> Mapping[str, Any]:
        if item_id not in self._items:
            raise NotFound("not there", param="input")
        return self._items[item_id]


def read(remembered: Remembered | None = None, max_model_len: int | None = None, **fields: Any) -> ResponseCall:
    """The call in a body of these fields; the input is a greeting unless it is one of them."""
    body = json.dumps({"input": "hello", **fields}).encode()
    return read_response(body, remembered or Remembered(), ModelTraits(max_model_len=max_model_len))


def refusal(remembered: Remembered | None = None, **fields: Any) -> InvalidRequest:
    """What such a body is refused with."""
    with pytest.raises(InvalidRequest) as caught:
        check_options(read(remembered, **fields).request.options, describe())
    return caught.value
