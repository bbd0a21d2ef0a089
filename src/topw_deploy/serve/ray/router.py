"""A request router of Ray Serve that chooses the replica by the beginning of the prompt."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from topw_deploy.serve.affinity import choose_replica, order_replicas

PREFIX_ARGUMENT = "prefix"
"""Name of the argument of `Replica.relay` with the key of the prompt's beginning."""


class PrefixRouter(RequestRouter):
    """Sends prompts that begin alike to one replica, within a bound on its load.

    For requests without a prompt, Ray chooses the replica.
    """

    def initialize_state(self, load_factor: float = 1.25, **_: Any) -> None:
        """Called by Ray.

        load_factor: no replica gets more than this many times the mean number of requests.
        """
        self._load_factor = load_factor

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Called by Ray. Returns [[the chosen replica], [all others]].

        If the chosen replica takes no more requests, Ray tries the others, those with the fewest requests first.
        """
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        # If no replica takes more requests, Ray waits before it tries again.
        pending_request.routing_context.should_backoff = True
        key = pending_request.kwargs.get(PREFIX_ARGUMENT, "")
        if not key:
            return [candidate_replicas]
        replicas = sorted(candidate_replicas, key=lambda replica: replica.replica_id.unique_id)
        loads = [self.replica_queue_len_cache.get(replica.replica_id) or 0 for replica in replicas]
        order = order_replicas(key, tuple(replica.replica_id.unique_id for replica in replicas))
        chosen = replicas[choose_replica(order, loads, self._load_factor)]
        return [[chosen], [replica for replica in replicas if replica is not chosen]]
