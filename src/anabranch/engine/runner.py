"""Executes steps on a torch platform: the model, its pages, the sampler. Knows shares of sequences, not why they run.

R sampled rows, L MoE layers, T token rows, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from anabranch.config import EngineConfig
from anabranch.engine import kv_tensors, plan
from anabranch.engine.batch import Pages, StepMaker
from anabranch.engine.expert_watch import ExpertWatch
from anabranch.engine.sampled import Logprobs, Sampled, token_logprobs
from anabranch.engine.sampler import Sampler
from anabranch.engine.scheduler import Sequence, Share
from anabranch.loader.load import DTYPES, load_model
from anabranch.platforms import Fetch, Platform

if TYPE_CHECKING:
    from anabranch.engine.grammar import Matcher

ROWS_OF_LOGITS = 256
"""Prompt rows whose logits are in memory at the same time."""


@dataclass(slots=True)
class Launched:
    """A step on its way. What it computed is read when it is waited for."""

    shares: list[Share]
    sampling: list[Share]
    sampled: Sampled | None
    tokens: Fetch | None
    routed: Fetch | None
    prompt_logprobs: dict[str, list[Logprobs]]

    def wait(self) -> list[int]:
        """One token for each of `sampling`."""
        return [] if self.tokens is None else self.tokens.wait().tolist()


@dataclass(slots=True)
class Extras:
    """What sampling a request takes beside its parameters."""

    matcher: Matcher | None = None
    bad_word_ids: list[list[int]] = field(default_factory=list)


class TorchRunner:
    def __init__(self, config: EngineConfig, platform: Platform, progress: Callable[[int, int], None] | None) -> None:
        self.platform = platform
        self.config = config
        self.model = load_model(
            config.model,
            dtype=config.dtype,
            load_format=config.load_format,  # type: ignore[arg-type]
            platform=platform,
            progress=progress,
        )
        self.num_steps = 0
        self.extras: dict[str, Extras] = {}
        """Of requests on their way that have any."""
        self.load_fetch: Fetch | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embed_tokens.weight.dtype

    def num_pages(self) -> list[int]:
        """Pages of each KVGroup: as configured, else what the memory plan leaves for them, but no more than all
        sequences at their longest could hold, twice over where the prefix cache keeps what they leave."""
        config, model = self.config, self.model.config
        useful = [plan.pages_needed(group, config.max_model_len, config.page_size) for group in model.kv_groups]
        if config.num_pages:
            return [max(2, config.num_pages * pages // max(useful)) for pages in useful]
        memory = self.platform.memory()
        found = plan.plan_memory(
            model,
            memory.total,
            fraction=config.memory_fraction,
            dtype=next(name for name, value in DTYPES.items() if value == self.dtype),
            page_size=config.page_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
        )
        # Others may use the device too: what is free now, the weights being loaded, bounds the plan.
        found = replace(found, kv=min(found.kv, memory.free - found.workspace))
        if not found.fits:
            raise ValueError(
                f"the model does not fit: of {found.usable / 1e9:.1f} GB, {found.weights / 1e9:.1f} GB of weights "
                f"and {found.workspace / 1e9:.1f} GB of workspace leave nothing for KV pages; see `anabranch plan`"
            )
        most = config.max_num_seqs * (2 if config.prefix_cache else 1)
        planned = found.num_pages(min(config.max_model_len, 8192))
        return [min(pages, most * needed) for pages, needed in zip(planned, useful, strict=True)]

    def allocate(self, num_pages: list[int]) -> None:
        """Take the memory for pages and per-slot state."""
        config, device = self.config, self.platform.device
        groups = self.model.config.kv_groups
        self.kv = kv_tensors.allocate(self.model.config, num_pages, config.page_size, self.dtype, device)
        self.steps = StepMaker(len(groups), config.max_num_seqs, config.max_model_len, config.page_size, device)
        self.sampler = Sampler(config.max_num_seqs, self.model.config.vocab_size, device, config.seed)
        self.experts = ExpertWatch(self.model, device)
        self.owners: list[Sequence | None] = [None] * config.max_num_seqs
        """Whose sampling state a slot holds."""

    def launch(self, shares: list[Share], pages: Pages) -> Launched:
        """Enqueue one step; nothing here waits for the device."""
        num_tokens = sum(share.end - share.begin for share in shares)
        with torch.inference_mode(), self.platform.step(num_tokens):
            return self._launch(shares, pages)

    def _launch(self, shares: list[Share], pages: Pages) -> Launched:
        step = self.steps.make(shares, pages)
        record = False
        for share in shares:
            sequence = share.sequence
            if not sequence.placed:
                self._place(sequence)
            record |= sequence.request.params.return_routed_experts
        interval = self.config.expert_load_interval
        count = bool(interval) and self.num_steps % interval == 0
        self.experts.begin(count=count, record=record)
        self.num_steps += 1
        hidden_TD = self.model(step, self.kv)
        if count:
            self.load_fetch = self.platform.fetch(self.experts.count_LE)

        sampling = [share for share in shares if share.samples]
        sampled = tokens = None
        if sampling:
            last = hidden_TD[step.logit_row]
            slots = [share.sequence.slot for share in sampling]
            sampled = self.sampler.sample(self.model.logits(last), slots)
            self.steps.last_token_S[torch.tensor(slots, device=hidden_TD.device)] = sampled.token_R
            tokens = self.platform.fetch(sampled.token_R)
        routed_TLK = self.experts.routed_TLK() if record else None
        return Launched(
            shares=shares,
            sampling=sampling,
            sampled=sampled,
            tokens=tokens,
            routed=None if routed_TLK is None else self.platform.fetch(routed_TLK),
            prompt_logprobs=self._prompt_logprobs(hidden_TD, shares),
        )

    def _prompt_logprobs(self, hidden_TD: torch.Tensor, shares: list[Share]) -> dict[str, list[Logprobs]]:
        """For shares that ask: the log probability of each prompt token after the share's first, and of the one that
        follows the share."""
        found: dict[str, list[Logprobs]] = {}
        row = 0
        for share in shares:
            top_n = share.sequence.request.params.prompt_logprobs
            if top_n is not None and share.begin < share.sequence.num_prompt:
                targets = share.sequence.tokens[share.begin + 1 : min(share.end + 1, share.sequence.num_prompt)]
                found[share.sequence.id] = []
                for begin in range(0, len(targets), ROWS_OF_LOGITS):
                    target_T = torch.tensor(targets[begin : begin + ROWS_OF_LOGITS], device=hidden_TD.device)
                    logits = self.model.logits(hidden_TD[row + begin :][: target_T.shape[0]])
                    found[share.sequence.id].append(token_logprobs(logits, target_T, top_n).to_host())
            row += share.end - share.begin
        return found

    def _place(self, sequence: Sequence) -> None:
        """Put the sequence's sampling state into its slot, where that of an earlier one may still be."""
        if self.owners[sequence.slot] is not None:
            self.sampler.remove(sequence.slot)
        self.owners[sequence.slot] = sequence
        sequence.placed = True
        extras = self.extras.get(sequence.id, Extras())
        self.sampler.add(
            sequence.slot,
            sequence.request,
            sequence.output,
            extras.matcher,
            eos_ids=self.model.config.eos_ids,
            bad_word_ids=extras.bad_word_ids,
        )

    def accept(self, sequence: Sequence, slot: int, token: int) -> str | None:
        """The host knows a token that was sampled in `slot` (−1: the sequence has left it and is told when placed).

        Gives "stop" if the request's grammar is complete with it, another text if the grammar broke down over it.
        """
        if slot < 0 or self.owners[slot] is not sequence:
            return None
        allowed = self.sampler.accept(slot, token)
        extras = self.extras.get(sequence.id)
        if extras is None or extras.matcher is None:
            return None
        if not allowed:
            return f"grammar: {extras.matcher.error or f'token {token} is not allowed'}"
        return "stop" if extras.matcher.is_finished else None

    def expert_load(self) -> list[list[int]]:
        """Tokens per MoE layer and expert in the steps that were counted, as of the last copy to the host."""
        return [] if self.load_fetch is None else self.load_fetch.wait()[:, :-1].tolist()
