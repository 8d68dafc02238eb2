"""A router for Ray Serve. It sends a prompt to the replica that has read the prompt's beginning, unless that replica is much busier."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .routing import PrefixTable


class PrefixRouter(RequestRouter):
    """Chooses replicas by :class:`~decoders_ray.routing.PrefixTable`; the request's first argument is its prompt."""

    def initialize_state(self, slack: int = 8, **options: Any) -> None:
        """Called by Serve. slack: see :meth:`PrefixTable.ranked`. options: arguments of :class:`PrefixTable`."""
        self.slack, self.table = slack, PrefixTable(**options)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas, the best first, each in a list of its own. Serve skips replicas that accept no more requests."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = (
                True  # all replicas are returned, so Serve waits if all are full
            )
        by_name = {replica.replica_id.to_full_id_str(): replica for replica in candidate_replicas}
        queues = {name: self.replica_queue_len_cache.get(r.replica_id) or 0 for name, r in by_name.items()}
        ranked = self.table.ranked(_prompt(pending_request), queues, self.slack)
        return [[by_name[name]] for name in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self.table.note(_prompt(pending_request), replica_id.to_full_id_str())

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self.table.forget([replica_id.to_full_id_str()])


def _prompt(request: PendingRequest | None) -> list[int] | str:
    """The prompt of a request; empty if the request has another form."""
    first = request.args[0] if request is not None and request.args else ""
    return first if isinstance(first, (str, list)) else ""
