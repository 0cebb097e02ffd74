"""Ends a request by its id, wherever it is worked on."""

from __future__ import annotations

import asyncio

from headrace.server.bookkeeping import LiveRequests
from headrace.server.handover import Handover
from headrace.session.models import Models


async def cancel_request(id: str, models: Models, live: LiveRequests, handover: Handover) -> list[str]:
    """End a request by its id or its answer's id. Returns the ids of the work that was ended."""
    # A request that waits for its model has no work yet.
    work = (*live.engine_ids_of(id), live.request_of(id))
    ended = await asyncio.gather(*(models.abort(each) for each in work))
    cancelled = [each for each, was_running in zip(work, ended, strict=True) if was_running]
    return cancelled + handover.cancel((id, *work))
