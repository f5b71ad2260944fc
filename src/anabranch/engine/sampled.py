"""What sampling returns: tokens on the device, log probabilities being copied to the host.

T tokens, V vocabulary, N best alternatives, R rows of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from anabranch import ops
from anabranch.request import TokenLogprobs

CHUNK = 1 << 23
"""Logits handled by one call of an op; the reference of ops.sample takes about 50 bytes for each on the way."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of T tokens, with the N best at each place."""

    token_T: torch.Tensor
    logprob_T: torch.Tensor
    rank_T: torch.Tensor
    top_id_TN: torch.Tensor
    top_logprob_TN: torch.Tensor

    def to_host(self) -> Logprobs:
        """A copy that may be read once the device has come this far."""
        tensors = self.token_T, self.logprob_T, self.rank_T, self.top_id_TN, self.top_logprob_TN
        return Logprobs(*(tensor.to("cpu", non_blocking=True) for tensor in tensors))

    def at(self, t: int, top_n: int) -> TokenLogprobs:
        """As plain numbers; for the host's copy."""
        top = zip(self.top_id_TN[t, :top_n].tolist(), self.top_logprob_TN[t, :top_n].tolist())
        return TokenLogprobs(int(self.token_T[t]), float(self.logprob_T[t]), int(self.rank_T[t]), tuple(top))

    def all(self, top_n: int) -> list[TokenLogprobs]:
        return [self.at(t, top_n) for t in range(self.token_T.shape[0])]


def token_logprobs(logits_TV: torch.Tensor, token_T: torch.Tensor, top_n: int) -> Logprobs:
    """Log probabilities of `token_T` under the logits (in any float dtype; computed in fp32, some rows at a time)."""
    top_n = min(top_n, logits_TV.shape[1])
    parts = [ops.logprobs(logits_TV[part].float(), token_T[part], top_n) for part in chunks(*logits_TV.shape)]
    if len(parts) == 1:
        return Logprobs(token_T, *parts[0])
    return Logprobs(token_T, *(torch.cat(tensors) for tensors in zip(*parts)))


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step sampled."""

    token_R: torch.Tensor
    """int64, on the device."""
    logprobs: Mapping[int, tuple[Logprobs, int]] = field(default_factory=dict)
    """Of rows that asked, and the place there. Copies to the host, enqueued with the step: once its tokens can be read,
    so can they."""

    def token_logprobs(self, row: int, top_n: int) -> TokenLogprobs:
        """Of a row that asked for at least `top_n` alternatives."""
        assert row in self.logprobs, f"row {row} asked for no log probabilities"
        logprobs, place = self.logprobs[row]
        return logprobs.at(place, top_n)


def chunks(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Row ranges of at most CHUNK logits (but at least a row); one empty range if there are no rows."""
    step = max(1, CHUNK // vocab_size)
    for begin in range(0, max(num_rows, 1), step):
        yield slice(begin, min(begin + step, num_rows))
