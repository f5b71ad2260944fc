"""Log probabilities of chosen tokens and of the best alternatives. T rows, V vocabulary, N alternatives."""

import torch

from anabranch.ops.op import Samples, op


def samples(dtype: torch.dtype, generator: torch.Generator) -> Samples:
    def token(rows: int, vocabulary: int) -> torch.Tensor:
        return torch.randint(vocabulary, (rows,), generator=generator)

    for rows, vocabulary, top_n in ((5, 50, 3), (2, 4099, 20), (3, 4, 4), (2, 50, 0), (0, 8, 2)):
        logits, token_T = 3 * torch.randn(rows, vocabulary, generator=generator), token(rows, vocabulary)
        yield f"T{rows} V{vocabulary} N{top_n}", {"logits_TV": logits, "token_T": token_T, "top_n": top_n}
    ties = torch.randint(3, (4, 40), generator=generator).float()
    yield "ties", {"logits_TV": ties, "token_T": token(4, 40), "top_n": 5}
    certain = torch.full((2, 40), float("-inf"))
    certain[:, 30:] = torch.arange(10.0)
    certain[1, 33] = 200
    yield "forbidden tokens, a certain one", {"logits_TV": certain, "token_T": torch.tensor([35, 33]), "top_n": 2}


@op(samples=samples)
def logprobs(
    logits_TV: torch.Tensor, token_T: torch.Tensor, top_n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logprob_T, rank_T int64, top_id_TN int64, top_logprob_TN), fp32.

    The rank is 1 + the number of tokens with larger logits. The best come first, among equal logits the lowest id. A
    token has the same float as chosen and as alternative.
    """
    logits_TV = logits_TV.float()
    logprob_TV = logits_TV.log_softmax(-1)
    rank_T = 1 + (logits_TV > logits_TV.gather(-1, token_T[:, None])).sum(-1)
    if top_n == 0 or logits_TV.shape[0] == 0:
        top_id_TN = token_T.new_zeros(logits_TV.shape[0], top_n)
    else:
        top_id_TN = ordered_key(logits_TV).topk(top_n).indices
    logprob_T = logprob_TV.gather(-1, token_T[:, None])[:, 0]
    return logprob_T, rank_T, top_id_TN, logprob_TV.gather(-1, top_id_TN)


def ordered_key(x_TV: torch.Tensor) -> torch.Tensor:
    """int64 keys in the order of (x, −column), no two of a row equal: top-k of floats leaves the order of ties open."""
    bits = (x_TV + 0.0).view(torch.int32)  # −0 becomes 0
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # now ordered as the floats are
    columns = x_TV.shape[-1]
    return (bits.long() << 32) + torch.arange(columns - 1, -1, -1, device=x_TV.device)
