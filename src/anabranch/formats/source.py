"""How a checkpoint keeps quantised weights: what it calls their tensors, in which shapes, and how they become ours.

`quantization_config` of config.json names a method; the method's file gives the sources that may occur. The loader
takes a weight from the first source of which the checkpoint has all tensors, and from a plain tensor otherwise: so
headers decide what a weight is, not the lists of exceptions in config.json.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.formats.format import BF16, PLAIN, Format, Index, Shape, TensorSpec

if TYPE_CHECKING:
    import torch

IGNORED = (
    ".input_scale",
    ".activation_scale",
    ".weight_shape",
    ".g_idx",
    ".qzeros",
    ".input_zero_point",
)
"""Ends of the names of tensors that quantised checkpoints have and that weight-only products do not need: `g_idx`
because groups are in order, which the loader makes sure of."""
CACHE_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".k_proj.output_scale", ".v_proj.output_scale")
"""Ends of the names of the scales of an FP8 cache, which no other cache needs."""


BOOKKEEPING = """
    act_bits act_data_type act_dynamic act_group_aware act_group_size act_sym amp autoround_version batch_size
    block_name_to_quantize block_size cache_block_outputs damp_auto_increment damp_percent data_type dataset
    dequantize disable_exllama do_fuse enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input
    exllama_config failsafe fallback fuse_max_seq_len global_compression_ratio gptaq gptaq_alpha
    gradient_accumulate_steps hyb_act ignore ignore_layers ignored_layers iters kv_cache_scheme low_gpu_mem_usage lr
    max_input_length meta minmax_lr model_file_base_name model_name_or_path model_seqlen
    module_name_preceding_first_block modules_in_block_to_quantize modules_to_convert modules_to_fuse
    modules_to_not_convert mse nsamples offload_to_disk offload_to_disk_path pack_dtype pack_impl
    packed_modules_mapping packing_format pad_token_id producer provider quant_block_list quant_method
    quantization_status quantizer run_compressed scale_dtype seqlen static_attention_dtype static_groups
    static_kv_dtype supported_types tensor_storage to_quant_block_names tokenizer true_sequential use_cuda_fp16
    use_exllama use_optimized_inference
"""
"""Keys of `quantization_config` that do not change what weights stand for: how they were found, how others run them,
and what the headers say too."""


class Source:
    def names(self, name: str) -> dict[str, str]:
        """The checkpoint's name of each tensor of the weight that a plain checkpoint calls `name`; {}: it has none."""
        raise NotImplementedError

    def format(self, starts: tuple[int, ...] = (), dtypes: Mapping[str, str] = {}) -> Format:
        """Of a weight whose pieces begin at these outputs, and whose tensors have these dtypes in the checkpoint."""
        raise NotImplementedError

    def stored(self, tensor: str, shape: Shape) -> tuple[TensorSpec, ...]:
        """What the tensor of a piece of this logical shape may look like in the checkpoint; no dtype: any float."""
        raise NotImplementedError

    def logical(self, shape: Shape) -> Shape:
        """The logical shape of the piece whose `data` has this shape in the checkpoint."""
        return shape

    def convert(self, tensor: str, stored: torch.Tensor, shape: Shape, format: Format) -> torch.Tensor:
        """From the checkpoint's tensor of such a piece to the format's. A tensor that has all experts comes in parts of
        a few experts, each with its shape."""
        return stored

    def changes(self, tensor: str, format: Format) -> bool:
        """Whether `convert` does anything with this tensor besides changing its dtype."""
        return False

    def place(self, tensor: str, outputs: slice, inputs: slice, shape: Shape) -> Index | None:
        """The part of the checkpoint's matrix of which `convert` makes these outputs and inputs of such a piece; None:
        `convert` needs the whole matrix."""
        return None


@dataclass(frozen=True)
class PlainSource(Source):
    """One tensor with the weight's name and shape, of any float."""

    kept: Format = PLAIN

    def names(self, name: str) -> dict[str, str]:
        return {"data": name}

    def format(self, starts: tuple[int, ...] = (), dtypes: Mapping[str, str] = {}) -> Format:
        return self.kept

    def stored(self, tensor: str, shape: Shape) -> tuple[TensorSpec, ...]:
        return (self.kept.tensors(shape)[tensor],)

    def place(self, tensor: str, outputs: slice, inputs: slice, shape: Shape) -> Index | None:
        return outputs, inputs


