"""From a model's name to a model that runs on this machine.

Order: config, platform, an empty model, headers against its parameters (everything that can be refused is refused
here), and only then memory and weights.
"""

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from anabranch import kernels, ops, platforms
from anabranch.formats import BF16, PLAIN
from anabranch.layers.attention import Attention
from anabranch.layers.linear import Linear, PackedLinear
from anabranch.layers.norm import RMSNorm
from anabranch.loader import cache_scales, names
from anabranch.loader.checkpoint import Checkpoint, CheckpointError, read_checkpoint, with_stored_dtype
from anabranch.loader.locate import locate
from anabranch.loader.read import Progress, check_order, own_head, read_weights
from anabranch.loader.resolve import resolve_dtype
from anabranch.models import family
from anabranch.models.config import ModelConfig, read_config
from anabranch.models.decoder import Decoder, DecoderLayer
from anabranch.moe.dispatch import Exchange
from anabranch.moe.experts import Experts
from anabranch.moe.layer import RoutedExperts
from anabranch.moe.setup import MoESetup, make_setup
from anabranch.ops.op import Op
from anabranch.ops.weight import Weight
from anabranch.parallel.group import ALONE, Group
from anabranch.stages import count, stage

Check = Callable[[int], None]

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load_model(
    model: str | Path,
    *,
    dtype: str = "auto",
    load_format: Literal["safetensors", "dummy"] = "safetensors",
    platform: platforms.Platform | None = None,
    progress: Progress | None = None,
    moe_combine: str = "fastest",
    shared_expert: str = "auto",
    deterministic: bool = False,
    quantization: str = "none",
    kv_cache_dtype: str = "auto",
    state_dtype: str = "float32",
    speculative: str = "none",
    group: Group = ALONE,
    expert_parallel: bool = False,
    expert_slots: int = 0,
    exchange: Exchange | None = None,
    check: Check | None = None,
) -> Decoder:
    """Load a local folder or a hub id. `dtype` auto: the checkpoint's, as far as the platform computes in it.
    `quantization`: a format of formats.rounded for the plain matrices of the layers. `kv_cache_dtype`, `state_dtype`:
    as in EngineConfig; the model holds the scales of its cache. `speculative` mtp: with its draft layer. `group`: the
    ranks among which it is divided; this one reads its share of the weights. `expert_parallel`: whole experts are
    shared out, not a part of each; with room for `expert_slots` on each rank, which copies fill. `exchange`: of ranks
    that have tokens of their own, and experts alone are divided among them. `check` is called with the bytes of the
    weights before they take memory."""
    with stage("config"):
        folder = locate(str(model), weights=load_format != "dummy")
        config = read_config(folder, kv_cache_dtype=kv_cache_dtype, state_dtype=state_dtype, speculative=speculative)
        config = with_stored_dtype(config, folder, load_format)
        checkpoint = None if load_format == "dummy" else read_checkpoint(folder, quantized=bool(config.sources))
        if config.draft_layer is not None and checkpoint is not None and "mtp.fc.weight" not in checkpoint.tensors:
            raise CheckpointError(
                f"{folder}: speculative mtp: the checkpoint has no tensors 'mtp.*'; use ngram or none"
            )
        if config.tie_embeddings and checkpoint is not None:
            config = _untie(config, checkpoint)
        platform = platform or platforms.current()
        kernels.bind(platform, deterministic)
        config = config.divide(group.rank, group.size, expert_parallel)
        moe = make_setup(platform, combine=moe_combine, shared_expert=shared_expert)
        moe = replace(moe, group=group, expert_parallel=expert_parallel, expert_slots=expert_slots, exchange=exchange)
        decoder = build(config, DTYPES[resolve_dtype(dtype, config, platform)], moe)
        if checkpoint is None:
            names.set_formats(decoder, quantization)
        copies = [] if checkpoint is None else names.match(decoder, checkpoint, quantization)
        if checkpoint is not None:
            cache_scales.read(decoder, checkpoint)
            check_order(checkpoint, config.sources)
        if check is not None:
            check(sum(parameter.nbytes for parameter in decoder.parameters()))
    with stage("weights"):
        # Not to_empty: `empty_like` of a meta tensor makes torch import SymPy, for longer than a small model loads.
        decoder._apply(lambda x: torch.empty(x.size(), dtype=x.dtype, device=platform.device))
        for layer in decoder.modules():
            if isinstance(layer, RoutedExperts) and layer.slots is not None:
                layer.slots.place(layer.slots.placement, platform.device)
        parameters = dict(decoder.named_parameters())
        if load_format == "dummy":
            fill_randomly(decoder)
            platform.synchronize()
            count(sum(parameter.nbytes for parameter in parameters.values()))
        else:
            count(read_weights(parameters, copies, platform, progress))
        for module in decoder.modules():
            if isinstance(module, Attention):
                module.part_neighbours()
        settle(decoder, platform, copies, check)
        lay_out(decoder, platform)
    keep_attributes(decoder)
    return decoder


