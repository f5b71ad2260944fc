"""Ranks of other nodes as Ray actors: what torchrun is used for elsewhere, on a running Ray cluster.

A placement group reserves the devices of every node, this one's included. Each rank that rank 0 does not start itself
has an actor on its node, which starts the rank's process, and ends it and itself when rank 0 ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from anabranch import platforms
from anabranch.ranks import nodes
from anabranch.ranks.runner import follow_ranks, started_ranks

if TYPE_CHECKING:
    from anabranch.config import EngineConfig

log = logging.getLogger(__name__)

VARIABLE = "ANABRANCH_PLATFORM"
PLACE_SECONDS = 60.0
"""For the cluster to find room for all ranks."""


class RankActor:
    def run(self, rank: int, num_devices: int, place: nodes.Place, variables: dict[str, str]) -> int:
        """The life of a rank and of those that it starts, with the devices that Ray gives to this actor."""
        os.environ.update(variables)
        platform = platforms.current()
        return follow_ranks(place, {rank: [platform.rank_environment(device) for device in range(num_devices)]})


@contextlib.contextmanager
def on_cluster(config: EngineConfig, address: str) -> Iterator[None]:
    """Start the ranks of all nodes but this one, which is one of the cluster's; they end with this."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        ray.init(address, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ValueError(f"--ray-address {address}: no cluster answers: {str(error).splitlines()[0]}") from None
    try:
        with _reporting(_start(config)):
            yield
    finally:
        ray.shutdown()


def _start(config: EngineConfig) -> dict[Any, int]:
    """The calls that the lives of ranks are, and their ranks."""
    on_gpus = ray.cluster_resources().get("GPU") and os.environ.get(VARIABLE) != "cpu"
    count, mine = config.num_ranks // config.nodes, ray.get_runtime_context().get_node_id()
    here = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == mine)
    bundles: list[dict[str, float]] = [{"GPU" if on_gpus else "CPU": count} for _ in range(config.nodes)]
    bundles[0][f"node:{here}"] = 0.001
    group = placement_group(bundles, strategy="STRICT_SPREAD")
    if not group.wait(PLACE_SECONDS):
        raise ValueError(
            f"nodes = {config.nodes}: this node and others of the cluster, so many together, have not had {count} free "
            f"{'GPUs' if on_gpus else 'CPUs'} each within {PLACE_SECONDS:g} s; `ray status` shows what there is"
        )
    with socket.create_server(("", 0)) as free:
        port = str(free.getsockname()[1])
    variables = {"WORLD_SIZE": str(config.nodes), "MASTER_ADDR": here, "MASTER_PORT": port}
    variables |= {VARIABLE: os.environ[VARIABLE]} if VARIABLE in os.environ else {}
    os.environ.update(variables | {"RANK": "0"})
    calls = {}
    for node in range(1, config.nodes):
        for rank, num_devices in started_ranks(node, config):
            actor = ray.remote(RankActor).options(
                num_gpus=num_devices if on_gpus else 0,
                num_cpus=0 if on_gpus else num_devices,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node),
            )
            place = nodes.Place(node, here)
            calls[actor.remote().run.remote(rank, num_devices, place, variables | {"RANK": str(node)})] = rank
    return calls


@contextlib.contextmanager
def _reporting(calls: dict[Any, int]) -> Iterator[None]:
    """A thread asks Ray about the ranks. It must end before the connection with Ray does, or the process crashes."""
    ended = threading.Event()
    thread = threading.Thread(target=_report, args=(calls, ended), name="ray-ranks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _report(calls: dict[Any, int], ended: threading.Event) -> None:
    """Say why a rank has ended, which rank 0 does not know before all have come."""
    first = None
    with contextlib.suppress(Exception):  # whatever Ray raises when its cluster ends
        while first is None and not ended.is_set():
            first = next(iter(ray.wait(list(calls), num_returns=1, timeout=0.5)[0]), None)
        if first is None:
            return
        try:
            if code := ray.get(first):
                log.error("rank %d of the model has ended with exit code %d", calls[first], code)
        except ray.exceptions.RayTaskError as error:
            log.error("rank %d of the model has not started: %s", calls[first], error.cause)
        except ray.exceptions.RayActorError as error:
            log.error("the actor of rank %d of the model has ended: %s", calls[first], str(error).splitlines()[0])
