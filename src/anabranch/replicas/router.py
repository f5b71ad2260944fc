"""Ray Serve's router with our choice of a replica. It runs in the server's process, on a thread of Ray's.

Ray Serve copies this module's objects: a variable here is not the one that others import.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from anabranch.replicas import prefixes
from anabranch.request import Request


class PrefixRouter(RequestRouter):
    def initialize_state(self, **options: Any) -> None:
        """`options` are Ray's request_router_kwargs: `by_prefix` and `max_imbalance`."""
        self.by_prefix: bool = options["by_prefix"]
        self.prefixes: prefixes.Prefixes[ReplicaID] = prefixes.Prefixes(options["max_imbalance"])
        self.load: Counter[ReplicaID] = Counter()
        """Requests that have been sent and not answered."""
        self.chosen: dict[asyncio.Future[RunningReplica], ReplicaID] = {}
        """For requests that have not been sent: Ray Serve may ask a replica first whether it takes more."""
        prefixes.by_application[self.app_name] = self.prefixes

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Lists of replicas to try, one after the other."""
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        if pending_request is None:
            return [[by_id[id]] for id in self.prefixes.rank([], self._load(by_id))]
        pending_request.routing_context.should_backoff = True
        request: Request = pending_request.args[0]
        hashes = prefixes.block_hashes(request.prompt_ids, request.cache_salt) if self.by_prefix else []
        self.chosen.pop(pending_request.future, None)  # asked before, in vain
        ranked = self.prefixes.rank(hashes, self._load(by_id))
        # Now, not when the replica has accepted it: others may arrive meanwhile.
        self.prefixes.note(hashes, ranked[0])
        self.chosen[pending_request.future] = ranked[0]
        pending_request.future.add_done_callback(lambda future: self.chosen.pop(future, None))
        return [[by_id[id]] for id in ranked]

    def _load(self, ids: Iterable[ReplicaID]) -> dict[ReplicaID, int]:
        chosen = Counter(self.chosen.values())
        return {id: self.load[id] + chosen[id] for id in ids}

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self.load[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        self.load[replica_id] = max(0, self.load[replica_id] - 1)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self.prefixes.keep(self.curr_replicas)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self.prefixes.keep(self.curr_replicas)
        self.load = Counter({id: count for id, count in self.load.items() if id in self.curr_replicas})
