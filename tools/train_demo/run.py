"""The whole recipe in one command that nobody need watch: write the text, train, look at the result.

    python -m tools.train_demo.run OUT --minutes 9.3

OUT/model is the folder, ready to be served, from a minute after training began: what is cut short leaves a model. Each
step is a process of its own with a share of the time; the dense model to compare with comes last and only if there is
time for it. Prints what it does and how long it took.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESERVE = 80
"""Seconds for compiling, the last evaluation, samples and the card."""
TRAIN_SHARE = 0.42
"""Of what is left after the text; the dense model takes about half as long."""


class Clock:
    def __init__(self, minutes: float) -> None:
        self.started, self.seconds = time.perf_counter(), 60 * minutes

    @property
    def left(self) -> float:
        return self.seconds - (time.perf_counter() - self.started)


def step(clock: Clock, name: str, *arguments: str, on_cpu: bool = False, needed: bool = True) -> bool:
    """Whether it ran to its end in the time left."""
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {})
    print(f"== {name} {' '.join(arguments)} ({clock.left:.0f} s left)", flush=True)
    command = [sys.executable, "-m", f"tools.train_demo.{name}", *arguments]
    try:
        code = subprocess.run(command, env=environment, timeout=max(1.0, clock.left)).returncode
    except subprocess.TimeoutExpired:
        code = -1
    print(f"== {name}: {'done' if code == 0 else f'failed ({code})'}, {clock.left:.0f} s left", flush=True)
    if code and needed:
        raise SystemExit(f"error: {name} failed")
    return code == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=9.3, help="for everything (%(default)s)")
    parser.add_argument("--documents", type=int, default=640_000, metavar="N")
    parser.add_argument("--heldout", type=int, default=4000, metavar="N", help="held-out documents (%(default)s)")
    parser.add_argument("--batch", type=int, default=32, metavar="N")
    parser.add_argument("--length", type=int, default=2048, metavar="N")
    parser.add_argument(
        "--before", type=Path, default=Path("src/anabranch/bundled/demo"), help="the model to compare with"
    )
    options = parser.parse_args()
    clock = Clock(options.minutes)
    model = options.out / "model"
    model.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        data, dense = Path(folder, "data"), Path(folder, "dense")
        counts = ("--documents", str(options.documents), "--heldout", str(options.heldout))
        step(clock, "write_conversations", str(data), *counts, on_cpu=True)
        how = ("--batch", str(options.batch), "--length", str(options.length))
        minutes = max(0.1, TRAIN_SHARE * (clock.left - RESERVE) / 60)
        step(clock, "train", str(data), str(model), "--minutes", f"{minutes:.2f}", *how)
        looks = ("--before", str(options.before), "--pin", str(options.out / "pinned.json"))
        step(clock, "card", str(model), *looks, on_cpu=True, needed=False)
        steps = json.loads((model / "training.json").read_text())["steps"]
        arguments = (str(data), str(dense), "--model", "dense", "--steps", str(steps), *how)
        if step(clock, "train", *arguments, needed=False):
            shutil.copyfile(dense / "training.json", model / "dense.json")


if __name__ == "__main__":
    main()
