"""Write a checkpoint of random normal weights for any config.json, so that two engines can load the same one.

    python benchmarks/make_checkpoint.py CONFIG_FOLDER OUT --quantization fp8
    python benchmarks/make_checkpoint.py src/anabranch/bench/configs/qwen3.6-35b-a3b /dev/shm/drafts --drafts 0.8
    anabranch bench offline /dev/shm/drafts --only speculation --speculative mtp --speculative-tokens 2 --batches 1,4

CONFIG_FOLDER has a config.json (and what else is to be copied, such as a tokenizer). Weights are drawn on the device, a
matrix at a time; norms are ones. Delta nets forget as they do before training: decays exp(-A · dt) with A uniform in
1 to 16 and dt log-uniform in 0.001 to 0.1. Matrices of layers are written plain, or quantised as `anabranch quantize`
does. Where the config says MXFP4, as gpt-oss's does, experts are random bytes in that layout.

Rows of the embedding are long enough that a token's own direction outweighs what all layers add: otherwise the average
that attention computes does, and the tokens of a prompt go to the same few experts, which training prevents in models.
Not where the head is the same matrix, whose logits would be too large.

With --drafts, for what drafts gain: the checkpoint has a draft layer (`mtp`), and a share p of its drafts is right. Row
t + 1 of the head is row t of the embedding, so that the next token is the last one plus 1, by a wide margin; all other
weights are random still, so that a step reads and computes what it always does. The draft layer's `fc` lets the
embedding pass, which gives the same token, but for a random share 1 - p of the vocabulary: in those rows the first
number of the embedding, elsewhere 0, brings in three times another row. Of n drafts a step, p + p² + … + pⁿ are right.
"""

import argparse
import itertools
import json
import math
import shutil
import time
from pathlib import Path

import torch

from anabranch import platforms
from anabranch.cli.write_quantized import Writer, stored_tensors, written_config
from anabranch.formats import Grouped, rounded
from anabranch.layers.norm import RMSNorm
from anabranch.loader import names
from anabranch.loader.checkpoint import INDEX_FILE
from anabranch.loader.load import build
from anabranch.models.config import ModelConfig, read_config
from anabranch.ops.weight import Weight

FILE_BYTES = 4 << 30
RANDOM_FP4 = (68.5 / 8) ** 0.5
"""The root mean square of 0, 0.5, 1, 1.5, 2, 3, 4 and 6."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--quantization", choices=["none", *rounded.FORMATS], default="none")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drafts", type=float, metavar="P", help="with a draft layer, right for a share of the tokens")
    options = parser.parse_args()
    began = time.monotonic()
    options.out.mkdir(parents=True)
    for file in options.config.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copy(file, options.out)
    platform, dtype = platforms.current(), getattr(torch, options.dtype)
    raw = json.loads((options.config / "config.json").read_text())
    is_mxfp4 = raw.get("quantization_config", {}).get("quant_method") == "mxfp4"
    config = read_config(options.config, speculative="none" if options.drafts is None else "mtp")
    model = build(config, torch.float32)
    less_one = {name for norm in norms_from_one(model) for name in model.family.checkpoint_names(norm)}
    format = rounded.FORMATS.get(options.quantization)
    quantized = set() if format is None else set(pieces(model, format))
    generator = torch.Generator(platform.device).manual_seed(options.seed)
    known = {} if options.drafts is None else known_drafts(config, options.drafts, platform.device, generator)
    layouts = (names.stored(target, layouts) for _, target, layouts in names.parameter_layouts(model))
    shapes, places, plain, total = dict(itertools.chain.from_iterable(layouts)), {}, [], 0
    left = sorted(shapes.items())
    number = 0
    while left:
        number += 1
        file = f"model-{number:05}.safetensors"
        with Writer(options.out / file) as writer:
            while left and writer.size < FILE_BYTES:
                name, shape = left.pop(0)
                if is_mxfp4 and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                    tensors = draw_mxfp4(name, shape, platform.device, generator)
                elif (end := ".".join(name.split(".")[-2:])) in known:
                    tensors = {name: known.pop(end).to(dtype)}
                else:
                    std = embedding_std(config) if name.endswith("embed_tokens.weight") else None
                    drawn = draw(name, shape, std, platform.device, generator) - int(name in less_one)
                    tensors = {name: drawn.to(dtype)}
                if name in quantized:
                    assert isinstance(format, Grouped)
                    layer = name.removesuffix(".weight")
                    made = stored_tensors(format.quantize(tensors[name]), shape, format)
                    tensors = {f"{layer}.{end}": value for end, value in made.items()}
                elif len(shape) == 2 and name.endswith(".weight"):
                    plain.append(name.removesuffix(".weight"))
                for full, tensor in tensors.items():
                    writer.add(full, tensor.cpu())
                    places[full], total = file, total + tensor.nbytes
    (options.out / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}))
    raw |= {"torch_dtype": options.dtype}
    if format is not None:
        raw["quantization_config"] = written_config(options.quantization, plain)
    (options.out / "config.json").write_text(json.dumps(raw, indent=2))
    print(f"{options.out}: {total / 1e9:.2f} GB in {number} files, {time.monotonic() - began:.0f} s")


def pieces(model: torch.nn.Module, format: Grouped) -> list[str]:
    """The checkpoint's names of the matrices that are quantised."""
    found = []
    for path, weight, layouts in names.parameter_layouts(model):  # type: ignore[arg-type]
        if isinstance(weight, Weight) and names.is_projection(path, weight.full_shape):
            if rounded.can_round(format, weight.full_shape):
                found += [piece.name for piece in layouts[-1] if piece.name.endswith(".weight")]
    return found


