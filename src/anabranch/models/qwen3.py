"""Qwen3 (dense): RMSNorm on each query and key head before rope."""

from anabranch.models.decoder import Decoder


class Model(Decoder):
    pass
