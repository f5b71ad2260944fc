"""Routes for operators: health, version, Prometheus metrics, recent history, load of experts.

Metrics are `anabranch_…`, named as `promtool check metrics` wants them, on request also `vllm:…`. Their labels are few
and bounded: the model's name, a finish reason, a route's pattern, a status; with replicas, the number of the replica.
"""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from anabranch import __version__, bundled
from anabranch.server.errors import ApiError, bad_request
from anabranch.server.guard import Responses
from anabranch.server.service import Service
from anabranch.server.stream import json_response

router = APIRouter()
MetricType = type[CounterMetricFamily] | type[GaugeMetricFamily]

MOVE_SECONDS = 60.0  # for experts to move
STATS_SECONDS = 2.0  # to wait for fresh numbers of a busy engine before the last ones are shown

GAUGES = {
    "num_requests_running": ("running", "Sequences in the running batch."),
    "num_requests_waiting": ("waiting", "Sequences that wait to run."),
    "kv_cache_usage_perc": ("kv_usage", "Share of KV pages that requests hold, 0 to 1."),
    "spec_decode_draft_acceptance_rate": ("spec_decode_acceptance", "Share of drafts that were right since the start."),
}
COUNTERS = {
    "prefix_cache_queries": ("prefix_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_hits", "Prompt tokens found in the prefix cache."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of requests that were started."),
    "generation_tokens": ("generation_tokens", "Tokens generated."),
    "spec_decode_num_drafts": ("spec_decode_drafts", "Steps of sequences in which drafts were verified."),
    "spec_decode_num_draft_tokens": ("spec_decode_draft_tokens", "Drafts that were verified."),
    "spec_decode_num_accepted_tokens": ("spec_decode_accepted_tokens", "Drafts that were right."),
    "num_preemptions": ("preemptions", "Sequences that gave up their KV pages to be computed again."),
}
OWN_GAUGES = {"ready": ("ready", "1 while requests are taken.")}
OWN_COUNTERS = {
    "requests_refused": ("refused", "Requests refused because the queue was full."),
    "steps": ("steps", "Steps the engine made."),
    "nonfinite_logits": ("nonfinite_logits", "Sequences that ended with an error: their logits were NaN or infinite."),
}
"""These have no names of vLLM's."""
HISTOGRAMS = {
    "time_to_first_token_seconds": ("time_to_first_token_seconds", "From arrival to the first token."),
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "Between two tokens of a sequence."),
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds", "From arrival to the last token."),
    "request_queue_time_seconds": ("queue_time_seconds", "From arrival to the first computation."),
}


@router.get("/health/live", summary="The process answers")
async def live() -> Response:
    return json_response({"status": "alive"})


@router.get("/health/ready", summary="Requests are taken: 200, else 503 with the reason")
@router.get("/health", summary="The same as /health/ready")
async def ready(request: Request) -> Response:
    request.app.state.service.check_ready()
    return json_response({"status": "ready"})


@router.get("/version")
async def version() -> Response:
    return json_response({"version": __version__})


@router.get("/metrics", summary="Prometheus metrics")
async def show_metrics(request: Request) -> Response:
    state = request.app.state
    metrics = Metrics(state.service, state.responses, await fresh_stats(state.service))
    return Response(generate_latest(metrics), media_type=CONTENT_TYPE_LATEST)


@router.get(
    "/debug/stats", summary="The last minutes: tokens/s, TTFT, running, waiting, KV use; ?since=TIME: later ones"
)
async def show_stats(request: Request) -> Response:
    service: Service = request.app.state.service
    try:
        since = float(request.query_params.get("since", 0))
    except ValueError:
        raise bad_request("since must be a number: the `time` of a sample, in seconds", "since") from None
    await fresh_stats(service)
    about = {
        "phase": service.phase,
        "reason": service.reason,
        "model": service.names[0],
        "max_num_seqs": service.engine.max_num_seqs,
        "in_flight": service.num_admitted,
        "asyncio_tasks": len(asyncio.all_tasks()),
    }
    if not since:  # of the page, the first request
        about["card"] = bundled.card(service.engine.model)
    return json_response(about | service.history.as_dict(since))


@router.get(
    "/debug/experts", summary="Tokens by layer and expert, since the start and lately, with each layer's balance"
)
async def show_experts(request: Request) -> Response:
    service: Service = request.app.state.service
    # Up to some hundred kB, requested once a second, and unchanged while nothing runs.
    tag = f'"{service.started:.3f}-{service.history.num_loads}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"etag": tag})
    return json_response(service.history.experts(), {"etag": tag, "cache-control": "no-cache"})


