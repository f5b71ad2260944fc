"""The contract between the engine and what executes its steps, and what crosses between them.

The engine decides what each sequence computes and which pages it has; a runner owns the model, the pages' memory and
the sampling state. Platforms name their runner as "module:class" (Platform.runner).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import ClassVar, Protocol

import torch

from anabranch.config import EngineConfig
from anabranch.engine.sampling_plan import Logprobs, Sampled
from anabranch.engine.scheduler import Sequence, Share
from anabranch.platforms import Fetch, Platform

Pages = Callable[[str], list[list[int]]]
"""Request id → for each cache group, the page of each logical page, all equally many. The same object as long as the
sequence keeps its slot: it may only get longer."""
StateCopy = tuple[int, int, int]
"""(cache group, source page, target page), in all layers of the group."""
Progress = Callable[[int, int], None]
"""Called with (done, total)."""


RANKS = "anabranch.ranks.runner"
"""Of a model that is divided among ranks: the module of its runner. The room `ranks` is imported where it is needed."""
DATA_PARALLEL = "anabranch.ranks.data_parallel"
"""Where ranks have requests of their own: the module of their runner and their engines."""


@dataclass(slots=True)
class Launched:
    """A step that was launched. `wait` gives what it sampled."""

    shares: list[Share]
    sampling: list[Share]
    """Of each row that samples: a share with several such rows comes as often."""
    sampled: Sampled | None = None
    tokens: Fetch | None = None
    drafts: Fetch | None = None
    """From a draft layer, the first drafts of all, the second ones and so on: for each of `sampling`, what may follow
    its token, if that is the last of its sequence that counts."""
    routed: Fetch | None = None
    """expert_TLK of the step's tokens: T token rows, L MoE layers, K experts per token."""
    prompt_logprobs: dict[str, list[Logprobs]] = field(default_factory=dict)
    pooled: Fetch | None = None
    """The sum of the rows that go into an embedding, of each share that has some."""

    def wait(self) -> list[int]:
        """One token for each of `sampling`."""
        return [] if self.tokens is None else self.tokens.wait().tolist()


class Runner(Protocol):
    """Made with (config, platform, progress), which loads the model; then `allocate` and `warm_up`, once each."""

    platform: Platform
    embeds: ClassVar[bool] = True
    """Whether it computes embeddings (Launched.pooled)."""

    @property
    def failure(self) -> str:
        """Why no step can end any more, known though one may still be running; "": nothing is known to have failed."""
        return ""

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, keys and values."""

    def num_pages(self) -> list[int]:
        """Pages of each cache group: as configured, else as many as there is memory for."""

    def allocate(self, num_pages: list[int], max_model_len: int) -> None:
        """Take the memory for pages and per-slot state. `max_model_len`: as far as these pages allow."""

    def warm_up(self) -> None:
        """Compile and capture ahead what most steps need."""

    def idle(self, waiting: bool = False) -> None:
        """Do one thing that makes later steps faster, if there is any. `waiting`: the caller waits for it."""
        return

    def copy_states(self, copies: list[StateCopy]) -> None:
        """Enqueue copies of states, one after another, before the next step. Only for models that have states."""
        raise NotImplementedError

    def launch(self, shares: list[Share], pages: Pages) -> Launched:
        """Enqueue one step, its shares of one token first."""

    def join(self) -> None:
        """Where ranks have requests of their own: take part in a step of the others, without rows."""
        return

    def accept(self, sequence: Sequence, token: int) -> str | None:
        """The host has read the sequence's last token; for sequences with `waits_for_host`. Returns "stop" if the
        request's grammar is complete with it, another text if the grammar does not allow it."""

    def take_back(self, counts: dict[Sequence, int]) -> None:
        """The last so many tokens that the sequences sampled do not count: they follow drafts that were wrong."""
        return

    def settle(self, shares: list[Share], counts: list[int]) -> None:
        """Of each share of the step launched last, in which there were drafts: how many of its sampled tokens count.
        States then have all tokens before the last of these, as if there had been no others."""
        return

    def rebalance(self) -> None:
        """Divide experts anew among ranks, by their load, between two steps. All ranks have the same room for them."""
        raise NotImplementedError

    def expert_ranks(self) -> list[list[tuple[int, ...]]]:
        """By MoE layer and rank: which experts it has. Empty where they are on one rank."""
        return []

    def expert_load(self, settled: bool = False) -> list[list[int]]:
        """Tokens by MoE layer and expert since the start; up to date if no step is in flight (`settled`)."""

    def close(self) -> None:
        """Nothing is called after this."""
        return


def load_runner(config: EngineConfig, platform: Platform, progress: Progress | None = None) -> Runner:
    """The platform's runner, with the model loaded. On a node other than the first this does not return: the process
    has the ranks of its node, and ends with them."""
    if config.nodes > 1 and (code := resolve_name(f"{RANKS}:follow_here")(config)) is not None:
        raise SystemExit(code)
    several = f"{DATA_PARALLEL}:DriverRunner" if config.data_parallel_size > 1 else f"{RANKS}:RanksRunner"
    return resolve_name(several if config.num_ranks > 1 else platform.runner)(config, platform, progress)
