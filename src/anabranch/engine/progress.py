"""Progress on standard error, for people; silent when that is not a terminal."""

import sys
import time


class Line:
    """One line that is drawn over itself, at most ten times a second."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.started = time.perf_counter()
        self.drawn = 0.0
        self.shown = sys.stderr.isatty()

    def draw(self, share: float, rest: str) -> None:
        now = time.perf_counter()
        if not self.shown or (share < 1 and now - self.drawn < 0.1):
            return
        self.drawn = now
        filled = round(24 * share)
        bar = f"{'█' * filled}{'░' * (24 - filled)}"
        print(f"\r{self.label} {bar} {share:4.0%} {rest}\x1b[K", end="", file=sys.stderr, flush=True)
        if share >= 1:
            print(file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Make room for a line that stays."""
        if self.shown and self.drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        self.drawn = 0.0

    def rate(self, count: float) -> float:
        return count / max(time.perf_counter() - self.started, 1e-9)


class Bar(Line):
    """`loading weights ████████░░░░ 61% 18.30 of 30.00 GB, 4.1 GB/s`; nothing where it takes no time."""

    first = 0.0

    def __call__(self, done: int, total: int) -> None:
        self.first = self.first or time.perf_counter()
        if time.perf_counter() - self.first < 0.5:
            return
        share = done / total if total else 1.0
        self.draw(share, f"{done / 1e9:.2f} of {total / 1e9:.2f} GB, {self.rate(done) / 1e9:.1f} GB/s")


class Tally(Line):
    """`measuring tiles ████████░░░░ 61% 52 of 85`"""

    def __call__(self, done: int, total: int) -> None:
        self.draw(done / total if total else 1.0, f"{done} of {total}")


class Counter(Line):
    """`prompts ████████░░░░ 61% 312 of 512, 8123 tokens/s`"""

    def __init__(self, label: str, total: int) -> None:
        super().__init__(label)
        self.total = total
        self.num_tokens = 0

    def __call__(self, done: int, new_tokens: int) -> None:
        self.num_tokens += new_tokens
        self.draw(done / self.total, f"{done} of {self.total}, {self.rate(self.num_tokens):.0f} tokens/s")
