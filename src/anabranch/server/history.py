"""The last minutes in numbers, for the page: a sample of the engine's stats each second, and times to first tokens; and
the last seconds, for the log.

Counts and seconds only, never text. engine.metrics has the totals for Prometheus.
"""

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

INTERVAL = 1.0  # seconds between two samples
KEPT = 300  # samples
LOGGED = 10.0  # seconds between two lines of the log
FIRST_TOKENS = 2048
RECENT = 60.0  # seconds that percentiles cover

COUNTED = ["running", "waiting", "kv_usage", "preemptions", "prefix_queries", "prefix_hits"]
COUNTED += ["prompt_tokens", "generation_tokens"]
"""The engine's stats that the page shows unchanged."""
Counts = list[list[int]]  # [moe layer][expert]


class History:
    def __init__(self) -> None:
        self.samples: deque[dict[str, float]] = deque(maxlen=KEPT)
        self.num_refused = 0
        """Requests refused because the queue was full."""
        self.stats: dict[str, Any] = {}
        """The engine's last stats."""
        self._first: deque[tuple[float, float]] = deque(maxlen=FIRST_TOKENS)
        self._last_at: float | None = None
        self._last_counts = 0, 0
        self.num_loads = 0
        """How often the engine's histogram has changed."""
        self.ranks: list[list[list[int]]] = []
        """By MoE layer and rank: which experts it has; empty where they are on one."""
        self._load_before: Counts = []
        self._load_last: Counts = []

    def first_token(self, seconds: float) -> None:
        self._first.append((time.monotonic(), seconds))

    def add(self, stats: dict[str, Any]) -> None:
        """Add a sample; to be called about every INTERVAL."""
        now = time.monotonic()
        counts = stats.get("generation_tokens", 0), stats.get("prompt_tokens", 0)
        if self._last_at is not None:
            seconds = max(now - self._last_at, 1e-3)
            new, prompt = [(now - old) / seconds for now, old in zip(counts, self._last_counts, strict=True)]
            sample = {"time": time.time(), "generation_tokens_per_second": new, "prompt_tokens_per_second": prompt}
            sample["ttft_p50"], sample["ttft_p99"] = self.percentiles(0.5, 0.99)
            sample |= {name: stats.get(name, 0) for name in ("running", "waiting", "kv_usage")}
            self.samples.append(sample)
        self._last_at, self._last_counts = now, counts
        self.add_load(stats)
        self.stats = stats

    def add_load(self, stats: dict[str, Any]) -> None:
        load, ranks = stats.get("expert_load") or [], stats.get("expert_ranks") or []
        if load != self._load_last or ranks != self.ranks:  # the engine copies its histogram every few steps
            self._load_before, self._load_last, self.ranks = self._load_last, load, ranks
            self.num_loads += 1

    def percentiles(self, *shares: float) -> list[float]:
        """Of the recent times to a first token; 0 where there are none."""
        since = time.monotonic() - RECENT
        recent = sorted(seconds for at, seconds in self._first if at >= since)
        return [recent[min(int(share * len(recent)), len(recent) - 1)] if recent else 0.0 for share in shares]

    def as_dict(self, since: float = 0.0) -> dict[str, Any]:
        p50, p90, p99 = self.percentiles(0.5, 0.9, 0.99)
        return {
            "interval_seconds": INTERVAL,
            "samples": [sample for sample in self.samples if sample["time"] > since],
            "ttft_seconds": {"p50": p50, "p90": p90, "p99": p99},
            **{name: self.stats.get(name, 0) for name in COUNTED},
            "refused": self.num_refused,
        }

    def experts(self) -> dict[str, Any]:
        total, before = self._load_last, self._load_before or [[0] * len(row) for row in self._load_last]
        interval = [[new - old for new, old in zip(*rows, strict=True)] for rows in zip(total, before, strict=True)]
        return {
            "num_layers": len(total),
            "num_experts": len(total[0]) if total else 0,
            "total": total,
            "interval": interval,
            "ranks": self.ranks,
            "balance_total": [balance(row) for row in total],
            "balance_interval": [balance(row) for row in interval],
        }


class Throughput:
    """The fields of a line of the log, every LOGGED seconds in which anything ran."""

    def __init__(self, now: float) -> None:
        self._at, self._counts = now, [0, 0, 0, 0]

    def add(self, stats: dict[str, Any], now: float) -> dict[str, Any] | None:
        seconds = now - self._at
        if seconds < LOGGED:
            return None
        counts = [stats.get(key, 0) for key in ("prompt_tokens", "generation_tokens", "prefix_queries", "prefix_hits")]
        prompt, generated, queries, hits = [new - old for new, old in zip(counts, self._counts, strict=True)]
        self._at, self._counts = now, counts
        running, waiting = stats.get("running", 0), stats.get("waiting", 0)
        if not (prompt or generated or running or waiting):
            return None
        return {
            "running": running,
            "waiting": waiting,
            "prompt_tokens_per_second": round(prompt / seconds, 1),
            "generation_tokens_per_second": round(generated / seconds, 1),
            "kv_cache_usage": round(stats.get("kv_usage", 0), 4),
            "prefix_cache_hits": round(hits / queries, 4) if queries else 0,
        }


def balance(counts: Sequence[int]) -> float:
    """Mean over maximum: 1 when all experts of a layer have the same load, 1/E when one has it all; 0 without load."""
    most = max(counts, default=0)
    return sum(counts) / (len(counts) * most) if most else 0.0