def norms_from_one(model: torch.nn.Module) -> list[str]:
    """The model's names of norms' weights that checkpoints keep less 1."""
    norms = {path: module for path, module in model.named_modules() if isinstance(module, RMSNorm)}
    return [f"{path}.weight" for path, norm in norms.items() if norm.from_one]


def embedding_std(config: ModelConfig) -> float | None:
    """Each layer adds two terms, with a variance of at most one."""
    return None if config.tie_embeddings else (2 * len(config.layers)) ** 0.5


def draw(
    name: str, shape: tuple[int, ...], std: float | None, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    """`std`: if None, what keeps the variance of a product's inputs."""
    if name.endswith(("A_log", "dt_bias")):
        uniform = torch.rand(shape, device=device, generator=generator)
        if name.endswith("A_log"):
            return (1 + 15 * uniform).log()
        dt = 10 ** (2 * uniform - 3)
        return dt + torch.log(-torch.expm1(-dt))  # softplus of this is dt
    if len(shape) == 1 and not name.endswith(("bias", "sinks")):
        return torch.ones(shape, device=device)
    return torch.randn(shape, device=device, generator=generator) * (std or shape[-1] ** -0.5)


def known_drafts(
    config: ModelConfig, share: float, device: torch.device, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Embedding, head and the draft layer's first matrix, by the last two parts of their names: see above."""
    std, width = embedding_std(config), config.hidden_size
    if std is None:
        raise SystemExit("error: --drafts: the model's head must be a matrix of its own (tie_word_embeddings false)")
    row_VD = torch.randn(config.vocab_size, width, device=device, generator=generator)
    is_wrong_V = torch.rand(config.vocab_size, device=device, generator=generator) >= share
    row_VD[:, 0] = is_wrong_V.float()
    pass_DD = std * torch.eye(width, device=device)
    pass_DD[:, 0] = 3 * std * row_VD[0]
    return {
        "embed_tokens.weight": std * row_VD,
        "lm_head.weight": width**-0.5 * row_VD.roll(1, 0),
        "fc.weight": torch.cat((pass_DD, torch.zeros_like(pass_DD)), 1),
    }


def draw_mxfp4(
    name: str, shape: tuple[int, ...], device: torch.device, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """gpt-oss's layout: blocks of 32 inputs in 16 bytes, and their exponents, which give the usual variance."""
    experts, inputs, outputs = shape
    blocks = torch.randint(
        0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, device=device, generator=generator
    )
    exponent = 127 + round(math.log2(inputs**-0.5 / RANDOM_FP4))
    return {f"{name}_blocks": blocks, f"{name}_scales": torch.full_like(blocks[..., 0], exponent)}


if __name__ == "__main__":
    main()
