"""The contract between the engine and what executes its steps, and what crosses between them.

The engine decides what each sequence computes and which pages it has; a runner owns the model, the pages' memory and
the sampling state. Platforms name their runner as "module:class" (Platform.runner).
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

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


RANKS = "anabranch.engine.ranks:RanksRunner"
"""The runner of a model that is divided among ranks."""


@dataclass(slots=True)
class Launched:
    """A step that was launched. `wait` gives what it sampled."""

    shares: list[Share]
    sampling: list[Share]
    """Of each row that samples: a share with several such rows comes as often."""
    sampled: Sampled | None = None
    tokens: Fetch | None = None
    routed: Fetch | None = None
    """expert_TLK of the step's tokens: T token rows, L MoE layers, K experts per token."""
    prompt_logprobs: dict[str, list[Logprobs]] = field(default_factory=dict)

    def wait(self) -> list[int]:
        """One token for each of `sampling`."""
        return [] if self.tokens is None else self.tokens.wait().tolist()


class Runner(Protocol):
    """Made with (config, platform, progress), which loads the model; then `allocate` and `warm_up`, once each."""

    platform: Platform

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

    def accept(self, sequence: Sequence, token: int) -> str | None:
        """The host has read the sequence's last token; for sequences with `waits_for_host`. Returns "stop" if the
        request's grammar is complete with it, another text if the grammar does not allow it."""

    def take_back(self, counts: dict[Sequence, int]) -> None:
        """The last so many tokens that the sequences sampled do not count: they follow drafts that were wrong."""
        return

    def expert_load(self, settled: bool = False) -> list[list[int]]:
        """Tokens by MoE layer and expert since the start; up to date if no step is in flight (`settled`)."""

    def close(self) -> None:
        """Nothing is called after this."""
        return


def load_runner(config: EngineConfig, platform: Platform, progress: Progress | None = None) -> Runner:
    """The platform's runner, with the model loaded."""
    module, _, name = (RANKS if config.tensor_parallel_size > 1 else platform.runner).partition(":")
    runner: Runner = getattr(importlib.import_module(module), name)(config, platform, progress)
    return runner
