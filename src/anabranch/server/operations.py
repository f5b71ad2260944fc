"""Routes for those who run the server: health, metrics, version, a look inside."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from anabranch import __version__
from anabranch.server import metrics
from anabranch.server.errors import ApiError, bad_request
from anabranch.server.service import Service
from anabranch.server.stream import json_response

router = APIRouter()

STATS_SECONDS = 2.0  # to wait for fresh numbers of a busy engine before the last ones are shown


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
    text = metrics.render(state.service, state.guard, await fresh_stats(state.service))
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.get(
    "/debug/stats", summary="The last minutes: tokens/s, TTFT, running, waiting, KV use; ?since=TIME: later ones"
)
async def show_stats(request: Request) -> Response:
    service: Service = request.app.state.service
    try:
        since = float(request.query_params.get("since", 0))
    except ValueError:
        raise bad_request("since: seconds of a sample's own `time`, a number", "since") from None
    await fresh_stats(service)
    about = {
        "phase": service.phase,
        "reason": service.reason,
        "model": service.names[0],
        "max_num_seqs": service.engine.max_num_seqs,
        "in_flight": service.num_admitted,
        "asyncio_tasks": len(asyncio.all_tasks()),
    }
    return json_response(about | service.history.as_dict(since))


@router.get(
    "/debug/experts", summary="Tokens by layer and expert, since the start and lately, with each layer's balance"
)
async def show_experts(request: Request) -> Response:
    service: Service = request.app.state.service
    # Up to some hundred kB, asked for once a second, and the same while nothing runs.
    tag = f'"{service.started:.3f}-{service.history.num_loads}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"etag": tag})
    return json_response(service.history.experts(), {"etag": tag, "cache-control": "no-cache"})


async def fresh_stats(service: Service) -> dict[str, Any]:
    """The engine's stats now; the last known ones where it does not tell."""
    with contextlib.suppress(ApiError, TimeoutError, RuntimeError):  # loading, hanging, dead
        service.history.stats = await service.client.stats(STATS_SECONDS)
    return service.history.stats
