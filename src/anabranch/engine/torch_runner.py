"""The Runner of torch platforms: the model and all that is on the device. Knows shares of sequences, not why they run.

A step: shares → rows (batch) → hidden rows (forward) → tokens and more, on their way to the host (outputs).
"""

from dataclasses import replace
from functools import partial

import torch

from anabranch import kernels
from anabranch.config import EngineConfig
from anabranch.engine import kv_tensors, plan
from anabranch.engine.batch import HostStep, StepMaker, Tried, tried_rows
from anabranch.engine.dry_run import dry_run
from anabranch.engine.expert_counter import ExpertCounter
from anabranch.engine.forward import Forward, captured_tokens
from anabranch.engine.layer_drafts import LayerDrafts
from anabranch.engine.outputs import Decoded, Outputs
from anabranch.engine.progress import Tally
from anabranch.engine.runner import Launched, Pages, Progress, Runner, StateCopy
from anabranch.engine.sampler import Sampler
from anabranch.engine.sampling_plan import SamplingMode
from anabranch.engine.scheduler import Sequence, Share
from anabranch.engine.slots import Slots
from anabranch.loader.checkpoint import with_stored_dtype
from anabranch.loader.load import load_model
from anabranch.models.config import read_config
from anabranch.moe.dispatch import Exchange
from anabranch.moe.tuning import tune
from anabranch.parallel.group import ALONE, Group
from anabranch.platforms import Platform
from anabranch.stages import stage


