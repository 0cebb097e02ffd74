"""Ray Serve's request router with the policy of `policy.py`. Runs in each of Ray's proxies."""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from headrace.replicas.policy import choose
from headrace.replicas.route import ConversationRoute


class ConversationRouter(RequestRouter):
    """Ray's own ConsistentHashRouter knows no load, and no request that belongs to a certain replica.

    The route comes as Ray's session id, which the front has put into a header.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        # Ray waits longer and longer between rounds in which no replica takes the request.
        pending_request.routing_context.should_backoff = True
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        route = ConversationRoute.decoded(pending_request.metadata.session_id)
        if route.replica in by_name:
            return [[by_name[route.replica]]]
        lengths = self.replica_queue_len_cache
        loads = {name: lengths.get(each.replica_id) or 0 for name, each in by_name.items()}
        return [[by_name[name]] for name in choose(route.key, loads)]
