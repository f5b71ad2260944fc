"""What the engine counts about itself, as plain Python objects."""

import bisect
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass(slots=True)
class Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    """One for each of SECONDS (values up to it), and one for what is above all."""
    total: float = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(SECONDS, value)] += times
        self.total += value * times

    def as_dict(self) -> dict[str, object]:
        return {"bounds": list(SECONDS), "counts": list(self.counts), "sum": self.total}


@dataclass(slots=True)
class Clock:
    """One request's moments."""

    arrived: float
    admitted: float | None = None
    last_token: float | None = None
    """Not kept up to date while one follows the other in every step."""


@dataclass(slots=True)
class Metrics:
    queue_time: Histogram = field(default_factory=Histogram)
    time_to_first_token: Histogram = field(default_factory=Histogram)
    inter_token_latency: Histogram = field(default_factory=Histogram)
    end_to_end: Histogram = field(default_factory=Histogram)
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    nonfinite_logits: int = 0
    """Requests that ended because their logits were NaN or infinite."""
    drafts: int = 0
    """Steps of requests that had drafts."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    """Drafts that were right."""
    finished: Counter[str] = field(default_factory=Counter)
    clocks: dict[str, Clock] = field(default_factory=dict)
    latest: set[str] = field(default_factory=set)
    """Requests that had a token in the last call of `tokens`, at `latest_at`."""
    latest_at: float = 0.0

    def arrive(self, id: str, at: float) -> None:
        self.clocks[id] = Clock(at or time.monotonic())

    def admit(self, id: str, num_prompt: int) -> None:
        clock = self.clocks.get(id)
        if clock is not None and clock.admitted is None:
            clock.admitted = time.monotonic()
            self.queue_time.observe(clock.admitted - clock.arrived)
            self.prompt_tokens += num_prompt

    def tokens(self, ids: Sequence[str], now: float) -> None:
        """One more for each; ids that are not known (any more) do not count. Costs little for those that had their last
        one in the call before, which are most. An id may come several times."""
        clocks, before = self.clocks, self.latest_at
        latest = clocks.keys() & ids
        again = latest & self.latest
        self.generation_tokens += len(latest)
        self.inter_token_latency.observe(now - before, len(again))
        for id in self.latest - again:
            clocks[id].last_token = before
        for id in latest - again:
            last = clocks[id].last_token
            if last is None:
                self.time_to_first_token.observe(now - clocks[id].arrived)
            else:
                self.inter_token_latency.observe(now - last)
        if len(ids) > len(latest):
            more = sum(id in latest for id in ids) - len(latest)
            self.generation_tokens += more
            self.inter_token_latency.observe(0.0, more)
        self.latest, self.latest_at = latest, now

    def finish(self, id: str, reason: str) -> None:
        clock = self.clocks.pop(id, None)
        self.latest.discard(id)
        if clock is not None:
            self.end_to_end.observe(time.monotonic() - clock.arrived)
            self.finished[reason] += 1

    def as_dict(self) -> dict[str, object]:
        return {
            "steps": self.steps,
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generation_tokens,
            "finished": dict(self.finished),
            "nonfinite_logits": self.nonfinite_logits,
            "spec_decode_drafts": self.drafts,
            "spec_decode_draft_tokens": self.draft_tokens,
            "spec_decode_accepted_tokens": self.accepted_tokens,
            "spec_decode_acceptance": self.accepted_tokens / max(1, self.draft_tokens),
            "queue_time_seconds": self.queue_time.as_dict(),
            "time_to_first_token_seconds": self.time_to_first_token.as_dict(),
            "inter_token_latency_seconds": self.inter_token_latency.as_dict(),
            "e2e_request_latency_seconds": self.end_to_end.as_dict(),
        }
