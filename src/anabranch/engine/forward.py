"""A step's rows through the model, in the fastest way there is: captured as one graph (single tokens, up to what they
sample), as a few (one request) or in pieces, compiled, recorded, or kernel by kernel. Knows rows, not requests.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from anabranch import ops
from anabranch.compile.capture import BySize, Captured
from anabranch.compile.compiled import CompiledDecoder
from anabranch.compile.compiler import PieceCompiler
from anabranch.compile.pieces import Buffers, PiecesStep
from anabranch.compile.prompt import PromptStep
from anabranch.compile.sizes import common_decode, common_prefill, decode_sizes, prefill_sizes, prompt_sizes
from anabranch.config import EngineConfig
from anabranch.engine.batch import HostStep
from anabranch.engine.outputs import Decoded, Outputs
from anabranch.engine.sampling_plan import SamplingMode
from anabranch.layers.mixer import Cache
from anabranch.layers.step import Step
from anabranch.models.decoder import Parts
from anabranch.platforms import Platform

if TYPE_CHECKING:
    from anabranch.compile.recorded import RecordedSteps

LARGEST_PREFILL = 2048
"""Token rows up to which steps are captured: beyond, the device takes longer over a layer than the host. But many
requests are served at a time with small models, where it does not: see `largest_captured`. Twice as many with latent
attention, whose prompts are not captured whole and have more kernels."""


def largest_captured(config: EngineConfig) -> int:
    """Token rows; room for every request's next token and as many of new prompts three times over."""
    return min(config.max_num_batched_tokens, max(LARGEST_PREFILL, 4 * config.max_num_seqs))


