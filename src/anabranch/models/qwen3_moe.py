"""Qwen3-MoE: RMSNorm on each query and key head before rope, no shared expert, router weights renormalised."""

from anabranch.models.decoder import Decoder


class Model(Decoder):
    pass
