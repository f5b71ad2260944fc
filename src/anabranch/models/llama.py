"""Llama and its many dense relatives: nothing but the shared decoder."""

from anabranch.models.decoder import Decoder


class Model(Decoder):
    pass
