"""A process that loads a checkpoint several times and prints how much memory each time took besides the weights.

A process of its own, because the difference of two peaks is otherwise that of everything that was there before: what
modules and code of libraries that are used for the first time take (40 MB), and what malloc has not given back, of
which a load takes as much as fits. So the first load is to be ignored, and MALLOC_MMAP_THRESHOLD_ must be set: large
tensors are then given back when they are freed, and no free memory is left for those that follow.

Usage: MALLOC_MMAP_THRESHOLD_=131072 python -m tests.loader.peak_memory FOLDER LIMIT...
"""

import gc
import sys
from pathlib import Path

import torch

from anabranch import platforms
from anabranch.loader import names
from anabranch.loader.checkpoint import read_checkpoint
from anabranch.loader.load import build
from anabranch.loader.read import read_weights
from anabranch.models.config import read_config


def peak() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def growth(folder: str, limit: int) -> int:
    """Bytes of memory, besides the weights, at the highest point."""
    names.SLICE = limit
    decoder = build(read_config(folder), torch.float32)
    copies = names.match(decoder, read_checkpoint(folder), "fp8")
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    decoder.to_empty(device="cpu")
    parameters = dict(decoder.named_parameters())
    read_weights(parameters, copies, platforms.make("cpu"), threads=2, limit=limit)
    return peak() - before - sum(parameter.nbytes for parameter in parameters.values())


if __name__ == "__main__":
    for limit in sys.argv[2:]:
        print(growth(sys.argv[1], int(limit)), flush=True)
