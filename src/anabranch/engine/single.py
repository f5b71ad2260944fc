"""One greedy sequence through the paged cache, without scheduler or sampler: the reference for models in tests."""

from collections.abc import Sequence

import torch

from anabranch.engine import kv_tensors
from anabranch.engine.batch import StepMaker
from anabranch.engine.scheduler import Sequence as Running
from anabranch.engine.scheduler import Share
from anabranch.models.decoder import Decoder
from anabranch.request import Request
from anabranch.sampling_params import SamplingParams


class SingleSequence:
    def __init__(self, model: Decoder, max_length: int, page_size: int = 16) -> None:
        self.model = model
        self.max_length = max_length
        self.sequence = Running(Request(id="", prompt_ids=(), params=SamplingParams()), 0)
        self.sequence.slot = 0
        weight = model.embed_tokens.weight
        num_pages = -(-max_length // page_size)
        groups = model.config.cache_groups
        # Any assignment of pages must work; a reversed one shows code that takes page i for logical page i.
        self.pages = [list(reversed(range(num_pages))) for _ in groups]
        self.kv = kv_tensors.allocate(model.config, [num_pages] * len(groups), page_size, weight.dtype, weight.device)
        states = [index for index, group in enumerate(groups) if not group.policy.per_token]
        self.steps = StepMaker(len(groups), 1, max_length, page_size, weight.device, states=states)

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int], all_logits: bool = True) -> torch.Tensor:
        """Append tokens; their fp32 logits (of the last token alone without `all_logits`)."""
        known = self.sequence.tokens
        begin = len(known)
        known += tokens
        if len(known) > self.max_length:
            raise ValueError(f"{len(known)} tokens do not fit into the {self.max_length} of this sequence")
        step = self.steps.make([Share(self.sequence, begin, len(known), 1)], lambda _: self.pages)
        hidden = self.model(step, self.kv)
        return self.model.logits(hidden if all_logits else hidden[-1:]).float()