@router.post("/debug/experts", summary="Divide the experts anew among ranks, by the tokens that each had")
async def move_experts(request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_ready()
    try:
        service.history.add_load(await service.client.stats(MOVE_SECONDS, rebalance=True))
    except RuntimeError as error:
        raise bad_request(str(error)) from None
    return json_response({"ranks": service.history.ranks})


async def fresh_stats(service: Service) -> dict[str, Any]:
    """The engine's stats now; the last known ones where it does not answer."""
    with contextlib.suppress(ApiError, TimeoutError, RuntimeError):  # loading, hanging, dead
        service.history.stats = await service.client.stats(STATS_SECONDS)
    return service.history.stats


class Metrics(Collector):
    def __init__(self, service: Service, responses: Responses, stats: dict[str, Any]) -> None:
        self.service, self.responses, self.model = service, responses, service.names[0]
        self.stats = stats | {"refused": service.history.num_refused, "ready": service.phase == "ready"}
        self.replicas: dict[str, dict[str, Any]] = stats.get("replicas", {})

    def collect(self) -> Iterator[Metric]:
        yield from self._of_engine("anabranch_")
        if compat := self.service.settings.metrics_compat:
            yield from self._of_engine(f"{compat}:")
        yield from self._simple(GaugeMetricFamily, "anabranch_", OWN_GAUGES)
        yield from self._simple(CounterMetricFamily, "anabranch_", OWN_COUNTERS)
        about = "1; says what the model's weights are kept in."
        info = {(self.model, kept): 1 for kept in (self.service.quantization,) if kept}
        yield family(GaugeMetricFamily, "anabranch_model_info", about, info, "model_name", "quantization")
        responses = {(route, str(status)): count for (route, status), count in sorted(self.responses.items())}
        about = "HTTP responses; 499: the client disconnected."
        yield family(CounterMetricFamily, "anabranch_http_responses", about, responses, "route", "status")
        balances = enumerate(self.service.history.experts()["balance_total"])
        balance = {(self.model, str(layer)): value for layer, value in balances}
        about = "Mean over maximum load of a layer's experts."
        yield family(GaugeMetricFamily, "anabranch_expert_balance", about, balance, "model_name", "layer")

    def _of_engine(self, prefix: str) -> Iterator[Metric]:
        yield from self._simple(GaugeMetricFamily, prefix, GAUGES)
        yield from self._simple(CounterMetricFamily, prefix, COUNTERS)
        labels, parts = self._parts("finished")
        finished = {
            (*given, reason): count
            for given, counts in parts.items()
            for reason, count in sorted((counts or {}).items())
        }
        about = "Sequences that ended, by reason."
        yield family(CounterMetricFamily, prefix + "request_success", about, finished, *labels, "finished_reason")
        for name, (key, about) in HISTOGRAMS.items():
            labels, parts = self._parts(key)
            histogram = HistogramMetricFamily(prefix + name, about, labels=labels)
            for given, found in parts.items():
                if found:
                    # Prometheus counts values up to a bound, the engine those between two bounds.
                    bounds, counts = [*map(str, found["bounds"]), "+Inf"], map(float, accumulate(found["counts"]))
                    histogram.add_metric(given, list(zip(bounds, counts, strict=True)), sum_value=found["sum"])
            if histogram.samples:
                yield histogram

    def _simple(self, type: MetricType, prefix: str, known: Mapping[str, tuple[str, str]]) -> Iterator[Metric]:
        for name, (key, about) in known.items():
            labels, parts = self._parts(key)
            yield family(type, prefix + name, about, parts, *labels)

    def _parts(self, key: str) -> tuple[list[str], dict[tuple[str, ...], Any]]:
        """Labels, and what each of the engines has under this key, or the server."""
        if any(key in stats for stats in self.replicas.values()):
            parts: dict[tuple[str, ...], Any] = {}
            for number, stats in self.replicas.items():
                parts[self.model, number] = stats.get(key, 0)
            return ["model_name", "replica"], parts
        return ["model_name"], {(self.model,): self.stats.get(key, 0)}


def family(type: MetricType, name: str, about: str, values: Mapping[Any, float], *labels: str) -> Metric:
    """A metric with a value for each tuple of labels."""
    metric = type(name, about, labels=labels)
    for given, value in values.items():
        metric.add_metric(given, value)
    return metric
