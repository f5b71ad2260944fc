"""One sequence through the paged cache, greedily: the smallest loop that generates text.

No scheduler, no batching: it judges models in tests and serves `anabranch generate` until the engine does.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

import torch

from anabranch.engine import kv_cache
from anabranch.engine.batch import Rows, make_step
from anabranch.models.decoder import Decoder


class SingleSequence:
    def __init__(self, model: Decoder, max_length: int, page_size: int = 16) -> None:
        self.model = model
        self.page_size = page_size
        self.max_length = max_length
        self.num_computed = 0
        weight = model.embed_tokens.weight
        self.device = weight.device
        num_pages = -(-max_length // page_size)
        groups = model.config.kv_groups
        # Any assignment of pages must work; backwards shows a mistaken "page i holds tokens i · S ..".
        self.pages = [list(reversed(range(num_pages))) for _ in groups]
        self.kv = kv_cache.allocate(model.config, [num_pages] * len(groups), page_size, weight.dtype, self.device)

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int], all_logits: bool = True) -> torch.Tensor:
        """Append tokens; their fp32 logits (of the last token alone without `all_logits`)."""
        length = self.num_computed + len(tokens)
        if length > self.max_length:
            raise ValueError(f"{length} tokens are more than the {self.max_length} this sequence has room for")
        rows = Rows(tokens, self.num_computed, self.pages, all_logits)
        step = make_step([rows], self.page_size, self.device)
        hidden = self.model(step, self.kv)
        self.num_computed += len(tokens)
        return self.model.logits(hidden[step.logit_row])

    def stream(self, prompt: Sequence[int], max_new_tokens: int, stop_ids: Container[int] = ()) -> Iterator[int]:
        tokens: Sequence[int] = prompt
        for _ in range(max_new_tokens):
            token = int(self.forward(tokens, all_logits=False)[-1].argmax())
            if token in stop_ids:
                return
            yield token
            tokens = [token]

    def generate(self, prompt: Sequence[int], max_new_tokens: int, stop_ids: Container[int] = ()) -> list[int]:
        """The greedy continuation; a stop id ends it and is not part of it."""
        return list(self.stream(prompt, max_new_tokens, stop_ids))
