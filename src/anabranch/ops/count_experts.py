"""How many tokens went to each expert, added to a histogram that stays on the device.

L MoE layers, T token rows, K experts per token, E experts.
"""

import torch

from anabranch.ops.op import Samples, op


def samples(dtype: torch.dtype, generator: torch.Generator) -> Samples:
    shapes = (3, 5, 2, 6), (1, 1, 8, 128), (48, 1, 8, 128), (2, 700, 4, 60), (2, 0, 2, 4)
    for layers, tokens, top_k, experts in shapes:
        expert_LTK = torch.randint(experts, (layers, tokens, top_k), generator=generator, dtype=torch.int32)
        expert_LTK[:, tokens // 2 + 1 :] = -1
        before_LE = torch.randint(2**40, (layers, experts), generator=generator)
        yield f"L{layers} T{tokens} K{top_k} E{experts}", {"expert_LTK": expert_LTK, "count_LE": before_LE}
    all_to_one = torch.full((2, 300, 2), 3, dtype=torch.int32)
    yield "all to one", {"expert_LTK": all_to_one, "count_LE": torch.zeros(2, 5, dtype=torch.int64)}


@op(samples=samples, mutates=("count_LE",))
def count_experts(expert_LTK: torch.Tensor, count_LE: torch.Tensor) -> None:
    """count_LE[l, e] (int64) grows by the number of times e occurs in expert_LTK[l] (int32). −1 (padding) is not
    counted."""
    expert_LN = expert_LTK.flatten(1).long()
    count_LE.scatter_add_(1, expert_LN.clamp(min=0), (expert_LN >= 0).long())
