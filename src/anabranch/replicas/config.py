"""How many replicas there are, where they run, and how requests are divided among them. Knows nothing of Ray."""

import os
from dataclasses import dataclass

ROUTINGS = ("prefix", "load")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    replicas: int = 0
    """Engines that have the whole model each. 0: one engine, without Ray, or 1 where there is a `max_replicas`."""
    max_replicas: int = 0
    """Where this is more than `replicas`, Ray Serve starts and ends replicas between the two numbers, by load. 0: as
    many as `replicas`."""
    ray_address: str | None = None
    """HOST:PORT of a running cluster's head node, or "auto". None: a cluster on this machine that ends with the
    server."""
    routing: str = "prefix"
    """prefix: to the replica that has the longest prefix of the prompt in its cache; load: to the least busy one."""
    max_imbalance: int = 8
    """A replica with this many more requests than the least busy one gets no more, whatever prefix it has."""

    def __post_init__(self) -> None:
        for name, least in (("replicas", 0), ("max_replicas", 0), ("max_imbalance", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.routing not in ROUTINGS:
            raise ValueError(f"routing must be one of {', '.join(ROUTINGS)}, not {self.routing!r}")
        if self.max_replicas and not self.replicas:
            object.__setattr__(self, "replicas", 1)
        if self.ray_address and not self.replicas:
            raise ValueError("--ray-address is for replicas and nodes: give --replicas too, or --nodes")
        if 0 < self.max_replicas < self.replicas:
            raise ValueError(f"--max-replicas {self.max_replicas} is less than --replicas {self.replicas}")
        if self.ray_address and self.ray_address.startswith("ray://"):
            raise ValueError(
                f"--ray-address {self.ray_address}: answers are not streamed through Ray Client; run this on a node of "
                "the cluster, with the HOST:PORT that `ray start` has printed, or auto"
            )

    def set_environment(self) -> None:
        """For Ray, which reads it when it is imported."""
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # no report of its use over the network
        os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a late call at the end would start another cluster
        if not self.ray_address:
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # on any system: listen on the loopback interface

    @property
    def most(self) -> int:
        """Replicas that there may be at once."""
        return max(self.replicas, self.max_replicas)
