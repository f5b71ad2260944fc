"""Ranks that have requests of their own, and divide the experts of one model among them.

Each rank has a whole engine: scheduler, pages, sampler, and all weights but those of experts that other ranks have.
Rank 0, the driver, is the process that others talk to: it gives every request to the rank that has the fewest, tells
all ranks to make a step, and collects their updates. In every step each rank exchanges rows with the others in every
MoE layer, so a rank without work takes part with none (Runner.join). Nothing else is shared: a prefix that one rank has
computed is not found by another.

With tensor parallelism too, an engine is that of several ranks: its first has the scheduler, and the others follow it,
as those of any divided model do. Of their tokens each sends its share to experts, which are divided among all ranks.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.engine.engine import Engine
from anabranch.ranks.runner import Environment, Keys, RanksRunner
from anabranch.request import Update
from anabranch.stats import combined

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.distributed_c10d import Store

    from anabranch.config import EngineConfig
    from anabranch.platforms import Platform
    from anabranch.request import Request


COMMON = ("steps", "max_model_len", "expert_ranks")
"""Statistics of all ranks together; others are sums."""


class DriverRunner(RanksRunner):
    """Rank 0's runner, through which its engine talks to the others."""

    def idle(self, waiting: bool = False) -> None:
        """Ranks miss sizes of captured steps at different times, and must have the same."""

    def _begin_step(self) -> None:
        """The engine has called `turn`, before it told the others."""

    def send(self, engine: int, name: str, *args: Any) -> None:
        with self._watched("a step"):
            self._tell([self.others[engine - 1]], name, *args)

    def tell(self, name: str, *args: Any) -> None:
        with self._watched("a step"):
            self._tell(self.others, name, *args)

    def replies(self) -> list[Any]:
        self._carried_out()
        with self._watched("a step"):
            return self._replies(self.others)


class DataParallelEngine(Engine):
    """Rank 0's engine, and that of all ranks to others."""

    runner: DriverRunner

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rank_of: dict[str, int] = {}
        """Of every request that has not ended."""
        self.num_requests = [0] * self.config.data_parallel_size
        """Of each rank, of those."""
        self.talking = threading.Lock()
        """Statistics may be asked for while another thread makes a step."""
        self.interrupted = False
        """A step has begun and not ended, by Ctrl-C in particular: ranks are not at the same place any more."""

    def add(self, request: Request) -> None:
        rank = self.num_requests.index(min(self.num_requests))
        if rank == 0:
            super().add(request)
        else:
            self._check(request)
            self.runner.send(rank, "add", request)
        self.rank_of[request.id] = rank
        self.num_requests[rank] += 1

    def _check(self, request: Request) -> None:
        if request.id in self.rank_of:
            raise ValueError(f"request id {request.id!r} is in use")
        super()._check(request)

    def abort(self, id: str) -> None:
        rank = self._ended(id)
        if rank == 0:
            super().abort(id)
        elif rank is not None and not self.interrupted:
            self.runner.send(rank, "abort", id)

    def _ended(self, id: str) -> int | None:
        """The request's rank, which has one request less now; None if it had ended before."""
        rank = self.rank_of.pop(id, None)
        if rank is not None:
            self.num_requests[rank] -= 1
        return rank

    @property
    def has_work(self) -> bool:
        return bool(self.rank_of) or super().has_work

    def step(self) -> list[Update]:
        with self.talking:
            self._check_ranks()
            self.interrupted = True
            self.runner.turn()
            self.runner.tell("step")
            updates = super().step()
            for others in self.runner.replies():
                updates += others
            self.interrupted = False
        for update in updates:
            if update.finish_reason is not None:
                self._ended(update.id)
        return updates

    def _check_ranks(self) -> None:
        if self.interrupted:
            raise RuntimeError("a step was interrupted or has failed, and ranks are not in step; make a new engine")

    def set_drafting(self, drafting: bool) -> None:
        assert not self.rank_of
        self.runner.tell("set_drafting", drafting)
        super().set_drafting(drafting)

    def rebalance(self) -> None:
        with self.talking:
            self._check_ranks()
            super().rebalance()

    def stats(self) -> dict[str, Any]:
        with self.talking:
            self._check_ranks()
            self.runner.tell("stats")
            every = [super().stats(), *self.runner.replies()]
        return combined(every) | {name: max(stats[name] for stats in every) for name in COMMON}

    def close(self) -> None:
        for id in list(self.rank_of):
            self.abort(id)
        super().close()


class DataParallelRank:
    """What the first rank of another engine does for the driver."""

    def __init__(
        self,
        config: EngineConfig,
        platform: Platform,
        rank: int,
        store: Keys | Store,
        environments: Sequence[Environment],
    ) -> None:
        self.config = config
        self.runner = AgreeingRunner(config, platform, None, rank, store, environments)
        self.refused: list[Update] = []

    def num_pages(self) -> list[int]:
        return self.runner.num_pages()

    def allocate(self, num_pages: list[int], max_model_len: int) -> None:
        from anabranch.text.tokenizer import Tokenizer

        self.runner.agreed = num_pages
        folder = Path(self.config.model)
        tokenizer = Tokenizer(folder) if (folder / "tokenizer.json").exists() else None
        self.engine = Engine(self.config, self.runner, self.runner.model.config, tokenizer)

    def warm_up(self) -> None:
        self.runner.warm_up()

    def add(self, request: Request) -> None:
        try:
            self.engine.add(request)
        except ValueError as error:
            self.refused.append(Update(id=request.id, finish_reason="error", error=str(error)))

    def abort(self, id: str) -> None:
        self.engine.abort(id)

    def set_drafting(self, drafting: bool) -> None:
        self.engine.set_drafting(drafting)

    def step(self) -> list[Update]:
        refused, self.refused = self.refused, []
        return refused + self.engine.step()

    def rebalance(self) -> None:
        self.runner.rebalance()

    def stats(self) -> dict[str, Any]:
        return self.engine.stats()


class AgreeingRunner(RanksRunner):
    agreed: list[int] | None = None
    """Pages of each cache group, as the driver has decided for all ranks."""

    def _begin_step(self) -> None:
        """The driver says when experts move."""

    def num_pages(self) -> list[int]:
        return super().num_pages() if self.agreed is None else self.agreed
