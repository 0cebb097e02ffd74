"""Requests being answered, by the ids that their clients know."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

# Safe in a header, a path and a log line.
_HARMLESS = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class LiveRequests:
    """Assigns request ids and finds the engine's work for an id."""

    def __init__(self) -> None:
        self._live: dict[str, _Work] = {}
        self._owner_of_answer: dict[str, str] = {}

    def admit(self, sent: str | None) -> str:
        """The request's id: the client's, if it is safe and not in use, else a random one."""
        request_id = sent if sent is not None and _HARMLESS.fullmatch(sent) else None
        if request_id is None or request_id in self._live:
            request_id = f"req_{secrets.token_hex(16)}"
        self._live[request_id] = _Work()
        return request_id

    def attach(self, request_id: str, answer_id: str, work: tuple[str, ...]) -> None:
        """Register the id of a request's answer and the engine's ids for it."""
        self._live[request_id] = _Work(answer_id, work)
        self._owner_of_answer[answer_id] = request_id

    def release(self, request_id: str) -> None:
        self._owner_of_answer.pop(self._live.pop(request_id).answer_id, None)

    def work_of(self, id: str) -> tuple[str, ...]:
        """The engine's ids for a request's or an answer's id; an unknown id may be one of the engine's own."""
        found = self._live.get(self._owner_of_answer.get(id, id))
        return found.engine_ids if found is not None else (id,)


@dataclass(frozen=True, slots=True)
class _Work:
    """A request's work; empty before its body is read."""

    answer_id: str = ""
    engine_ids: tuple[str, ...] = ()