PLAIN_SOURCE, BF16_SOURCE = PlainSource(), PlainSource(BF16)


@dataclass(frozen=True)
class Transposed(Source):
    """A source of plain tensors, whose matrices the checkpoint keeps as [inputs, outputs]."""

    source: Source

    def names(self, name: str) -> dict[str, str]:
        return self.source.names(name)

    def format(self, starts: tuple[int, ...] = (), dtypes: Mapping[str, str] = {}) -> Format:
        return self.source.format(starts, dtypes)

    def stored(self, tensor: str, shape: Shape) -> tuple[TensorSpec, ...]:
        return self.source.stored(tensor, self.logical(shape))

    def logical(self, shape: Shape) -> Shape:
        return (*shape[:-2], shape[-1], shape[-2])

    def convert(self, tensor: str, stored: torch.Tensor, shape: Shape, format: Format) -> torch.Tensor:
        return self.source.convert(tensor, stored.transpose(-1, -2), shape, format)

    def changes(self, tensor: str, format: Format) -> bool:
        return True

    def place(self, tensor: str, outputs: slice, inputs: slice, shape: Shape) -> Index | None:
        place = self.source.place(tensor, outputs, inputs, shape)
        return place and place[::-1]


Method = Callable[[Mapping[str, Any]], tuple[Source, ...]]
"""From `quantization_config` to its sources; ValueError with the reason where it cannot be read."""

_registered: dict[str, Method] = {}


def register_method(name: str, method: Method) -> None:
    """Add a `quant_method` from outside of this package; it replaces one of the same name."""
    _registered[name] = method


@functools.cache
def _built_in() -> dict[str, Method]:
    names = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent / "methods")])]
    modules = [importlib.import_module(f"anabranch.formats.methods.{name}") for name in names]
    return {module.NAME: functools.partial(_sources, module) for module in modules}


def _sources(module: Any, config: Mapping[str, Any]) -> tuple[Source, ...]:
    refuse_unknown(config, module.KEYS)
    found: tuple[Source, ...] = module.sources(config)
    return found


def refuse_unknown(config: Mapping[str, Any], known: str) -> None:
    """ValueError if a key is set that is neither one of these nor bookkeeping."""
    for key in sorted(config.keys() - {*known.split(), *BOOKKEEPING.split()}):
        if not _is_off(config[key]):
            raise ValueError(f"{key} is not supported, and may change what the weights stand for")


def _is_off(value: Any) -> bool:
    return all(map(_is_off, value.values())) if isinstance(value, Mapping) else not value


def methods() -> dict[str, Method]:
    """Every `quant_method` that is supported."""
    return _built_in() | _registered


def sources_of(quantization_config: Mapping[str, Any]) -> tuple[Source, ...]:
    """ValueError, with the reason, where the config describes what cannot be read."""
    name = quantization_config.get("quant_method")
    method = methods().get(name) if isinstance(name, str) else None
    if name is None:
        raise ValueError("it has no quant_method; weights that mlx_lm packed are for platform mlx alone")
    if method is None:
        what = f"quant_method {name!r}" + (
            f" ({algorithm})" if (algorithm := quantization_config.get("quant_algo")) else ""
        )
        raise ValueError(f"{what} is not supported (supported: {', '.join(sorted(methods()))})")
    return method(quantization_config)


def blocks(taken: slice, size: int) -> slice | None:
    """The blocks of this size that `taken` consists of; None: it begins or ends inside of one."""
    if size == 1:
        return taken
    whole = taken.step == 1 and taken.start % size == taken.stop % size == 0
    return slice(taken.start // size, taken.stop // size) if whole else None


def common_rows(rows: int, starts: tuple[int, ...]) -> int:
    """How many outputs can share a scale where pieces with blocks of `rows` outputs begin at these."""
    return gcd(rows, *starts)


def stem(name: str) -> str:
    """The name of the layer whose weight is `name`; "" where the weight is not called `weight`."""
    return name.removesuffix(".weight") if name.endswith(".weight") else ""
