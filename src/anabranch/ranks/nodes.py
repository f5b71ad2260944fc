"""Ranks on several nodes: what a node's process must know, and connections between ranks through which orders go.

Each node has one process, started by torchrun or by hand with torch's variables: RANK (the node's), WORLD_SIZE (nodes),
MASTER_ADDR and MASTER_PORT (of node 0). Ranks find each other in torch's TCP store there, in which rank 0 leaves the
port and the key of its own connections. As with everything that torch.distributed does, the network must be trusted.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

if TYPE_CHECKING:
    from anabranch.config import EngineConfig

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ORDERS = "anabranch/orders"
"""In the store: where rank 0 is waiting for the others."""
LINKS = ("orders", "beats", "node")


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process is."""

    node: int
    address: str
    """Of node 0."""


def is_loopback(address: str) -> bool:
    return socket.gethostbyname(address).startswith("127.")


def place(config: EngineConfig) -> Place | None:
    """None: all ranks are on this machine. ValueError if the variables do not fit the configuration."""
    if config.nodes == 1:
        return None
    command = f"torchrun --nnodes {config.nodes} --nproc-per-node 1 --node-rank N --master-addr ADDRESS"
    if missing := [name for name in VARIABLES if name not in os.environ]:
        raise ValueError(f"nodes = {config.nodes}: {missing[0]} is not set; on every node run the same: {command} ...")
    if (size := int(os.environ["WORLD_SIZE"])) != config.nodes:
        raise ValueError(f"nodes = {config.nodes}, and WORLD_SIZE is {size}; start one process on each: {command} ...")
    return Place(int(os.environ["RANK"]), os.environ["MASTER_ADDR"])


def open_store(rank: int, seconds: float) -> Store:
    """The store of all ranks, on node 0: torchrun's, or one that rank 0 makes. RuntimeError if it does not come."""
    url = f"env://?rank={rank}&world_size=1"  # not all: rank 0 would wait for ranks that others start later
    store, _, _ = next(rendezvous(url, timeout=timedelta(seconds=seconds)))
    return PrefixStore("anabranch", store)


class Gate:
    """Where rank 0 waits for the ranks of other nodes. Only who has the key gets in."""

    def __init__(self, place: Place, store: Store, seconds: float) -> None:
        self.socket = socket.create_server((place.address if is_loopback(place.address) else "", 0))
        self.socket.settimeout(seconds)
        self.key = secrets.token_bytes(32)
        store.set(ORDERS, f"{self.socket.getsockname()[1]}:{self.key.hex()}")

    def admit(self, ranks: Iterable[int]) -> dict[int, tuple[Connection, Connection, Connection]]:
        """The connections of each of these ranks: for orders, for heartbeats, and of its node (see `connect`)."""
        found: dict[int, dict[str, Connection]] = {rank: {} for rank in ranks}
        while any(len(connections) < len(LINKS) for connections in found.values()):
            try:
                connection = _connection(self.socket.accept()[0])
                deliver_challenge(connection, self.key)
                answer_challenge(connection, self.key)
            except TimeoutError:
                late = [rank for rank, connections in found.items() if len(connections) < len(LINKS)]
                raise RuntimeError(f"rank {late[0]} has not come within {self.socket.gettimeout():g} s") from None
            except (AuthenticationError, EOFError, OSError):
                continue  # somebody else
            rank, name = connection.recv()
            found[rank][name] = connection
        self.socket.close()
        return {rank: (links["orders"], links["beats"], links["node"]) for rank, links in found.items()}


def connect(place: Place, port_and_key: str, rank: int, link: str) -> Connection:
    """One of the LINKS of a rank of another node with rank 0. The last of them belongs to the process that has started
    the rank: where it ends, that process ends the rank, which may be stopped."""
    port, _, key = port_and_key.partition(":")
    connection = _connection(socket.create_connection((place.address, int(port))))
    answer_challenge(connection, bytes.fromhex(key))
    deliver_challenge(connection, bytes.fromhex(key))
    connection.send((rank, link))
    return connection


def _connection(link: socket.socket) -> Connection:
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a step waits for its order
    return Connection(link.detach())


def hang_up(connection: Connection) -> None:
    """End a connection, also for a thread that waits for it."""
    with socket.socket(fileno=os.dup(connection.fileno())) as link:
        link.shutdown(socket.SHUT_RDWR)
