"""Finished responses, kept in memory so that later requests can continue them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from headrace.api.responses_items import Item
from headrace.errors import NotFound, PreviousResponseNotFound

MAX_RESPONSES = 4096


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as sent, and its request's own input. previous_id: what the request continued."""

    response: Mapping[str, Any]
    input_items: tuple[Item, ...]
    previous_id: str | None

    @property
    def id(self) -> str:
        return str(self.response["id"])

    @property
    def items(self) -> tuple[Item, ...]:
        return (*self.input_items, *self.response["output"])


class ResponseStore:
    """Responses by id (the StoredResponses). The least recently used go first, each before those that it continued.

    max_bytes: of all of them as JSON; a larger single one is not stored. Requests are read in threads, too.
    """

    def __init__(self, max_bytes: int, max_responses: int = MAX_RESPONSES) -> None:
        self._max_bytes = max_bytes
        self._max_responses = max_responses
        self._lock = threading.Lock()
        self._stored: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._owner_of_item: dict[str, str] = {}
        self._num_bytes = 0

    def add(self, stored: StoredResponse) -> None:
        num_bytes = len(to_json(stored.response)) + len(to_json(stored.input_items))
        if num_bytes > self._max_bytes:
            return
        with self._lock:
            self._forget(stored.id)
            self._stored[stored.id] = stored, num_bytes
            self._num_bytes += num_bytes
            self._owner_of_item.update((item["id"], stored.id) for item in stored.items)
            # The responses that it continues must stay longer than itself.
            self._use(stored.id)
            while self._num_bytes > self._max_bytes or len(self._stored) > self._max_responses:
                self._forget(next(iter(self._stored)))

    def get(self, response_id: str) -> StoredResponse:
        """A response. Raises NotFound."""
        with self._lock:
            if response_id not in self._stored:
                raise _not_found(response_id)
            self._use(response_id)
            return self._stored[response_id][0]

    def remove(self, response_id: str) -> None:
        """Delete a response; those that continued it can't be continued any more. Raises NotFound."""
        with self._lock:
            if response_id not in self._stored:
                raise _not_found(response_id)
            self._forget(response_id)

    def conversation(self, response_id: str) -> Sequence[Item]:
        with self._lock:
            chain = list(self._chain(response_id))
            if not chain or chain[-1].previous_id is not None:
                missing = chain[-1].previous_id if chain else response_id
                message = f"Previous response with id '{missing}' not found."
                raise PreviousResponseNotFound(message, param="previous_response_id")
            self._use(response_id)
        return [item for stored in reversed(chain) for item in stored.items]

    def item(self, item_id: str) -> Item:
        with self._lock:
            owner = self._owner_of_item.get(item_id)
            if owner is None:
                raise NotFound(f"Item with id '{item_id}' not found.", param="input")
            self._use(owner)
            return next(item for item in self._stored[owner][0].items if item["id"] == item_id)

    def _chain(self, response_id: str | None) -> Iterator[StoredResponse]:
        """A response and those before it, as far as they are stored, the latest first."""
        while response_id is not None and response_id in self._stored:
            stored, _ = self._stored[response_id]
            yield stored
            response_id = stored.previous_id

    def _use(self, response_id: str) -> None:
        for stored in self._chain(response_id):
            self._stored.move_to_end(stored.id)

    def _forget(self, response_id: str) -> None:
        stored, num_bytes = self._stored.pop(response_id, (None, 0))
        self._num_bytes -= num_bytes
        for item in stored.items if stored is not None else ():
            # An item that was sent in again belongs to the later response.
            if self._owner_of_item.get(item["id"]) == response_id:
                del self._owner_of_item[item["id"]]


def _not_found(response_id: str) -> NotFound:
    return NotFound(f"Response with id '{response_id}' not found.", param="response_id")
