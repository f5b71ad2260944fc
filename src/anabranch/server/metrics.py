"""The engine's stats and the server's own counts as Prometheus metrics: `anabranch:…`, on request also `vllm:…`.

Labels are few and bounded: the model's name, a finish reason, a route's pattern, a status.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    "time_to_first_token_seconds": "From arrival to the first token.",
    "inter_token_latency_seconds": "Between two tokens of a sequence.",
    "e2e_request_latency_seconds": "From arrival to the last token.",
    "request_queue_time_seconds": "From arrival to the first computation.",
}
_STATS_NAME = {"request_queue_time_seconds": "queue_time_seconds"}


def render(service: Service, guard: Guard, stats: dict[str, Any]) -> bytes:
    """The text of /metrics. A registry a call: nothing is kept, so nothing can be counted twice."""
    registry = CollectorRegistry()
    registry.register(_Export(service, guard, stats))
    return generate_latest(registry)


class _Export(Collector):
    def __init__(self, service: Service, guard: Guard, stats: dict[str, Any]) -> None:
        self.service, self.guard, self.stats = service, guard, stats

    def collect(self) -> Iterator[Metric]:
        model = [self.service.names[0]]
        prefixes = ["anabranch:"] + ([f"{compat}:"] if (compat := self.service.settings.metrics_compat) else [])
        for prefix in prefixes:
            yield from engine_metrics(prefix, model, self.stats)
        yield from self._own(model)

    def _own(self, model: list[str]) -> Iterator[Metric]:
        responses = CounterMetricFamily(
            "anabranch:http_responses", "HTTP responses; 499: the client left.", labels=["route", "status"]
        )
        for (route, status), count in sorted(self.guard.responses.items()):
            responses.add_metric([route, str(status)], count)
        yield responses
        refused = CounterMetricFamily(
            "anabranch:requests_refused", "Requests that found the queue full.", labels=["model_name"]
        )
        refused.add_metric(model, self.service.history.num_refused)
        yield refused
        ready = GaugeMetricFamily("anabranch:ready", "1 while requests are taken.", labels=["model_name"])
        ready.add_metric(model, self.service.phase == "ready")
        yield ready
        steps = CounterMetricFamily("anabranch:steps", "Steps the engine made.", labels=["model_name"])
        steps.add_metric(model, self.stats.get("steps", 0))
        yield steps
        balance = GaugeMetricFamily(
            "anabranch:expert_balance", "Mean over maximum load of a layer's experts.", labels=["model_name", "layer"]
        )
        for layer, value in enumerate(self.service.history.experts()["balance_total"]):
            balance.add_metric([*model, str(layer)], value)
        yield balance


def engine_metrics(prefix: str, model: list[str], stats: dict[str, Any]) -> Iterator[Metric]:
    label = ["model_name"]
    for name, (key, about) in GAUGES.items():
        gauge = GaugeMetricFamily(prefix + name, about, labels=label)
        gauge.add_metric(model, stats.get(key, 0))
        yield gauge
    for name, (key, about) in COUNTERS.items():
        counter = CounterMetricFamily(prefix + name, about, labels=label)
        counter.add_metric(model, stats.get(key, 0))
        yield counter
    success = CounterMetricFamily(
        prefix + "request_success", "Sequences that ended, by reason.", labels=[*label, "finished_reason"]
    )
    for reason, count in sorted(stats.get("finished", {}).items()):
        success.add_metric([*model, reason], count)
    yield success
    for name, about in HISTOGRAMS.items():
        found = stats.get(_STATS_NAME.get(name, name))
        if found:
            histogram = HistogramMetricFamily(prefix + name, about, labels=label)
            histogram.add_metric(model, _cumulative(found), sum_value=found["sum"])
            yield histogram


def _cumulative(histogram: dict[str, Any]) -> list[tuple[str, float]]:
    """Prometheus counts what is up to a bound; the engine, what lies between two."""
    total, buckets = 0, []
    for bound, count in zip([*map(str, histogram["bounds"]), "+Inf"], histogram["counts"], strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
