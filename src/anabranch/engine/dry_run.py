"""Launch every kernel that a step can launch, before the first request: a kernel that is compiled later makes all
requests wait for it. Nothing here changes what a request sees.

Which kernels run, and which version of each, depends on the number of token rows, the number of requests and what is
asked of the sampler. With the number of rows, versions change only at the sizes of `compile.sizes`; so the dry run goes
through all sizes and a few numbers of requests. tests/engine/test_dry_run.py compares it with steps of all kinds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from anabranch.compile.sizes import decode_sizes, prefill_sizes
from anabranch.engine.sampler import Sampler
from anabranch.layers.step import Step
from anabranch.request import Request
from anabranch.sampling_params import SamplingParams

FEW_ROWS = (1, 2, 3, 4, 8, 16)
"""Numbers of rows that have a version of their own in products of few rows: the vocabulary's, in any step."""
FIXED_ROWS = (1, 32, 64, 65)
"""The same with `deterministic`."""
MIXED_REQUESTS = 40
"""Attention has a version for few requests in a step with prompts, one for this many, and perhaps one for more."""
EVERYTHING = SamplingParams(
    temperature=1.0, top_p=0.5, seed=0, presence_penalty=1.0, allowed_token_ids=(0,), logprobs=1, max_tokens=1
)
"""Uses every kernel of the sampler: logits are changed, and therefore fp32."""
UNCHANGED = SamplingParams(temperature=1.0, top_p=0.5, seed=0, logprobs=1, max_tokens=1)
"""Samples from the model's logits without changing them."""


def dry_run(runner: Any) -> None:
    """Called by a TorchRunner with itself while launches are recorded; see `kernels.compile_ahead`."""
    config, model, steps, forward = runner.config, runner.model, runner.steps, runner.forward
    layers = model.config.layers
    kv = runner.kv[: max(layers.index(layer) for layer in layers) + 2]  # the first layer has no residual

    def launch(step: Step) -> None:
        if config.deterministic:
            step = replace(step, spans=())
        draft(step, model(step, kv))

    def draft(step: Step, hidden_TD: torch.Tensor) -> None:
        if runner.layer_drafts is not None:
            for num_tokens in {step.num_tokens, None}:  # it is not captured with others
                model.draft(step.token_T, hidden_TD, replace(step, num_tokens=num_tokens), runner.layer_drafts.cache)

    largest = config.max_num_batched_tokens
    captured = 0 if forward.prefills is None else forward.prefills.sizes[-1]

    sizes = prefill_sizes(largest)
    if captured < sizes[0]:
        sizes = sorted({*sizes, *(size for size in FEW_ROWS if size < largest)})
    for size in reversed(sizes):  # the smaller ones fit into memory that the first has taken
        launch(steps.dry_run(size, padded=size <= captured))
    for size in reversed([] if forward.prompts is None else forward.prompts.sizes):
        if size > captured:
            launch(steps.dry_run(size, padded=True))
    for num_requests in {min(number, config.max_num_seqs, largest - 1) for number in (MIXED_REQUESTS, largest)}:
        for size in (largest, num_requests + 1):
            if 0 < num_requests < size <= largest:
                launch(steps.dry_run(size, num_requests, padded=size <= captured))
    for size in reversed(decode_sizes(config.max_samples)):
        if forward.decodes is not None:
            runner.outputs.decode("greedy", steps.padding(size), kv)
        else:
            launch(steps.dry_run(size, size, padded=size <= captured))
    for size in FEW_ROWS:
        hidden_TD = torch.zeros(size, model.config.hidden_size, dtype=runner.dtype, device=runner.platform.device)
        draft(steps.unpack(steps.padding(size), steps.width, padded=True), hidden_TD)
    if runner.states.kept:
        launch(steps.unpack(steps.padding(2), steps.width, padded=True, drafts=True))
        runner.settle_rows([(0, 0, 0, 0)])
    one_TK = torch.zeros(1, 1, dtype=torch.int32, device=runner.platform.device)
    runner.experts.count([one_TK] * len(runner.experts.layers))
    runner.experts.count_LE.zero_()  # where the op is not a compiled kernel, the dry run has counted
    dry_run_sampling(runner)


def dry_run_sampling(runner: Any) -> None:
    model, device = runner.model, runner.platform.device
    rows = FIXED_ROWS if runner.config.deterministic else FEW_ROWS
    hidden_TD = torch.zeros(rows[-1], model.config.hidden_size, dtype=runner.dtype, device=device)
    for num_rows in rows:
        logits_TV = model.logits(hidden_TD[:num_rows])
    for wanted in (EVERYTHING, UNCHANGED):
        sampler = Sampler(2, model.config.vocab_size, device)
        for slot, params in enumerate((wanted, SamplingParams(seed=0))):  # the second draws from all tokens
            sampler.add(slot, Request(id=str(slot), prompt_ids=(0,), params=params))
        sampler.sample(logits_TV[:2].clone(), [0, 1])
