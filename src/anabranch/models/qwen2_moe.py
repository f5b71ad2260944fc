"""Qwen1.5-MoE and Qwen2-MoE: biased QKV, a shared expert behind a sigmoid gate, router weights not renormalised."""

from anabranch.models.decoder import Decoder


class Model(Decoder):
    pass
