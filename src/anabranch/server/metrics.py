"""The engine's stats and the server's own counts as Prometheus metrics: `anabranch:…`, on request also `vllm:…`.

Labels are few and bounded: the model's name, a finish reason, a route's pattern, a status.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from anabranch.server.guard import Guard
    from anabranch.server.service import Service

GAUGES = {
    "num_requests_running": ("running", "Sequences in the running batch."),
    "num_requests_waiting": ("waiting", "Sequences that wait to run."),
    "kv_cache_usage_perc": ("kv_usage", "Share of KV pages that requests hold, 0 to 1."),
}
COUNTERS = {
    "prefix_cache_queries": ("prefix_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_hits", "Prompt tokens found in the prefix cache."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of requests that were started."),
    "generation_tokens": ("generation_tokens", "Tokens generated."),
    "num_preemptions": ("preemptions", "Sequences that gave up their KV pages to be computed again."),
}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("time_to_first_token_seconds", "From arrival to the first token."),
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "Between two tokens of a sequence."),
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds", "From arrival to the last token."),
    "request_queue_time_seconds": ("queue_time_seconds", "From arrival to the first computation."),
}


def render(service: Service, guard: Guard, stats: dict[str, Any]) -> bytes:
    """The text of /metrics. A registry a call: nothing is kept, so nothing can be counted twice."""
    registry = CollectorRegistry()
    registry.register(_Export(service, guard, stats))
    return generate_latest(registry)


class _Export(Collector):
    def __init__(self, service: Service, guard: Guard, stats: dict[str, Any]) -> None:
        self.service, self.guard, self.stats = service, guard, stats

    def collect(self) -> Iterator[Metric]:
        name, compat = self.service.names[0], self.service.settings.metrics_compat
        for prefix in ("anabranch:", f"{compat}:") if compat else ("anabranch:",):
            yield from engine_metrics(prefix, name, self.stats)
        responses = {(route, str(status)): count for (route, status), count in sorted(self.guard.responses.items())}
        about = "HTTP responses; 499: the client left."
        yield family(CounterMetricFamily, "anabranch:http_responses", about, responses, "route", "status")
        refused = {(name,): self.service.history.num_refused}
        yield family(CounterMetricFamily, "anabranch:requests_refused", "Requests that found the queue full.", refused)
        ready = {(name,): self.service.phase == "ready"}
        yield family(GaugeMetricFamily, "anabranch:ready", "1 while requests are taken.", ready)
        steps = {(name,): self.stats.get("steps", 0)}
        yield family(CounterMetricFamily, "anabranch:steps", "Steps the engine made.", steps)
        about = "Sequences that ended with an error because their logits were NaN or infinite."
        nonfinite = {(name,): self.stats.get("nonfinite_logits", 0)}
        yield family(CounterMetricFamily, "anabranch:nonfinite_logits", about, nonfinite)
        balances = enumerate(self.service.history.experts()["balance_total"])
        balance = {(name, str(layer)): value for layer, value in balances}
        about = "Mean over maximum load of a layer's experts."
        yield family(GaugeMetricFamily, "anabranch:expert_balance", about, balance, "model_name", "layer")


def family(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    about: str,
    values: Mapping[Any, float],
    *labels: str,
) -> Metric:
    """A metric with a value for each tuple of labels."""
    metric = kind(name, about, labels=labels or ["model_name"])
    for given, value in values.items():
        metric.add_metric(given, value)
    return metric


def engine_metrics(prefix: str, model: str, stats: dict[str, Any]) -> Iterator[Metric]:
    for kind, known in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
        for name, (key, about) in known.items():
            yield family(kind, prefix + name, about, {(model,): stats.get(key, 0)})
    finished = {(model, reason): count for reason, count in sorted(stats.get("finished", {}).items())}
    about = "Sequences that ended, by reason."
    yield family(CounterMetricFamily, prefix + "request_success", about, finished, "model_name", "finished_reason")
    for name, (key, about) in HISTOGRAMS.items():
        if found := stats.get(key):
            histogram = HistogramMetricFamily(prefix + name, about, labels=["model_name"])
            histogram.add_metric([model], _cumulative(found), sum_value=found["sum"])
            yield histogram


def _cumulative(histogram: dict[str, Any]) -> list[tuple[str, float]]:
    """Prometheus counts what is up to a bound; the engine, what lies between two."""
    total, buckets = 0, []
    for bound, count in zip([*map(str, histogram["bounds"]), "+Inf"], histogram["counts"], strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
