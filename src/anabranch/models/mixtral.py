"""Mixtral: few wide experts, router weights renormalised; on disk `block_sparse_moe.experts.N.w1|w3|w2`."""

from anabranch.models.decoder import Decoder


class Model(Decoder):
    @classmethod
    def checkpoint_names(cls, name: str) -> list[str]:
        names = super().checkpoint_names(name)
        return [_on_disk(name) for name in names] + names


def _on_disk(name: str) -> str:
    for ours, theirs in ((".gate_proj.", ".w1."), (".up_proj.", ".w3."), (".down_proj.", ".w2.")):
        name = name.replace(ours, theirs)
    return name.replace(".mlp.", ".block_sparse_moe.")
