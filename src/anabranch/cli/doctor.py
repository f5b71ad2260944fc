"""Show this machine as Anabranch sees it: versions, platforms, and the kernel that each op would use."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform as host
import sys
from typing import TYPE_CHECKING

from anabranch import __version__

if TYPE_CHECKING:
    from anabranch.platforms import Platform

PACKAGES = ("torch", "triton", "safetensors", "tokenizers", "huggingface_hub", "transformers", "numpy")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--platform", metavar="NAME", help="the platform to show (default: the detected one)")


def find_platform(name: str | None) -> tuple[Platform, str]:
    """A platform (default: the detected one) and the description of its device."""
    from anabranch import platforms

    platform = platforms.make(name) if name else platforms.current()
    try:
        return platform, platform.describe()
    except Exception as error:  # without its device, a platform may raise anything
        cure = "`anabranch doctor` lists those that do"
        raise ValueError(f"platform {platform.name!r} does not come up on this machine: {error}; {cure}") from error


def run(options: argparse.Namespace) -> int:
    from anabranch import kernels, ops, platforms
    from anabranch.formats.grouped import STORED

    platform, device = find_platform(options.platform)
    print(f"anabranch {__version__}, Python {host.python_version()}, {host.system()} {host.machine()}")
    print("packages  " + ", ".join(f"{name} {_version(name)}" for name in PACKAGES))
    print(f"python    {sys.executable}\n")

    print("platforms")
    for name in platforms.names():
        kind = platforms.load(name)
        state = "in use" if name == platform.name else "available" if kind.available() else "not on this machine"
        print(f"  {name:<6} {state:<20} proven: {kind.proven or 'nothing'}")
        unproven = kind.unproven if kind.proven else f"all of it: anabranch conformance --platform {name}"
        print(f"  {'':<6} {'':<16} not proven: {unproven or 'nothing known'}")
    memory = platform.memory()
    print(f"\n{platform.name}: {device}")
    print(f"  memory {memory.free / 1e9:.1f} GB free of {memory.total / 1e9:.1f} GB")
    print(
        f"  KV page {platform.page_size} tokens, graphs: {platform.graph_mode}, memory fraction "
        f"{platform.memory_fraction}, collectives: {platform.collective_backend}\n"
    )

    kernels.bind(platform)
    for line in (*kernels.compiler_facts(), *filter(None, [kernels.c_problem(platform)])):
        print(line)
    print("ops (kernels in the order they are tried; a call that none accepts uses the reference)")
    for name, op in ops.OPS.items():
        order = [kernel.provider + (" if it accepts" if kernel.accepts else "") for kernel in op.bound]
        if not op.bound or op.bound[-1].accepts is not None:
            order.append("reference")
        print(f"  {name:<18} {' → '.join(order)}")
    print("\nquantised weights (where no kernel multiplies by them: dequantised once, after loading)")
    for numbers in STORED:
        found = [op.name for op in (ops.linear, ops.experts) if any(numbers in kernel.traits for kernel in op.bound)]
        print(f"  {numbers:<18} {'kernels of ' + ', '.join(found) if found else 'dequantised'}")
    return 0


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "–"
