"""Which replica has probably cached which prefix of a prompt, and which replica gets a request. Plain ints.

An approximation of the replicas' prefix caches: it notes whole blocks of prompts when they are sent, does not know
answers (the next turn of a conversation repeats them in its prompt), and forgets the least recently used blocks beyond
a fixed number, where a replica goes by its memory.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

BLOCK = 16  # tokens
MAX_BLOCKS = 1 << 17  # noted for one replica: two million tokens, about 15 MB

Replica = TypeVar("Replica", bound=Hashable)


def block_hashes(prompt_ids: Sequence[int], salt: str) -> list[int]:
    """A number for each whole block, which stands for all tokens up to its end."""
    hashes, last = [], hash(salt)
    for end in range(BLOCK, len(prompt_ids) + 1, BLOCK):
        last = hash((last, tuple(prompt_ids[end - BLOCK : end])))
        hashes.append(last)
    return hashes


class Prefixes(Generic[Replica]):
    def __init__(self, max_imbalance: int, max_blocks: int = MAX_BLOCKS) -> None:
        self.max_imbalance, self.max_blocks = max_imbalance, max_blocks
        self.noted: dict[Replica, OrderedDict[int, None]] = {}
        """Blocks that were sent to a replica, the least recently used first."""
        self.replicas: frozenset[Replica] = frozenset()
        """Those that take requests now."""

    def rank(self, hashes: Sequence[int], load: Mapping[Replica, int]) -> list[Replica]:
        """The replicas of `load` (their numbers of requests), the best one for a prompt first: longest prefix, then
        fewest requests, then fewest blocks. Those that are too busy come last."""
        least = min(load.values())

        def order(replica: Replica) -> tuple[bool, int, int, int]:
            too_busy = load[replica] - least >= self.max_imbalance
            noted: Mapping[int, None] = self.noted.get(replica, {})
            return too_busy, 0 if too_busy else -_num_common(hashes, noted), load[replica], len(noted)

        return sorted(load, key=order)

    def note(self, hashes: Sequence[int], replica: Replica) -> None:
        noted = self.noted.setdefault(replica, OrderedDict())
        for block in reversed(hashes):  # the first block is used last: a prefix outlives what follows it
            noted[block] = None
            noted.move_to_end(block)
        while len(noted) > self.max_blocks:
            noted.popitem(last=False)

    def keep(self, replicas: Iterable[Replica]) -> None:
        """Forget all replicas but these, which take requests from now on."""
        self.replicas = frozenset(replicas)
        self.noted = {replica: noted for replica, noted in self.noted.items() if replica in self.replicas}


by_application: dict[str, Prefixes[Any]] = {}
"""By name of Ray Serve's application: there its router and our client, which have no other way to each other, meet."""


def _num_common(hashes: Sequence[int], noted: Mapping[int, None]) -> int:
    return next((number for number, block in enumerate(hashes) if block not in noted), len(hashes))
