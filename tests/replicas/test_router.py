"""Our router as Ray Serve calls it, without a cluster."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from anabranch.replicas.router import PrefixRouter
from anabranch.request import Request
from anabranch.sampling_params import SamplingParams

DEPLOYMENT = DeploymentID(name="replica", app_name="test")
REPLICAS: list[Any] = [SimpleNamespace(replica_id=ReplicaID(name, DEPLOYMENT)) for name in "ab"]


def pending(number: int) -> PendingRequest:
    metadata = RequestMetadata(request_id=str(number), internal_request_id=str(number))
    return PendingRequest([Request(id=str(number), prompt_ids=list(range(64)), params=SamplingParams())], {}, metadata)


def router(max_imbalance: int) -> PrefixRouter:
    made = PrefixRouter(DEPLOYMENT, DeploymentHandleSource.UNKNOWN)
    made.initialize_state(by_prefix=True, max_imbalance=max_imbalance)
    return made


def test_a_burst_of_one_prefix_is_divided_before_any_of_it_is_sent() -> None:
    """Ray Serve asks for a choice for every request of a burst while it still waits for the replicas' queue lengths."""

    async def run() -> None:
        made = router(max_imbalance=4)
        requests = [pending(number) for number in range(12)]
        places = [(await made.choose_replicas(REPLICAS, request))[0][0].replica_id for request in requests]
        by_replica = Counter(places)
        assert len(by_replica) == 2 and max(by_replica.values()) - min(by_replica.values()) <= 4
        again = (await made.choose_replicas(REPLICAS, requests[0]))[0][0].replica_id
        assert again == places[0] and len(made.chosen) == 12
        for request, place in zip(requests[:-1], places):  # chosen, then sent: counted once
            request.future.set_result(None)
            made.on_send_request(place)
        requests[-1].future.cancel()  # its client has left
        await asyncio.sleep(0)
        assert not made.chosen and made.load == Counter(places[:-1])

    asyncio.run(run())
