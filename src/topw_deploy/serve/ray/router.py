"""Ray Serve's request router, by the beginning of the prompt."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from topw_deploy.serve.affinity import choose, preferred

PREFIX = "prefix"
"""Argument of the replica's method that has the key of the prompt's beginning."""


class PrefixRouter(RequestRouter):
    """Sends prompts that begin alike to one replica, within a load bound. Requests without a prompt go anywhere."""

    def initialize_state(self, load_factor: float = 1.25, **_: Any) -> None:
        """load_factor: no replica gets more than this many times the mean number of requests."""
        self._load_factor = load_factor

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The chosen replica, then all others; of these Ray takes the one with the fewest requests that has room."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # if none has room
        key = pending_request.kwargs.get(PREFIX, "")
        if not key:
            return [candidate_replicas]
        replicas = sorted(candidate_replicas, key=lambda replica: replica.replica_id.unique_id)
        loads = [self.replica_queue_len_cache.get(replica.replica_id) or 0 for replica in replicas]
        order = preferred(key, tuple(replica.replica_id.unique_id for replica in replicas))
        chosen = replicas[choose(order, loads, self._load_factor)]
        return [[chosen], [replica for replica in replicas if replica is not chosen]]
