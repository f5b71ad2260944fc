"""A progress bar on standard error; silent when that is not a terminal."""

from __future__ import annotations

import sys
import time


class Bar:
    """Shows bytes done: `loading weights ████████░░░░ 61 % 18.3 of 30.0 GB, 4.1 GB/s`."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.started = time.perf_counter()
        self.drawn = 0.0
        self.shown = sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        now = time.perf_counter()
        if not self.shown or (done < total and now - self.drawn < 0.1):
            return
        self.drawn = now
        share = done / total if total else 1.0
        filled = round(24 * share)
        rate = done / max(now - self.started, 1e-9)
        line = (
            f"\r{self.label} {'█' * filled}{'░' * (24 - filled)} {share:4.0%} "
            f"{done / 1e9:.2f} of {total / 1e9:.2f} GB, {rate / 1e9:.1f} GB/s"
        )
        print(line, end="\n" if done >= total else "", file=sys.stderr, flush=True)
