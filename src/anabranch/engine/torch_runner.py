"""The Runner of torch platforms: the model, its pages, the sampler. Knows shares of sequences, not why they run.

Steps in which every sequence has one token are replayed as captured graphs where the platform has them.

R sampled rows, L MoE layers, T token rows, K experts per token.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from anabranch import kernels, ops
from anabranch.compile.capture import BySize, Captured
from anabranch.compile.compiled import CompiledDecoder
from anabranch.compile.compiler import PieceCompiler
from anabranch.compile.pieces import Buffers, PiecesStep
from anabranch.compile.prompt import PromptStep
from anabranch.compile.recorded import RecordedSteps
from anabranch.compile.sizes import common_decode, common_prefill, decode_sizes, prefill_sizes, prompt_sizes
from anabranch.config import EngineConfig
from anabranch.engine import kv_tensors, plan
from anabranch.engine.batch import HostStep, Order, StepMaker
from anabranch.engine.dry_run import dry_run
from anabranch.engine.expert_counter import ExpertCounter
from anabranch.engine.layer_drafts import LayerDrafts, known_next
from anabranch.engine.progress import Tally
from anabranch.engine.runner import Launched, Pages, Progress, Runner, StateCopy
from anabranch.engine.sampler import Sampler, captured_turns
from anabranch.engine.sampling_plan import Logprobs, Sampled, SamplingMode, token_logprobs
from anabranch.engine.scheduler import Sequence, Share
from anabranch.engine.slots import Slots
from anabranch.layers.mixer import Cache
from anabranch.layers.step import Step
from anabranch.loader.load import load_model
from anabranch.models.config import read_config
from anabranch.models.decoder import Parts
from anabranch.moe.dispatch import Exchange
from anabranch.moe.rebalance import rebalance
from anabranch.moe.tuning import tune
from anabranch.parallel.group import ALONE, PRESENCE, Group, on_host, split
from anabranch.platforms import Fetch, Platform
from anabranch.stages import stage

LARGEST_PREFILL = 2048
"""Token rows up to which steps are captured: beyond, the device takes longer over a layer than the host. But many
requests are served at a time with small models, where it does not: see `largest_captured`."""
ROWS_OF_LOGITS = 256
"""Prompt rows whose logits are in memory at the same time."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """The results of a captured decode step."""

    token_R: torch.Tensor
    """Not for requests that want more of the sampler: theirs are drawn from the logits afterwards."""
    logits_RV: torch.Tensor
    """As the model gives them."""
    experts: list[torch.Tensor]
    """expert_TK of each MoE layer."""
    hidden_RD: torch.Tensor | None
    """For the draft layer; None: there is none."""
    draft_NR: torch.Tensor | None
    """What it expects after each token (see Launched.drafts)."""


class TorchRunner(Runner):
    def __init__(
        self, config: EngineConfig, platform: Platform, progress: Progress | None, group: Group = ALONE
    ) -> None:
        self.platform = platform
        self.config = config
        self.drafting = config.speculative != "none"
        """Whether rows of a decode step may be drafts: then the host knows the tokens of all rows."""
        self.exchange: Exchange | None = None
        """Of ranks that have requests of their own."""
        if config.data_parallel_size > 1:
            every, group = group, split(group, config.tensor_parallel_size)
            self.exchange, self.host_group = Exchange(every, group), on_host(every, config.tensor_parallel_size)
        memory = platform.memory()
        model = read_config(
            config.model,
            kv_cache_dtype=config.kv_cache_dtype,
            state_dtype=config.state_dtype,
            speculative=config.speculative,
        )
        num_experts = max((layer.moe.num_experts for layer in model.layers if layer.moe is not None), default=0)
        self.expert_share = config.expert_share(num_experts)
        plan.check_memory(  # before the weights take memory
            model.divide(group.rank, group.size, config.expert_parallel),
            config,
            config.dtype,
            num_ranks=group.size,
            expert_share=self.expert_share,
            free=memory.free + memory.cached,
            total=memory.total,
            captured_tokens=self.captured_tokens,
        )
        self.model = load_model(
            config.model,
            dtype=config.dtype,
            load_format=config.load_format,  # type: ignore[arg-type]
            quantization=config.quantization,
            kv_cache_dtype=config.kv_cache_dtype,
            state_dtype=config.state_dtype,
            speculative=config.speculative,
            platform=platform,
            progress=progress,
            moe_combine=config.moe_combine,
            shared_expert=config.shared_expert,
            deterministic=config.deterministic,
            group=group,
            expert_parallel=config.expert_parallel,
            expert_slots=config.expert_slots(num_experts) if config.expert_copies or config.rebalance_interval else 0,
            exchange=self.exchange,
        )
        shown = None if progress is None else Tally("measuring tiles")
        with stage("tune"):
            tune(self.model, platform, config.tune, config.max_num_batched_tokens, shown)
        self.num_active = plan.count_active(self.model.config)
        self.placed_by: torch.Tensor | None = None
        """Tokens by MoE layer and expert when experts were divided among ranks the last time."""
        self.decodes: BySize[SamplingMode, Captured[Decoded]] | None = None
        """Captured steps of single tokens, where the platform has graphs."""
        self.drafted: BySize[SamplingMode, Captured[Decoded]] | None = None
        """The same with drafts, in models with states: these change in `settle`."""
        self.prompts: BySize[str, PromptStep] | None = None
        """Captured steps of one request with several tokens."""
        self.prefills: BySize[str, PiecesStep] | None = None
        """Captured steps of other shapes, in pieces."""
        self.compiled: CompiledDecoder | None = None
        """For steps of more tokens than any captured one has, where pieces are compiled."""
        self.recorded: RecordedSteps | None = None
        """Steps of single tokens where kernels are called from the host, on a CPU."""

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embed_tokens.weight.dtype

    def num_pages(self) -> list[int]:
        config, model = self.config, self.model.config
        if config.num_pages:
            sizes = config.num_pages, config.max_model_len, config.page_size
            return plan.pages_for(model, *sizes, config.prefix_cache)
        memory = self.platform.memory()
        found = plan.plan_memory(
            model,
            memory.total,
            fraction=config.memory_fraction,
            dtype=str(self.dtype).removeprefix("torch."),
            page_size=config.page_size,
            max_num_batched_tokens=config.max_num_batched_tokens * config.data_parallel_size,
            max_num_seqs=config.max_samples,
            captured_tokens=self.captured_tokens,
            num_ranks=self.model.group.size,
            expert_share=self.expert_share,
        )
        # Other processes may use the device too: the plan is limited by what is free now, with the weights loaded.
        left = min(found.kv, memory.free + memory.cached - found.workspace)
        found = replace(found, kv=left - self._draft_bytes())
        return found.pool_pages(config, "see `anabranch plan`")

    def _draft_bytes(self) -> int:
        """Of the rows that mixers with states keep until `settle`."""
        kept = [layer.mixer for layer in self.model.config.layers if not layer.mixer.cache.policy.per_token]
        num_rows = self.config.max_samples if self.drafting else 0
        return num_rows * sum(mixer.values_per_row for mixer in kept) * self.dtype.itemsize

    def allocate(self, num_pages: list[int], max_model_len: int) -> None:
        self.config = config = replace(self.config, max_model_len=max_model_len)
        device = self.platform.device
        groups = self.model.config.cache_groups
        caches = kv_tensors.allocate(self.model.config, num_pages, config.page_size, self.dtype, device)
        self.kv = caches[: len(self.model.layers)]
        states = [index for index, group in enumerate(groups) if not group.policy.per_token]
        self.states = kv_tensors.stack_states(self.model.config, self.kv)
        self.draft_states: dict[int, Any] = {}
        """Of each group with states, if there may be drafts: what its mixers keep until `settle`."""
        for index in states if self.drafting else ():
            layers = groups[index].layers
            mixers: list[Any] = [self.model.layers[layer_id].mixer for layer_id in layers]
            kept = mixers[0].draft_states(mixers, self.states[index], config.max_samples, self.dtype)
            self.draft_states[index] = kept
            for layer_id, kept_NX in zip(layers, kept.kept_MNX, strict=True):
                self.kv[layer_id] = *self.kv[layer_id], kept_NX
        sizes = config.max_num_seqs, config.max_model_len, config.page_size
        self.steps = StepMaker(len(groups), *sizes, device, states=states, num_ahead=config.num_ahead)
        self.layer_drafts = None
        if self.model.mtp is not None:
            self.layer_drafts = LayerDrafts(self.model, self.steps, caches[-1], config.max_drafts)
        vocab_size = self.model.config.vocab_size
        self.sampler = Sampler(config.max_num_seqs, vocab_size, device, config.seed, config.max_samples)
        self.experts = ExpertCounter(self.model, self.platform, config.expert_load_interval)
        self.slots = Slots(self.sampler, self.model.config.eos_ids)
        self._plan_graphs()
        if ops.linear.bound and ops.linear.bound[0].provider in ("c", "invariant") and self.exchange is None:
            self.recorded = RecordedSteps(self.model, self.kv, self.steps.width)

    def warm_up(self) -> None:
        """Compile and capture the steps that most requests will meet."""
        with stage("compile"), torch.inference_mode():
            kernels.compile_ahead(self.platform, partial(dry_run, self))
        with stage("capture"), torch.inference_mode():
            for prompts in (self.prompts, self.prefills):
                if prompts is not None:
                    for size in common_prefill(prompts.sizes):
                        prompts.add("any", size)
            for decodes in (self.decodes, self.drafted):
                if decodes is not None:
                    for size in common_decode(decodes.sizes):
                        decodes.add("greedy", size)
                        decodes.add("drawn", size)

    def idle(self, waiting: bool = False) -> None:
        """Capture a size that was missed."""
        with torch.inference_mode():
            for captured in self.captured:
                if captured is not None and captured.make_missed(waiting):
                    return

    @property
    def captured(self) -> tuple[BySize[Any, Any] | None, ...]:
        return self.decodes, self.drafted, self.prompts, self.prefills

    @property
    def largest_captured(self) -> int:
        """Token rows; room for every request's next token and as many of new prompts three times over."""
        return min(self.config.max_num_batched_tokens, max(LARGEST_PREFILL, 4 * self.config.max_num_seqs))

    @property
    def longest_prompt(self) -> int:
        """Token rows of the largest step of one request that is captured whole. Longer ones keep the device busy for so
        long that launches from the host cost nothing, and graphs have memory of their own."""
        config = self.config
        return max(2, min(config.max_num_batched_tokens, config.max_model_len, self.platform.batch_tokens // 2))

    @property
    def captured_tokens(self) -> int:
        """Token rows of the largest captured step of any kind."""
        config = self.config
        if config.graphs in ("decode", "none"):
            return config.max_samples if config.graphs == "decode" else 0
        return max(self.largest_captured, self.longest_prompt if config.graphs == "full" else 0)

    def _plan_graphs(self) -> None:
        config, platform = self.config, self.platform
        most = max(self.captured_tokens, config.max_samples)
        self.model.group.reserve(platform, most * self.model.config.hidden_size * self.dtype.itemsize)
        pool = platform.make_graph_pool()
        if config.graphs not in ("pieces", "none") and platform.graph_mode == "full":

            def decode(kind: SamplingMode, size: int, drafts: bool = False) -> Captured[Decoded]:
                body = partial(self.decode, kind, kv=self.kv, drafts=drafts)
                return Captured(platform, pool, self.steps.padding(size), body)

            self.decodes = BySize(decode_sizes(config.max_samples), decode)
            if self.draft_states:
                self.drafted = BySize(decode_sizes(config.max_samples), partial(decode, drafts=True))
        if config.graphs not in ("decode", "none"):
            largest = max(2, self.largest_captured)  # compilers take one for special
            buffers = Buffers(self.model, largest, platform.device, self.dtype)
            start = self._start
            if config.graphs in ("compiled", "traced"):
                self.experts.record(False)  # callbacks cannot be traced
                name = "inductor" if config.graphs == "compiled" else "none"
                compiler = PieceCompiler(name, platform, max(2, config.max_num_batched_tokens))
                with torch.inference_mode():
                    self.compiled = CompiledDecoder(self.model, compiler)
                start = self.compiled.start
            self.prefills = BySize(
                prefill_sizes(largest),
                lambda _, size: PiecesStep(platform, pool, self.model, self.kv, buffers, size, start),
            )
        if config.graphs == "full":
            unpack = partial(self.steps.unpack_any, num_requests=1, columns=self.steps.width)

            def prompt(kind: str, size: int) -> PromptStep:
                input = self.steps.padding_of_one(size)
                return PromptStep(platform, pool, self.model, self.kv, input, unpack, start)

            # With more rows, latent attention needs lengths that a captured step does not know.
            mixers = [layer.mixer for layer in self.model.config.layers]
            longest = min(getattr(mixer, "most_absorbed", self.longest_prompt) for mixer in mixers)
            longest = max(2, min(longest, self.longest_prompt))
            self.prompts = BySize(prompt_sizes(largest, longest), prompt, padded=largest)

    def _start(
        self, token_T: torch.Tensor, position_T: torch.Tensor, num_tokens: torch.Tensor | None
    ) -> tuple[Parts, list[torch.Tensor]]:
        """The model's layer loop, and the list to which it adds expert_TK of every MoE layer."""
        recorded = self.experts.record(True)
        return self.model.parts(token_T, position_T, num_tokens), recorded

    def copy_states(self, copies: list[StateCopy]) -> None:
        with torch.inference_mode():
            for group, source, target in copies:
                for state_LP in self.states[group]:
                    state_LP[:, target].copy_(state_LP[:, source])

    def launch(self, shares: list[Share], pages: Pages) -> Launched:
        """Enqueue one step, its shares of one token first; nothing here waits for the device."""
        if self.config.deterministic and not kernels.deterministic_bound():
            raise ValueError("deterministic: this process has started another engine without it; use another process")
        num_tokens = sum(end - begin for _, begin, end, _ in shares)
        with torch.inference_mode(), self.platform.step(num_tokens * self.num_active):
            return self._launch(shares, pages)

    def _launch(self, shares: list[Share], pages: Pages) -> Launched:
        for share in shares:
            if not share[0].placed:
                self.slots.place(share[0])
                self.steps.join(share[0].slot)
        routed = self.slots.routed
        record = bool(routed) and any(share.sequence.slot in routed for share in shares)

        rows = self.steps.host_step(shares, pages)
        if rows.logit_rows is not None and self.drafting and len(rows.logit_rows) == len(rows.slots):
            rows = rows.separate()
        mode = self._mode(shares, rows)
        if self.exchange is not None:
            mode = self._agree(len(rows.slots), mode)
        if self.model.group.size > 1:
            slots = [share.sequence.slot for share in _sampling(shares, rows)]
            known = known_next(shares, rows) if self.layer_drafts is not None else []
            most = 0 if self.exchange is None else self.exchange.most
            self.announce(Order(rows, mode, [], list(self._prompt_rows(shares)), slots, known, most))
        launched = self._replay(shares, rows, record, mode) if mode else None
        if launched is None:
            launched = self._run(shares, rows, record)
        self.experts.end_step()
        return launched

    def _run(self, shares: list[Share], rows: HostStep, record: bool) -> Launched:
        """Any step."""
        step, hidden_TD, recorded = self._forward(rows, self.experts.counts or record)
        launched = Launched(shares, _sampling(shares, rows))
        if self.slots.prompt_rows:
            launched.prompt_logprobs = self._prompt_logprobs(hidden_TD, shares)
            launched.pooled = self._pool(hidden_TD, shares)
        if launched.sampling:
            rows_RD = hidden_TD if step.logit_row is None else hidden_TD[step.logit_row]
            self._sample(launched, self.model.logits(rows_RD))
        self._draft(launched, rows, step, hidden_TD)
        self.experts.count(recorded)
        if record:
            self._keep_routed(launched, recorded)
        return launched

    def _forward(self, rows: HostStep, record: bool) -> tuple[Step, torch.Tensor, list[torch.Tensor]]:
        """(step, hidden rows, expert_TK of each MoE layer); what is not captured of it, kernel by kernel."""
        num_rows = len(rows.slots)
        prompt = None if self.prompts is None or len(rows.starts) > 2 else self.prompts.find("any", num_rows)
        if prompt is not None:
            hidden_TD = prompt.run(self.steps.pack_any(rows, prompt.size))
            step = self.steps.sampling(prompt.step, rows.logit_rows) if rows.logit_rows else prompt.step
            return step, hidden_TD, prompt.experts
        step = self.steps.unpack_rows(rows)
        if self.config.deterministic:  # what is done otherwise with many tokens would depend on the chunk
            step = replace(step, spans=())
        captured = None if self.prefills is None else self.prefills.find("any", num_rows)
        if captured is not None:
            return step, captured.run(step), captured.experts
        if self.compiled is not None:
            parts, recorded = self.compiled.start(step.token_T, step.position_T, step.num_tokens)
            return step, self.model.run(parts, step, self.kv), recorded
        if self.recorded is not None:
            found = self.recorded.run(step, partial(self.experts.record, True))
            if found is not None:
                return step, found.hidden_RD, found.experts
        recorded = self.experts.record(record)
        return step, self.model(step, self.kv), recorded

    def _mode(self, shares: list[Share], rows: HostStep) -> SamplingMode | Literal[""]:
        """How a captured step of single tokens samples; "": the step cannot be one."""
        if self.decodes is None or rows.max_query > 1 or rows.logit_rows is not None:
            return ""
        asking = self.slots.prompt_rows
        if asking and any(begin < s.num_prompt and s.slot in asking for s, begin, _, _ in shares):
            return ""
        return self.sampler.mode(rows.slots)

    def _replay(self, shares: list[Share], rows: HostStep, record: bool, mode: SamplingMode) -> Launched | None:
        """A step of single tokens as a captured graph; None if there is none for it."""
        num_rows, decoded = len(rows.slots), self._decoded(rows, mode)
        if decoded is None:
            return None
        launched = Launched(shares, _sampling(shares, rows))
        if mode == "any":
            self._sample(launched, decoded.logits_RV[:num_rows])
            if decoded.hidden_RD is not None:  # the graph did so too, but with other tokens
                self._draft(launched, rows, self.steps.unpack_rows(rows), decoded.hidden_RD[:num_rows])
        else:
            launched.sampled = Sampled(decoded.token_R[:num_rows])
            launched.tokens = self.platform.fetch(launched.sampled.token_R)
            if decoded.draft_NR is not None:
                launched.drafts = self.platform.fetch(decoded.draft_NR[:, :num_rows])
        if record:
            self._keep_routed(launched, decoded.experts)
        return launched

    def _decoded(self, rows: HostStep, mode: SamplingMode) -> Decoded | None:
        decodes = self.drafted if self.draft_states and rows.tried is not None else self.decodes
        assert decodes is not None
        num_rows = len(rows.slots) if self.exchange is None else self.exchange.most
        captured = decodes.find("greedy" if mode == "any" else mode, num_rows)
        return None if captured is None else captured.replay(self.steps.pack(rows, captured.input.shape[1]))

    def _agree(self, num_rows: int, mode: SamplingMode | Literal[""]) -> SamplingMode | Literal[""]:
        """What the ranks must know of each other before a step: how many rows the busiest has, and whether all can
        replay a captured step. Returns the mode, or "" if one of them cannot."""
        assert self.exchange is not None
        rows_R, captured_R = self.host_group.all_gather(torch.tensor([[num_rows], [bool(mode)]]), dim=1)
        self.exchange.most = int(rows_R.max())
        PRESENCE.begin(num_rows)
        return mode if captured_R.all() else ""

    def join(self) -> None:
        mode = self._agree(0, "" if self.decodes is None else "greedy")
        assert self.exchange is not None
        order = Order(HostStep([], [], [], [0], None, 1), mode, [], [], [], [], self.exchange.most)
        if self.model.group.size > 1:
            self.announce(order)
        self._take_part(order)

    def _take_part(self, order: Order) -> None:
        """A step in which this rank, and those with the same tokens, have no rows."""
        with torch.inference_mode(), self.platform.step(0):
            if order.mode and self._decoded(order.rows, order.mode) is not None:  # type: ignore[arg-type]
                return
            self.experts.record(False)
            self.model(self.steps.unpack(self.steps.padding(1), 1, padded=True), self.kv)

    def announce(self, order: Order) -> None:
        """Where the model is divided among ranks: the others are to launch this too."""
        raise NotImplementedError

    def follow(self, order: Order) -> None:
        """Launch what the driver launches, without sampling: its tokens are received."""
        rows = order.rows
        if self.exchange is not None:
            self.exchange.most = order.most
        self.steps.apply(order.tables)
        if not rows.slots:
            return self._take_part(order)
        with torch.inference_mode(), self.platform.step(len(rows.slots) * self.num_active):
            decoded = self._decoded(rows, order.mode) if order.mode else None  # type: ignore[arg-type]
            if decoded is not None and order.mode != "any":
                return  # its tokens were received in the graph
            if decoded is None:
                step, hidden_TD, _ = self._forward(rows, False)
                for begin, count in order.prompt_rows:
                    self.model.logits(hidden_TD[begin : begin + count])
                if order.slots:
                    self.model.logits(hidden_TD if step.logit_row is None else hidden_TD[step.logit_row])
            token_R = None
            if order.slots:
                token_R = torch.empty(len(order.slots), dtype=torch.int64, device=self.platform.device)
                token_R = self.model.group.broadcast(token_R)
                self.steps.keep_tokens(order.slots, token_R)
            if self.layer_drafts is not None:
                if decoded is not None:
                    assert decoded.hidden_RD is not None
                    step, hidden_TD = self.steps.unpack_rows(rows), decoded.hidden_RD[: len(rows.slots)]
                self.layer_drafts.after_any(rows, order.known_next, token_R, step, hidden_TD)

    def decode(self, kind: SamplingMode, packed_3R: torch.Tensor, kv: list[Cache], drafts: bool = False) -> Decoded:
        """What is captured: a step of single tokens, from the host's three numbers a row to the tokens it samples."""
        step = self.steps.unpack(packed_3R, self.steps.width, padded=True, drafts=drafts)
        recorded = self.experts.record(True)
        hidden_RD, draft_NR = self.model(step, kv), None
        logits_RV = self.model.logits(hidden_RD)
        slot_R = packed_3R[0].long()
        slot_R = torch.where(slot_R < 0, self.config.max_num_seqs, slot_R)
        turn_R = captured_turns(slot_R) if self.drafting and kind == "drawn" else None
        token_R = self.model.group.broadcast(self.sampler.sample_slots(logits_RV, slot_R, kind, turn_R))
        self.steps.last_token_S.index_copy_(0, slot_R, token_R)
        if self.layer_drafts is not None:
            draft_NR = self.layer_drafts.after_decode(packed_3R, token_R, step, hidden_RD)
        self.experts.count(recorded)
        return Decoded(token_R, logits_RV, recorded, hidden_RD if draft_NR is not None else None, draft_NR)

    def _draft(self, launched: Launched, rows: HostStep, step: Step, hidden_TD: torch.Tensor) -> None:
        if self.layer_drafts is not None:
            token_R = None if launched.sampled is None else launched.sampled.token_R
            known = known_next(launched.shares, rows)
            draft_NR = self.layer_drafts.after_any(rows, known, token_R, step, hidden_TD)
            launched.drafts = None if draft_NR is None else self.platform.fetch(draft_NR)

    def _sample(self, launched: Launched, logits_RV: torch.Tensor) -> None:
        slots = [share.sequence.slot for share in launched.sampling]
        launched.sampled = self.sampler.sample(logits_RV, slots)
        self.steps.keep_tokens(slots, self.model.group.broadcast(launched.sampled.token_R))
        launched.tokens = self.platform.fetch(launched.sampled.token_R)

    def _keep_routed(self, launched: Launched, recorded: list[torch.Tensor]) -> None:
        if recorded:
            num_tokens = sum(share.end - share.begin for share in launched.shares)
            launched.routed = self.platform.fetch(torch.stack(recorded, dim=1)[:num_tokens])

    def _prompt_rows(self, shares: list[Share]) -> Iterator[tuple[int, int]]:
        """(first row, count) of the rows whose logits `_prompt_logprobs` computes."""
        row = 0
        for share in shares if self.slots.prompt_rows else ():
            targets = share.prompt_targets
            for begin in range(0, len(targets), ROWS_OF_LOGITS):
                yield row + begin, min(ROWS_OF_LOGITS, len(targets) - begin)
            row += share.end - share.begin

    def _prompt_logprobs(self, hidden_TD: torch.Tensor, shares: list[Share]) -> dict[str, list[Logprobs]]:
        found: dict[str, list[Logprobs]] = {}
        row = 0
        for share in shares:
            if targets := share.prompt_targets:
                found[share.sequence.id] = []
                top_n = share.sequence.request.params.prompt_logprobs or 0
                for begin in range(0, len(targets), ROWS_OF_LOGITS):
                    target_T = torch.tensor(targets[begin : begin + ROWS_OF_LOGITS], device=hidden_TD.device)
                    logits = self.model.logits(hidden_TD[row + begin :][: target_T.shape[0]])
                    found[share.sequence.id].append(token_logprobs(logits, target_T, top_n).to_host())
            row += share.end - share.begin
        return found

    def _pool(self, hidden_TD: torch.Tensor, shares: list[Share]) -> Fetch | None:
        found, end = [], 0
        for share in shares:
            end += share.end - share.begin
            if count := share.num_pooled:
                found.append(hidden_TD[end - count : end].float().sum(0))
        return self.platform.fetch(torch.stack(found)) if found else None

    def accept(self, sequence: Sequence, token: int) -> str | None:
        return self.slots.accept(sequence, token)

    def take_back(self, counts: dict[Sequence, int]) -> None:
        self.slots.take_back(counts)

    def settle(self, shares: list[Share], counts: list[int]) -> None:
        if not self.draft_states:
            return
        # Where every row samples, all of them were tried (HostStep.separate); else those of shares with drafts.
        all_tried = all(end - begin == num_samples for _, begin, end, num_samples in shares)
        tried: list[tuple[int, int, int, int]] = []
        row = 0
        for (sequence, begin, end, num_samples), count in zip(shares, counts, strict=True):
            if all_tried or num_samples > 1:
                tried.append((sequence.slot, row, count, begin))
            row += end - begin
        self.settle_rows(tried)

    def settle_rows(self, tried: list[tuple[int, int, int, int]]) -> None:
        """Of each request: its slot, its first row, how many rows count, and the tokens before them."""
        tried = tried + [(0, 0, 0, 0)] * (-len(tried) % 4)  # kernels are compiled apart for other addresses
        slots, *rest = map(list, zip(*tried, strict=True))
        width = self.steps.width
        with torch.inference_mode():
            for group, kept in self.draft_states.items():
                pages = [self.steps.host_tables[group][slot * width] for slot in slots]
                kept.accept(*self.steps.upload_rows([pages, *rest]))

    def rebalance(self) -> None:
        """All ranks call this at the same time, between two steps. What they decide follows from the same numbers."""
        counter, exchange = self.experts, self.exchange
        count_LE = counter.count_LE.clone()
        if exchange and exchange.same.rank:  # the first of those with the same tokens counts them
            count_LE.zero_()
        count_LE = exchange.group.all_reduce(count_LE) if exchange else self.model.group.broadcast(count_LE)
        if self.placed_by is None:
            self.placed_by = torch.zeros_like(count_LE)
        load_LE, self.placed_by = (count_LE - self.placed_by).tolist(), count_LE
        group = exchange.group if exchange else self.model.group
        with torch.inference_mode():
            for layer, load_E in zip(counter.layers, load_LE, strict=True):
                rebalance(layer, load_E, group)

    def expert_ranks(self) -> list[list[tuple[int, ...]]]:
        return [list(layer.slots.placement.experts) for layer in self.experts.layers if layer.slots is not None]

    def expert_load(self, settled: bool = False) -> list[list[int]]:
        return self.experts.load(settled)


def _sampling(shares: list[Share], rows: HostStep) -> list[Share]:
    """The share of each row that samples."""
    if rows.logit_rows is None and len(rows.slots) == len(shares):
        return shares
    return [share for share in shares for _ in range(share.num_samples)]