class TorchRunner(Runner):
    def __init__(
        self,
        config: EngineConfig,
        platform: Platform,
        progress: Progress | None,
        group: Group = ALONE,
        exchange: Exchange | None = None,
    ) -> None:
        """`group`, `exchange`: as of `load_model`."""
        self.config, self.platform, self.exchange = config, platform, exchange
        self.num_drafted = 0 if config.speculative == "none" else config.max_samples
        """The most rows of a step with drafts, in which the host knows the tokens of all rows; 0: there are none."""
        memory = platform.memory()
        model = read_config(config.model, **config.model_options)
        model = with_stored_dtype(model, config.model, config.load_format)
        num_experts = max((layer.moe.num_experts for layer in model.layers if layer.moe is not None), default=0)
        mine = plan.quantized(model.divide(group.rank, group.size, config.expert_parallel), config.quantization)
        check = partial(
            plan.check_memory,
            plan.kept(mine) if config.dtype == "float32" else mine,
            config,
            config.dtype,
            num_ranks=group.size,
            expert_share=config.expert_share(num_experts),
            free=memory.free + memory.cached,
            total=memory.total,
            captured_tokens=captured_tokens(config, platform),
        )
        check()  # before anything is built
        self.model = load_model(
            config.model,
            dtype=config.dtype,
            load_format=config.load_format,  # type: ignore[arg-type]
            quantization=config.quantization,
            **config.model_options,
            platform=platform,
            progress=progress,
            moe_combine=config.moe_combine,
            shared_expert=config.shared_expert,
            deterministic=config.deterministic,
            group=group,
            expert_parallel=config.expert_parallel,
            expert_slots=config.expert_slots(num_experts) if config.expert_copies or config.rebalance_interval else 0,
            exchange=exchange,
            check=lambda num_bytes: check(weights=num_bytes),
        )
        shown = None if progress is None else Tally("measuring tiles")
        with stage("tune"):
            mode = "off" if config.deterministic else config.tune  # whose tiles do not depend on tables
            tune(self.model, platform, mode, config.max_num_batched_tokens, shown)
        self.num_active = plan.count_active(self.model.config)

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
            captured_tokens=captured_tokens(config, self.platform),
            weights=sum(parameter.nbytes for parameter in self.model.parameters()),
        )
        # Other processes may use the device too: the plan is limited by what is free now, with the weights loaded.
        left = min(found.kv, memory.free + memory.cached - found.workspace)
        found = replace(found, kv=left - kv_tensors.draft_bytes(model, self.num_drafted, self.dtype))
        return found.pool_pages(config, "see `anabranch plan`")

    def allocate(self, num_pages: list[int], max_model_len: int) -> None:
        self.config = config = replace(self.config, max_model_len=max_model_len)
        model, platform, device = self.model, self.platform, self.platform.device
        caches = kv_tensors.allocate(model.config, num_pages, config.page_size, self.dtype, device)
        self.kv = caches[: len(model.layers)]
        self.states = kv_tensors.States(model, self.kv, self.num_drafted, self.dtype)
        sizes = len(num_pages), config.max_num_seqs, config.max_model_len, config.page_size
        self.steps = StepMaker(*sizes, device, states=list(self.states.by_group), num_ahead=config.num_ahead)
        self.layer_drafts = None
        if model.mtp is not None:
            self.layer_drafts = LayerDrafts(model, self.steps, caches[-1], config.max_drafts)
        self.sampler = Sampler(config.max_num_seqs, model.config.vocab_size, device, config.seed, config.max_samples)
        self.experts = ExpertCounter(model, platform, config.expert_load_interval)
        self.slots = Slots(self.sampler, model.config.eos_ids)
        several = bool(self.num_drafted)
        self.outputs = Outputs(platform, model, self.steps, self.slots, self.experts, self.layer_drafts, several)
        self.forward = Forward(config, self.kv, self.outputs, keeps_drafts=bool(self.states.kept))

    def warm_up(self) -> None:
        """Compile and capture the steps that most requests will meet."""
        with stage("compile"), torch.inference_mode():
            kernels.compile_ahead(self.platform, partial(dry_run, self))
        with stage("capture"), torch.inference_mode():
            self.forward.warm_up()

    def idle(self, waiting: bool = False) -> None:
        """Capture a size that was missed."""
        with torch.inference_mode():
            any(captured.make_missed(waiting) for captured in self.forward.captured)

    def copy_states(self, copies: list[StateCopy]) -> None:
        self.states.copy(copies)

    def launch(self, shares: list[Share], pages: Pages) -> Launched:
        """Enqueue one step, its shares of one token first; nothing here waits for the device."""
        if self.config.deterministic and not kernels.deterministic_bound():
            raise ValueError("deterministic: this process has started another engine without it; use another process")
        num_tokens = sum(end - begin for _, begin, end, _ in shares)
        with torch.inference_mode(), self.platform.step(num_tokens * self.num_active):
            for share in shares:
                if not share[0].placed:
                    self.slots.place(share[0])
                    self.steps.join(share[0].slot)
            routed = self.slots.routed
            record = bool(routed) and any(share.sequence.slot in routed for share in shares)

            rows = self.steps.host_step(shares, pages)
            if rows.logit_rows is not None and self.num_drafted and len(rows.logit_rows) == len(rows.slots):
                rows = rows.separate()
            mode = None if self.forward.decodes is None else self.outputs.mode(shares, rows)
            mode = self.agree(shares, rows, mode)
            decoded = self.replay(rows, mode)
            if decoded is not None:
                launched, recorded = self.outputs.of_decoded(shares, rows, mode, decoded), decoded.experts
            else:
                step, hidden_TD, recorded = self.forward.run(rows, self.experts.counts or record)
                launched = self.outputs.of_rows(shares, rows, step, hidden_TD)
                self.experts.count(recorded)
            if record and recorded:
                launched.routed = self.platform.fetch(torch.stack(recorded, dim=1)[: len(rows.slots)])
            self.experts.end_step()
            return launched

    def agree(self, shares: list[Share], rows: HostStep, mode: SamplingMode | None) -> SamplingMode | None:
        """Before each step, for ranks that take part in it: returns the mode in which all can run it."""
        return mode

    def replay(self, rows: HostStep, mode: SamplingMode | None) -> Decoded | None:
        """A captured step of single tokens; None if there is none for it."""
        num_rows = len(rows.slots) if self.exchange is None else self.exchange.most
        return self.forward.replay(rows, mode, num_rows) if mode else None

    def accept(self, sequence: Sequence, token: int) -> str | None:
        return self.slots.accept(sequence, token)

    def take_back(self, counts: dict[Sequence, int]) -> None:
        self.slots.take_back(counts)

    def settle(self, shares: list[Share], counts: list[int]) -> None:
        if self.states.kept:
            self.settle_rows(tried_rows(shares, counts))

    def settle_rows(self, tried: list[Tried]) -> None:
        self.states.settle(tried, self.steps)

    def expert_load(self, settled: bool = False) -> list[list[int]]:
        return self.experts.load(settled)

    def close(self) -> None:
        """Gives memory back, also where something still refers to the engine: another one may follow."""
        if "forward" in vars(self):
            self.forward.close()
            drafts = [] if self.layer_drafts is None else [self.layer_drafts.cache]
            caches = [tensor for cache in (*self.kv, *drafts) for tensor in cache]
            for tensor in (*self.model.parameters(), *self.model.buffers(), *caches):
                storage = tensor.untyped_storage()
                if storage.resizable():
                    storage.resize_(0)
