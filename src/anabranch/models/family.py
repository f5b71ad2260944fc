"""What a family of models states in its file, and how that file is found: nothing lists the families by hand.

Pure Python without torch: a family names its decoder layer, which is imported when a model is built.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from anabranch.models import families

if TYPE_CHECKING:
    from anabranch.models.keys import Keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How config.json of a family is read, how its checkpoints name tensors, and which layer it uses."""

    model_types: tuple[str, ...]
    """Values of `model_type` in config.json."""
    read: Callable[[Keys], Any]
    """config.json as a ModelConfig."""
    layer: str = "anabranch.models.decoder:DecoderLayer"
    """`module:class` of the decoder layer."""
    prefixes: tuple[str, ...] = ("model.",)
    """What a checkpoint may put before the decoder's names."""
    renames: tuple[tuple[str, str], ...] = ((".mlp.router.", ".mlp.gate."),)
    """(ours, theirs): parts of names, replaced in order, where a checkpoint does not call them as we do."""
    published_name: Callable[[str], str] | None = None
    """A second way to spell a tensor's name, which published checkpoints use."""
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)
    """Parts of the names of checkpoint tensors that are not needed."""
    has_further_layers: bool = False
    """Checkpoints may have a layer after the last of config.json, for drafts, which is not used."""
    norms_from_one: bool = False
    """Checkpoints keep the weights of RMSNorms less 1."""
    has_draft_layer: bool = False
    """Checkpoints may have the draft layer of models/mtp, as `mtp.*`."""
    tiny: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By model type, the keys by which a tiny config.json of it differs from `conformance.tiny.CONFIG`; platforms are
    tested with such models."""

    def checkpoint_names(self, name: str) -> list[str]:
        """The names a checkpoint may use for one of ours."""
        for ours, theirs in self.renames:
            name = name.replace(ours, theirs)
        plain = name.startswith(("lm_head.", "mtp."))
        names = [name] if plain else [prefix + name for prefix in self.prefixes]
        return names if self.published_name is None else [self.published_name(name) for name in names] + names


_registered: dict[str, Family] = {}
"""By model type: families that have no file in `families/`."""


def register(family: Family) -> None:
    """Add a family from outside of this package; it replaces one of the same model type."""
    _registered.update(dict.fromkeys(family.model_types, family))


def known() -> dict[str, Family]:
    """Every family by model type."""
    return _built_in() | _registered


@functools.cache
def _built_in() -> dict[str, Family]:
    names = [module.name for module in pkgutil.iter_modules(families.__path__) if not module.name.endswith("_layer")]
    modules = [importlib.import_module(f"{families.__name__}.{name}") for name in names]
    return {model_type: module.FAMILY for module in modules for model_type in module.FAMILY.model_types}
