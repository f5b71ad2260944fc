"""OLMoE: RMSNorm over all query heads and over all key heads at once, optional clamp of Q, K and V."""

from anabranch.models.decoder import Decoder


class Model(Decoder):
    pass