def settle(decoder: Decoder, platform: platforms.Platform, copies: Sequence[names.Copy], check: Check | None) -> None:
    """After loading: refuse scales that are no numbers, by the names that `copies` has; replace quantised weights by
    dense ones where no kernel of this platform multiplies by them, if there is memory for that, and `check` allows so
    many bytes of weights. If not, they are dequantised in every call."""
    quantized = {name: w for name, w in decoder.named_modules() if isinstance(w, Weight) and _is_quantized(w)}
    if not quantized:
        return
    scales = {f"{name}.scale": w.tensors["scale"] for name, w in quantized.items() if "scale" in w.tensors}
    finite = torch.stack([_is_finite(scale) for scale in scales.values()]).tolist() if scales else []
    bad = {name: scales[name] for name, good in zip(scales, finite) if not good}
    for copy in copies:
        if copy.parameter in bad and not _is_finite(bad[copy.parameter][copy.index]):
            where = f"{copy.source.file}: tensor {copy.source.name!r}"
            raise CheckpointError(f"{where} has a scale that is not a finite number; download it again")
    if bad:  # in rows that were moved
        raise CheckpointError(f"{next(iter(bad))} has a scale that is not a finite number; download the model again")
    op_of: dict[type, Op[..., torch.Tensor]] = {Linear: ops.linear, PackedLinear: ops.linear, Experts: ops.experts}
    multiplied = {id(w): op_of[type(m)] for m in decoder.modules() if type(m) in op_of for w in m.children()}
    dense = [
        weight
        for weight in quantized.values()
        if (op := multiplied.get(id(weight))) is None or not any(weight.format.kind in k.traits for k in op.bound)
    ]
    num_bytes = sum(math.prod(weight.shape) * weight.dtype.itemsize for weight in dense)
    packed = sum(x.nbytes for weight in dense for x in weight.tensors.values())
    total = sum(parameter.nbytes for parameter in decoder.parameters()) - packed + num_bytes
    if num_bytes > 0.8 * platform.memory().free or not _allows(check, total):
        log.warning(
            "%.1f GB of dequantised weights do not fit in memory: they are dequantised in every step, which is slow",
            num_bytes / 1e9,
        )
        return
    for weight in dense:
        weight.set_dense()
    for layer in decoder.modules():
        if isinstance(layer, DecoderLayer):
            layer.set_fp8_norms()
    if dense:
        log.info("dequantised %d weights: no kernel of this platform multiplies by their format", len(dense))


def _allows(check: Check | None, num_bytes: int) -> bool:
    try:
        return check is None or check(num_bytes) is None
    except ValueError:
        return False


def _is_finite(scale: torch.Tensor) -> torch.Tensor:
    """Whether all are; 255 is the exponent that stands for no number."""
    return (scale.isfinite() if scale.is_floating_point() else scale != 255).all()


def keep_attributes(decoder: Decoder) -> None:
    """Store submodules and parameters as plain attributes too: otherwise torch finds them by a function in Python,
    which takes 15 % of a step of a small model on a CPU. From here on they are not replaced."""
    for module in decoder.modules():
        module.__dict__.update(module._modules)
        module.__dict__.update(module._parameters)


def _untie(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """As transformers does: a head that differs from the embedding is used, whatever `tie_word_embeddings` says."""
    head = own_head(checkpoint)
    if head is None:
        return config
    log.warning(
        "%s: tensor %r differs from the embedding, so it is used although config.json says tie_word_embeddings; "
        "set that to false",
        head.file,
        head.name,
    )
    return replace(config, tie_embeddings=False)


def fill_randomly(model: nn.Module, seed: int = 0) -> None:
    """Random weights for benchmarks without files: every parameter uniform in ±1e-3, drawn on the device. Norm weights
    too, as other engines draw them, so that their figures can be compared. Quantised weights stand for such numbers."""
    generators: dict[torch.device, torch.Generator] = {}

    def draw(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device not in generators:
            generators[tensor.device] = torch.Generator(tensor.device).manual_seed(seed)
        return tensor.uniform_(-1e-3, 1e-3, generator=generators[tensor.device])

    quantized = {id(p) for w in model.modules() if _is_quantized(w) for p in w.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in quantized:
            draw(parameter)
    for norm in model.modules():
        if isinstance(norm, RMSNorm) and norm.from_one:
            norm.weight.add_(1.0)
    for weight in filter(_is_quantized, model.modules()):
        assert isinstance(weight, Weight)
        *lead, outputs, inputs = weight.shape
        for index in itertools.product(*map(range, lead)):  # one matrix at a time, for the memory that it takes
            made = weight.format.quantize(draw(torch.empty(outputs, inputs, device=weight.device)))
            for name, tensor in made.items():
                weight.tensors[name][index].copy_(tensor)


def _is_quantized(module: nn.Module) -> bool:
    return isinstance(module, Weight) and module.format not in (PLAIN, BF16)


def lay_out(decoder: Decoder, platform: platforms.Platform) -> None:
    """Weights as the device multiplies by them best, and what kernels want beside them. Not those of embeddings, whose
    rows are also picked one by one, nor of routers, which are small and multiplied in fp32."""
    for module in decoder.modules():
        if not isinstance(module, Linear | Experts):
            continue
        op: Op[..., torch.Tensor] = ops.linear if isinstance(module, Linear) else ops.experts
        for weight in module.children():
            weight.lay_out(platform)  # type: ignore[operator]
            op.prepare(weight)


def build(config: ModelConfig, dtype: torch.dtype, moe: MoESetup | None = None) -> Decoder:
    """The model of a config, without memory (meta device)."""
    with torch.device("meta"), _default_dtype(dtype):
        return Decoder(config, family.known()[config.model_type], moe or MoESetup()).eval()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
