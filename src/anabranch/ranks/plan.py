"""What each rank of a divided model holds, and what a step moves between ranks: arithmetic on a ModelConfig.

Like `plan`, without torch. Times are bytes over rates: no latencies, no contention, no overlap.

T token rows of a step, of one engine where several have requests of their own; S of them sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from anabranch.engine import plan
from anabranch.formats import ITEM_BYTES, Shape
from anabranch.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How a model is divided."""

    tensor: int = 1
    """Ranks that have the same tokens."""
    data: int = 1
    """Engines that have requests of their own, of `tensor` ranks each; all ranks divide whole experts among them."""
    expert_parallel: bool = False
    nodes: int = 1

    def __post_init__(self) -> None:
        if self.data > 1 and not self.expert_parallel:
            raise ValueError("--data-parallel-size goes with --expert-parallel")
        if self.num_ranks % self.nodes:
            raise ValueError(f"--nodes {self.nodes}: {self.num_ranks} ranks cannot be divided among so many")
        if self.data > 1 and self.num_ranks // self.nodes % self.tensor:
            raise ValueError(f"--nodes {self.nodes}: each must have whole groups of {self.tensor} ranks")

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.data

    def of_a_rank(self, config: ModelConfig) -> ModelConfig:
        """The config of rank 0; ValueError if the model cannot be divided so."""
        if self.data > 1:
            config.check_experts(self.num_ranks)
        return config.divide(0, self.tensor, self.expert_parallel)


def weights(config: ModelConfig, division: Division) -> Iterator[tuple[plan.WeightKind, Shape]]:
    """Every weight of rank 0, which has as much as any: its kind and its logical shape. `config` is of all ranks."""
    one, n = division.of_a_rank(config), division.tensor
    vocab_size = config.vocab_size if config.vocab_size % n else config.vocab_size // n
    layers = []
    for layer in one.layers:
        moe = layer.moe
        if moe is not None:
            here = -(-moe.num_experts // division.num_ranks) if division.expert_parallel else moe.num_experts
            width = moe.width if division.expert_parallel else moe.width // n
            moe = replace(moe, num_experts=here, width=width, shared_width=moe.shared_width // n)
        layers.append(replace(layer, mlp_width=layer.mlp_width // n, moe=moe))
    routers = (shape for kind, shape in plan.weights(one) if kind == "router")
    for kind, shape in plan.weights(replace(one, vocab_size=vocab_size, layers=tuple(layers))):
        yield kind, next(routers) if kind == "router" else shape  # every rank routes among all experts


def weight_bytes(config: ModelConfig, division: Division, dtype: str) -> dict[plan.WeightKind, int]:
    """Memory of rank 0's weights by kind."""
    total = plan.weight_bytes(config, dtype, weights(config, division))
    return {kind: size for kind, size in total.items() if size}


@dataclass(frozen=True, slots=True)
class Collective:
    """A call of parallel.group.Group in a step, and how often it occurs."""

    name: str
    what: str
    num_bytes: int
    """Of the tensor that a rank gives to it."""
    count: int
    exchange: bool = False
    """Among all ranks, where several engines have requests of their own; others are among the ranks of one."""

    def among(self, division: Division) -> Division:
        """The ranks that take part; those of one engine of several are on one node."""
        return division if self.exchange or division.data == 1 else replace(division, data=1, nodes=1)

    def link_bytes(self, num_ranks: int) -> float:
        """That a rank sends in one call, as libraries do it: in rings, each rank as much as it receives."""
        others = num_ranks - 1
        return (
            self.num_bytes
            * {
                "all_reduce": 2 * others / num_ranks,
                "all_gather": others,
                "all_to_all": others / num_ranks,
                "broadcast": min(1, others),
            }[self.name]
        )

    def seconds(self, division: Division, rates: tuple[float, float]) -> float:
        """All calls. `rates`: bytes/s of a rank's link inside its node and to other nodes. Over several nodes ranks
        exchange inside the node first, so that each byte goes from node to node once."""
        division = self.among(division)
        inside = division.num_ranks // division.nodes
        within = self.link_bytes(inside) / rates[0]
        if division.nodes == 1:
            return self.count * within
        across = self.link_bytes(division.nodes) / rates[1]
        if self.name == "all_reduce":
            across /= inside
        elif self.name == "all_gather":
            within *= division.nodes
        elif self.name == "all_to_all":
            within /= division.nodes
        return self.count * (within + across)


def collectives(
    config: ModelConfig, division: Division, dtype: str, num_tokens: int, num_samples: int
) -> list[Collective]:
    """Of a step, those with equal names and sizes together. No row is padded, and every rank has as many."""
    n, rows = division.tensor, num_tokens * config.hidden_size * ITEM_BYTES[dtype]
    found: list[Collective] = []
    if n > 1:
        divided = config.vocab_size % n == 0
        mixers = len(config.layers)
        qk_norms = 2 * sum(getattr(layer.mixer, "qk_norm", "") == "all" for layer in config.layers)
        feeds = sum(bool(layer.mlp_width) + (layer.moe is not None) for layer in config.layers)
        found += [
            Collective("all_reduce", "embedding", rows, int(divided)),
            Collective("all_reduce", "mixers", rows, mixers),
            Collective("all_reduce", "norms of queries and keys", num_tokens * 4, qk_norms),
            Collective("all_reduce", "feed-forward, experts", rows, feeds),
            Collective("all_gather", "logits", num_samples * config.vocab_size // n * ITEM_BYTES[dtype], int(divided)),
            Collective("broadcast", "sampled tokens", num_samples * 8, 1),
        ]
    if division.data > 1:
        layers = [layer.moe for layer in config.layers if layer.moe is not None]
        top_k = max((moe.top_k for moe in layers), default=0)
        share = -(-num_tokens // n)  # of the tokens of n ranks each sends a part
        rows = share * config.hidden_size * ITEM_BYTES[dtype]
        found += [
            Collective("all_gather", "rows to experts", rows, len(layers), True),
            Collective("all_gather", "ids and weights of experts", share * top_k * 8, len(layers), True),
            Collective("all_to_all", "rows from experts", division.num_ranks * rows, len(layers), True),
        ]
    return [collective for collective in found if collective.count and collective.num_bytes]


def read_bytes(config: ModelConfig, division: Division, dtype: str, num_tokens: int) -> int:
    """Weights that rank 0 reads in a step: of experts as many as tokens visit on average, if all are equally popular;
    of an embedding that is not the head, none."""
    total = weight_bytes(config, division, dtype)
    moe = next((layer.moe for layer in config.layers if layer.moe is not None), None)
    if moe is not None:
        visited = 1 - (1 - moe.top_k / moe.num_experts) ** (num_tokens * division.data)
        total["routed experts"] = int(total["routed experts"] * visited)
    if not config.tie_embeddings:
        total["embeddings"] //= 2
    return sum(total.values())
