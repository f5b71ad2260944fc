"""Write a model again with quantised weights, as a checkpoint that other engines and transformers read too."""

import argparse
from pathlib import Path

from anabranch.config import CHOICES


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a model folder or a hub id owner/name, with plain weights")
    add("out", metavar="OUT", type=Path, help="the folder to write; it must be new or empty")
    what = "fp8: E4M3 in blocks of 128 × 128; int4: compressed-tensors, groups of 128 (default %(default)s)"
    add(
        "--quantization", choices=[name for name in CHOICES["quantization"] if name != "none"], default="fp8", help=what
    )


def run(options: argparse.Namespace) -> int:
    from anabranch import platforms
    from anabranch.cli.write_quantized import quantize
    from anabranch.engine.progress import Bar
    from anabranch.loader.locate import locate

    source = Path(locate(options.model, weights=True))
    size, plain = quantize(source, options.out, options.quantization, platforms.current(), Bar("quantising"))
    print(f"{options.out}: {size / 1e9:.3f} GB of weights in {options.quantization}")
    if plain:
        print(f"{len(plain)} tensors stay plain: no whole blocks, which transformers does not read (first: {plain[0]})")
    return 0
