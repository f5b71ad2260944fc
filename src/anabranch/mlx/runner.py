"""The Runner of MLX: the whole model through mlx_lm, its caches, the sampler.

A share's tokens but the last are computed alone, for their keys and values; the last tokens of all shares that sample
run together, so that logits are made of nothing else. Sampling is torch's, on the host: logits cross over once a step,
and from the same logits a seed draws the same tokens as on any other platform.

All that touches MLX runs in one thread of the runner's own (`thread`), while the caller waits. What a step computes is
enqueued there, and sampled when its tokens are read or when the next step needs them.

R sampled rows, B rows of a batch, V vocabulary, N tokens, L MoE layers, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.utils import maybe_set_recommended_wired_limit

from anabranch import kernels, platforms
from anabranch.config import EngineConfig
from anabranch.engine import plan
from anabranch.engine.runner import Launched, Pages, Progress, Runner
from anabranch.engine.sampler import Sampler
from anabranch.engine.sampling_plan import Logprobs, token_logprobs
from anabranch.engine.scheduler import Sequence, Share
from anabranch.engine.slots import Slots
from anabranch.mlx import families, memory
from anabranch.mlx.expert_watch import ExpertWatch
from anabranch.mlx.kv_cache import Batch, Row, empty_caches
from anabranch.mlx.load import DTYPES, load
from anabranch.mlx.thread import MlxThread
from anabranch.mlx.working_set import Pool, WorkingSet
from anabranch.models.config import read_config
from anabranch.platforms import Platform
from anabranch.stages import count, stage

ROWS_OF_LOGITS = 256
"""Prompt rows whose logits are in memory at the same time."""


@dataclass(slots=True)
class InFlight:
    """A step that MLX computes, and what it takes to sample from it."""

    runner: MlxRunner
    launched: Launched
    rows: list[Row]
    """Of the shares, in their order."""
    logits: list[mx.array] = field(default_factory=list)
    """[B, V] of each batch."""
    logits_rows: list[Row] = field(default_factory=list)
    """Whose they are, one batch after another."""
    experts: list[tuple[list[Row], mx.array]] = field(default_factory=list)
    """expert_NLK of N tokens of one row, or of one token each of N rows."""
    counts: bool = False
    """They join the histogram."""
    token_R: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        if self.token_R is None:
            self.runner.thread.run(lambda: self.runner.finish(self))
        assert self.token_R is not None
        return self.token_R


class MlxRunner(Runner):
    embeds = False  # mlx_lm's models return logits

    def __init__(self, config: EngineConfig, platform: Platform, progress: Progress | None) -> None:
        self.platform = platform
        self.config = config
        self.model = read_config(config.model, quantized=True)
        kernels.bind(platforms.make("cpu"))  # for the sampler
        self.thread = MlxThread()
        with stage("weights"):
            self.loaded = self.thread.run(lambda: load(config, self.model, platform, progress))
            count(self.loaded.num_bytes)
        self.in_flight: InFlight | None = None

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.loaded.dtype)

    def num_pages(self) -> list[int]:
        return memory.num_pages(
            self.config, self.model, self.loaded.dtype, self.loaded.num_bytes, self.platform.memory()
        )

    def allocate(self, num_pages: list[int], max_model_len: int) -> None:
        self.config = replace(self.config, max_model_len=max_model_len)
        self.thread.run(lambda: self._allocate(num_pages))

    def _allocate(self, num_pages: list[int]) -> None:
        config, model, dtype = self.config, self.model, self.loaded.dtype
        cost = partial(memory.working_bytes, model, dtype)
        self.working = WorkingSet(
            Pool(model, num_pages, config.page_size, DTYPES[dtype]),
            families.windows(model, config.max_model_len),
            room=max(plan.pages_bytes(model, num_pages, config.page_size, dtype), cost([config.max_model_len])),
            cost=cost,
            share=config.prefix_cache,
        )
        self.sampler = Sampler(config.max_num_seqs, model.vocab_size, self.platform.device, config.seed)
        self.experts = ExpertWatch(self.loaded.model)
        self.rows: dict[Sequence, Row] = {}
        """Of sequences that run."""
        self.slots = Slots(self.sampler, model.eos_ids)
        self.last_tokens = [0] * config.max_num_seqs
        """Per slot; the engine may not have read it yet."""
        # MLX keeps what it frees for reuse until memory is short. On a Mac that is too late.
        mx.set_memory_limit(int(self.platform.memory().total * config.memory_fraction))
        mx.set_cache_limit(memory.workspace_bytes(config, model, dtype))
        maybe_set_recommended_wired_limit()

    def warm_up(self) -> None:
        """What MLX compiles at first use, it compiles now: a prompt's kernels, one row's, a batch's."""
        with stage("compile"):
            self.thread.run(self._warm_up)

    def _warm_up(self) -> None:
        batches = [Batch([], empty_caches(self.working.windows)) for _ in range(2)]
        for batch in batches:
            for tokens in ([0, 0], [0]):
                mx.eval(batch.forward(self.loaded.model, [tokens]))
        merged = [type(layer[0]).merge(layer) for layer in zip(*(batch.caches for batch in batches))]
        mx.eval(Batch([], merged).forward(self.loaded.model, [[0], [0]]))

    # -- one step ------------------------------------------------------------------------------------------------------

    def launch(self, shares: list[Share], pages: Pages) -> Launched:
        """Enqueue one step. Waits for the one before, whose tokens it needs, but not for this one."""
        return self.thread.run(lambda: self._launch(shares, pages))

    def _launch(self, shares: list[Share], pages: Pages) -> Launched:
        if self.in_flight is not None:
            self.finish(self.in_flight)
        self._sweep()
        rows = [self._row(share, pages) for share in shares]
        launched = Launched(shares=shares, sampling=[share for share in shares if share.num_samples])
        launched.tokens = step = self.in_flight = InFlight(self, launched, rows)
        step.counts = bool(self.config.expert_load_interval)
        self.experts.wanted = step.counts or any(s.sequence.request.params.return_routed_experts for s in shares)

        last_token: dict[Row, int] = {}
        for share, row in zip(shares, rows, strict=True):
            tokens = share.sequence.tokens[share.begin : share.end]
            if share.end > len(share.sequence.tokens):
                tokens.append(self.last_tokens[row.slot])
            assert share.num_samples <= 1, "MLX's steps sample one token of a request"
            if share.num_samples:
                last_token[row] = tokens.pop()
            if tokens:
                self._prefill(step, share, row, tokens)
        for group in self._groups(list(last_token)):
            self._decode(step, group, last_token)
        arrays = [array for batch in self.working.batches for array in batch.arrays()]
        experts = [expert_NLK for _, expert_NLK in step.experts]
        mx.async_eval(step.logits, experts, arrays, self.working.pool.take_changes())
        return launched

    def _sweep(self) -> None:
        """Remove the rows of sequences that have left their slot, even if they have come back since."""
        left = [row for s, row in self.rows.items() if s.slot != row.slot or not s.placed]
        self.working.leave(left)
        for row in left:
            del self.rows[row.sequence]

    def _row(self, share: Share, pages: Pages) -> Row:
        sequence = share.sequence
        if not sequence.placed:
            self.slots.place(sequence)
            # Its first tokens may be in pages that other requests filled.
            tables = pages(sequence.id)
            self.rows[sequence] = Row(sequence, sequence.slot, tables, length=share.begin, saved=share.begin)
        row = self.rows[sequence]
        assert row.length == share.begin
        return row

    def _groups(self, rows: list[Row]) -> list[list[Row]]:
        """Rows that decode together. Those that wait for the host skip every other step: in a batch with others they
        would be taken out and put back each time."""
        if not self.config.async_scheduling:
            return self.working.groups(rows)
        apart = [[row for row in rows if row.sequence.waits_for_host is waits] for waits in (False, True)]
        return [group for part in apart for group in self.working.groups(part)]

    def _decode(self, step: InFlight, rows: list[Row], last_token: dict[Row, int]) -> None:
        """One token for each."""
        batch = self.working.assemble(rows)
        logits_B1V = batch.forward(self.loaded.model, [[last_token[row]] for row in batch.rows])
        step.logits.append(logits_B1V[:, -1].astype(mx.float32))
        step.logits_rows += batch.rows
        self._keep_experts(step, list(batch.rows))
        self.working.save(batch)

    def _prefill(self, step: InFlight, share: Share, row: Row, tokens: list[int]) -> None:
        """Compute tokens from which nothing is sampled. Their logits are computed only for log probabilities."""
        sequence, targets = share.sequence, share.prompt_targets
        top_n = sequence.request.params.prompt_logprobs or 0
        size = ROWS_OF_LOGITS if targets else memory.PREFILL_TOKENS
        batch = self.working.assemble([row], len(tokens))
        for begin in range(0, len(tokens), size):
            if begin:  # else a long prompt would be one large graph
                mx.eval(batch.arrays(), self.working.pool.take_changes())
            logits_1NV = batch.forward(self.loaded.model, [tokens[begin : begin + size]])
            if part := targets[begin : begin + size]:
                found = step.launched.prompt_logprobs.setdefault(sequence.id, [])
                found.append(_logprobs(logits_1NV[0, : len(part)], part, top_n))
            self._keep_experts(step, [row])
            self.working.save(batch)
            batch.trim()

    def _keep_experts(self, step: InFlight, rows: list[Row]) -> None:
        if (expert_NLK := self.experts.take()) is not None:
            step.experts.append((rows, expert_NLK))

    def finish(self, step: InFlight) -> None:
        """Wait for the step and sample from it, once. For MLX's thread."""
        if step.token_R is not None:
            return
        row_of = dict(zip((share.sequence for share in step.launched.shares), step.rows, strict=True))
        sampling = [row_of[share.sequence] for share in step.launched.sampling]
        if sampling:
            logits_RV = torch.from_numpy(np.array(mx.concatenate(step.logits)))
            place = {row: index for index, row in enumerate(step.logits_rows)}
            order = [place[row] for row in sampling]
            if order != list(range(len(order))):
                logits_RV = logits_RV[order]
            slots = [row.slot for row in sampling]
            step.launched.sampled = self.sampler.sample(logits_RV, slots)
            step.token_R = step.launched.sampled.token_R
            for slot, token in zip(slots, step.token_R.tolist(), strict=True):
                self.last_tokens[slot] = max(token, 0)  # negative: there is none
        else:
            step.token_R = torch.zeros(0, dtype=torch.int64)
        self._finish_experts(step)
        step.logits.clear()
        if self.in_flight is step:
            self.in_flight = None

    def _finish_experts(self, step: InFlight) -> None:
        if not step.experts:
            return
        routed = any(share.sequence.request.params.return_routed_experts for share in step.launched.shares)
        parts: dict[Row, list[np.ndarray]] = {row: [] for row in step.rows}
        for rows, lazy_NLK in step.experts:
            expert_NLK = np.array(lazy_NLK).astype(np.int64)
            if step.counts:
                self.experts.count(expert_NLK)
            if not routed:
                continue
            for row, part in zip(rows, np.split(expert_NLK, len(rows)), strict=True):
                parts[row].append(part)
        step.experts.clear()
        if not routed:
            return
        expert_TLK = np.concatenate([part for row in step.rows for part in parts[row]])
        step.launched.routed = self.platform.fetch(torch.from_numpy(expert_TLK))

    def accept(self, sequence: Sequence, token: int) -> str | None:
        return self.slots.accept(sequence, token)

    def expert_load(self, settled: bool = False) -> list[list[int]]:
        return self.experts.count_LE.tolist()

    def check(self) -> None:
        self.sampler.check()
        self.thread.run(self.working.check)

    def close(self) -> None:
        self.thread.close()


def _logprobs(logits_NV: mx.array, targets: list[int], top_n: int) -> Logprobs:
    logits = torch.from_numpy(np.array(logits_NV.astype(mx.float32)))
    return token_logprobs(logits, torch.tensor(targets), top_n).to_host()