def longest_prompt(config: EngineConfig, platform: Platform) -> int:
    """Token rows of the largest step of one request that is captured whole. Longer ones keep the device busy for so
    long that launches from the host cost nothing, and graphs have memory of their own."""
    return max(2, min(config.max_num_batched_tokens, config.max_model_len, platform.batch_tokens // 2))


def captured_tokens(config: EngineConfig, platform: Platform) -> int:
    """Token rows of the largest captured step of any kind."""
    if config.graphs in ("decode", "none"):
        return config.max_samples if config.graphs == "decode" else 0
    return max(largest_captured(config), longest_prompt(config, platform) if config.graphs == "full" else 0)


class Forward:
    decodes: BySize[SamplingMode, Captured[Decoded]] | None = None
    """Captured steps of single tokens, where the platform has graphs."""
    drafted: BySize[SamplingMode, Captured[Decoded]] | None = None
    """The same with drafts, in models with states: these change in `settle`."""
    prompts: BySize[str, PromptStep] | None = None
    """Captured steps of one request with several tokens."""
    prefills: BySize[str, PiecesStep] | None = None
    """Captured steps of other shapes, in pieces."""
    compiled: CompiledDecoder | None = None
    """For steps of more tokens than any captured one has, where pieces are compiled."""
    recorded: RecordedSteps | None = None
    """Steps of single tokens where kernels are called from the host, on a CPU."""

    def __init__(self, config: EngineConfig, kv: list[Cache], outputs: Outputs, keeps_drafts: bool) -> None:
        """`outputs`: of what is captured with them. `keeps_drafts`: whether mixers keep something of drafts."""
        self.config, self.kv = config, kv
        self.model, self.steps, self.experts = model, steps, experts = outputs.model, outputs.steps, outputs.experts
        platform, dtype = outputs.platform, model.embed_tokens.weight.dtype
        most = max(captured_tokens(config, platform), config.max_samples)
        model.group.reserve(platform, most * model.config.hidden_size * dtype.itemsize)
        pool = platform.make_graph_pool()
        if config.graphs not in ("pieces", "none") and platform.graph_mode == "full":

            def captured(kind: SamplingMode, size: int, drafts: bool = False) -> Captured[Decoded]:
                body = partial(outputs.decode, kind, kv=kv, drafts=drafts)
                return Captured(platform, pool, steps.padding(size), body)

            self.decodes = BySize(decode_sizes(config.max_samples), captured)
            if keeps_drafts:
                self.drafted = BySize(decode_sizes(config.max_samples), partial(captured, drafts=True))
        largest, longest = max(2, largest_captured(config)), longest_prompt(config, platform)  # 1: special to compilers
        # With more rows of a request, latent attention needs lengths that a graph of the whole step does not know.
        whole = max(2, min([longest, *(getattr(one.mixer, "most_absorbed", longest) for one in model.config.layers)]))
        if config.graphs == "full" and whole < longest:
            largest = max(largest, min(longest, 2 * LARGEST_PREFILL))  # long prompts then, in pieces
        if config.graphs not in ("decode", "none"):
            buffers = Buffers(model, largest, platform.device, dtype)
            start = self._start
            if config.graphs in ("compiled", "traced"):
                experts.record(False)  # callbacks cannot be traced
                name = "inductor" if config.graphs == "compiled" else "none"
                compiler = PieceCompiler(name, platform, max(2, config.max_num_batched_tokens))
                with torch.inference_mode():
                    self.compiled = CompiledDecoder(model, compiler)
                start = self.compiled.start
            self.prefills = BySize(
                prefill_sizes(largest), lambda _, size: PiecesStep(platform, pool, model, kv, buffers, size, start)
            )
        if config.graphs == "full":
            unpack = partial(steps.unpack_any, num_requests=1, columns=steps.width)
            self.prompts = BySize(
                prompt_sizes(largest, whole),
                lambda _, size: PromptStep(platform, pool, model, kv, steps.padding_of_one(size), unpack, start),
                padded=largest,
            )
        if ops.linear.bound and ops.linear.bound[0].provider in ("c", "invariant") and config.data_parallel_size == 1:
            from anabranch.compile.recorded import RecordedSteps  # compiles kernels in C at its first import

            self.recorded = RecordedSteps(model, kv, steps.width)

    def _start(
        self, token_T: torch.Tensor, position_T: torch.Tensor, num_tokens: torch.Tensor | None
    ) -> tuple[Parts, list[torch.Tensor]]:
        """The model's layer loop, and the list to which it adds expert_TK of every MoE layer."""
        recorded = self.experts.record(True)
        return self.model.parts(token_T, position_T, num_tokens), recorded

    def warm_up(self) -> None:
        """Capture the steps that most requests will meet."""
        prefills: list[BySize[str, Any] | None] = [self.prompts, self.prefills]
        for prompts in filter(None, prefills):
            # Of the largest ones all, since there a larger one in its place would take longer.
            large = (size for size in prompts.sizes if size > largest_captured(self.config))
            for size in sorted({*common_prefill(prompts.sizes), *large}, reverse=True):
                prompts.add("any", size)
        for decodes in filter(None, (self.decodes, self.drafted)):
            for size in common_decode(decodes.sizes):
                decodes.add("greedy", size)
                decodes.add("drawn", size)

    @property
    def captured(self) -> list[BySize[Any, Any]]:
        return [one for one in (self.decodes, self.drafted, self.prompts, self.prefills) if one is not None]

    def close(self) -> None:
        """Captured graphs end, whoever refers to them, before the group whose collectives they hold: NCCL would wait
        for them for ever."""
        for captured in self.captured:
            for graph in (graph for made in captured.made.values() for graph in made.graphs):
                graph.reset()
            captured.made.clear()

    def replay(self, rows: HostStep, mode: SamplingMode, num_rows: int) -> Decoded | None:
        """A step of single tokens as a captured graph of at least `num_rows`; None if there is none for it."""
        decodes = self.decodes if self.drafted is None or rows.tried is None else self.drafted
        assert decodes is not None
        captured = decodes.find("greedy" if mode == "any" else mode, num_rows)
        return None if captured is None else captured.replay(self.steps.pack(rows, captured.input.shape[1]))

    def run(self, rows: HostStep, record: bool) -> tuple[Step, torch.Tensor, list[torch.Tensor]]:
        """Any step: (step, hidden rows, expert_TK of each MoE layer); the last perhaps not, unless to `record`."""
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
