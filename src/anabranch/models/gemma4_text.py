"""Gemma 4's text model under its own `model_type`; `gemma4` wraps the same one."""

from anabranch.models.gemma4 import Model

__all__ = ["Model"]
