"""The replicas seen from the server: what engine.client.EngineClient offers, by an application of Ray Serve.

The server's process has the HTTP routes, the tokenizer and the router; a replica has an engine. Between them go token
ids. Ray Serve starts the replicas, replaces those that end, and scales their number; Ray's own HTTP proxies are not
used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any, TypeVar

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, LoggingConfig

from anabranch import messages
from anabranch.config import EngineConfig
from anabranch.engine.client import EngineDead
from anabranch.replicas import prefixes
from anabranch.replicas.config import ReplicaConfig
from anabranch.replicas.replica import Replica
from anabranch.request import Request, Update
from anabranch.server.settings import Settings
from anabranch.server.threads import Threads
from anabranch.stats import combined

log = logging.getLogger("anabranch.replicas")

Result = TypeVar("Result")
POLL = 0.25  # seconds between two looks at replicas that are starting
ATTEMPTS = 3  # replicas that a request without an answer is sent to, one after the other
LEAVE_SECONDS = 4.0  # at least, to end the replicas in order
CPU_MEMORY = 0.5  # of this machine's, for all replicas of a local cluster together
OBJECT_STORE = 100 << 20  # bytes of a local cluster's shared memory: requests and updates are small
SCALE_SECONDS = 10.0  # of high load, after which another replica is started
HEALTH_PERIOD = 2.0  # seconds


class ReplicaClient:
    """Make it with `start`, end it with `close`; all from one loop's thread."""

    pid = os.getpid()  # the replicas have processes of their own, which Ray watches
    hanging_for = 0.0

    def __init__(self, config: ReplicaConfig, settings: Settings, engine: EngineConfig) -> None:
        self.config, self.settings, self.engine = config, settings, engine
        self.ready_stats: dict[str, Any] = {}
        self.name = f"anabranch-{uuid.uuid4().hex[:8]}"
        """The application's: several servers may use one cluster."""
        self._handle: Any = None
        self._known: dict[str, dict[str, Any]] = {}
        """The last stats of every replica that there has been, by its id."""
        self._closed = asyncio.Event()
        self._thread = Threads(1, "ray")  # one that stays: Ray's processes end with the thread that started them

    @classmethod
    async def start(
        cls,
        engine: EngineConfig,
        make_engine: str,
        *,
        timeout: float,
        on_stage: Callable[[messages.Stage], None],
        config: ReplicaConfig,
        settings: Settings,
    ) -> ReplicaClient:
        """Start a cluster or connect to one, and wait until all replicas are ready; EngineDead if one cannot start."""
        client = cls(config, settings, engine)
        try:
            on_stage(messages.Stage("connecting to Ray" if config.ray_address else "starting Ray"))
            await client._call(client._connect)
            on_stage(messages.Stage("starting replicas", 0, config.replicas))
            client._handle = await client._call(client._deploy, make_engine)
            async with asyncio.timeout(timeout):
                while (num_ready := await client._call(client._num_ready)) < config.replicas:
                    on_stage(messages.Stage("starting replicas", num_ready, config.replicas))
                    await asyncio.sleep(POLL)
                client.ready_stats = await client._first_stats()
        except TimeoutError:
            await client.close()
            raise EngineDead(f"the replicas were not ready within {timeout:g} s") from None
        except BaseException:
            await client.close()
            raise
        return client

    # -- for the server ------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> AsyncGenerator[Update, None]:
        """The request's updates until the one with a finish_reason; see EngineClient.generate. If its replica ends, the
        request is sent to another one, which repeats the answer so far: greedy and seeded answers go on. EngineDead
        where it has another beginning."""
        tokens: list[int] = []
        for attempt in range(1, ATTEMPTS + 1):
            # A replica may be on another machine, with another clock.
            response = self._handle.generate.remote(replace(request, id=f"{request.id}-{attempt}", arrival=0.0))
            num_seen, ended = 0, False
            try:
                async for update in response:
                    update.id, known = request.id, tokens[num_seen : num_seen + len(update.token_ids)]
                    num_seen += len(update.token_ids)
                    if update.token_ids[: len(known)] != known:
                        raise EngineDead("a replica ended during the answer, which is not the same again elsewhere")
                    del update.token_ids[: len(known)], update.logprobs[: len(known)]
                    tokens += update.token_ids
                    if update.token_ids or not known or update.finish_reason is not None:
                        yield update
                ended = True
                return
            except RayActorError:
                log.warning("request %s: its replica has ended after %d tokens", request.id, num_seen)
            except RayServeException as error:
                raise EngineDead(str(error)) from None
            finally:
                if not ended:
                    response.cancel()  # the replica aborts it
        raise EngineDead(f"{ATTEMPTS} replicas ended, one after the other, while they answered")

    async def stats(self, timeout: float = 10.0, rebalance: bool = False) -> dict[str, Any]:
        """The engines' numbers together, and by replica in "replicas"; TimeoutError if none answers in time."""
        if rebalance:
            raise RuntimeError("experts of replicas do not move: each replica has a placement of its own")
        if self._closed.is_set():
            raise RuntimeError("the replicas are closed")
        try:
            response = self._handle.broadcast("stats", timeout)
            found = await response.results_async(timeout_s=timeout, return_exceptions=True)
        except RayServeException:
            raise RuntimeError(self.dead_reason or "no replica answers") from None
        now = {id: (rank, stats) for id, rank, stats in (one for one in found if isinstance(one, tuple))}
        if not now:
            raise TimeoutError
        self._known |= {id: stats for id, (_, stats) in now.items()}
        ended = [stats for id, stats in self._known.items() if id not in now]
        ranked = {str(rank): stats for rank, stats in sorted(now.values(), key=lambda one: one[0])}
        return combined([stats for _, stats in now.values()], ended) | {"replicas": ranked}

    @property
    def num_engines(self) -> int:
        found = prefixes.by_application.get(self.name)
        return 0 if found is None else len(found.replicas)

    @property
    def alive(self) -> bool:
        """There is a replica."""
        return not self._closed.is_set() and self.num_engines > 0

    @property
    def dead_reason(self) -> str | None:
        return None if self.alive else "there is no replica at the moment; one is being started"

    async def wait(self) -> str:
        """Replicas that end are replaced: nothing to report before `close`."""
        await self._closed.wait()
        return "the replicas are closed"

    async def close(self, drain: bool = False, timeout: float = 30.0, patience: float = LEAVE_SECONDS) -> None:
        """End the replicas, and the cluster if it was started here."""
        if not self._closed.is_set():
            self._closed.set()
            with contextlib.suppress(Exception):  # the cluster may be gone, and this is the end in any case
                async with asyncio.timeout(max(patience, LEAVE_SECONDS)):
                    await self._call(self._leave)
                    await self._call(ray.shutdown)
            prefixes.by_application.pop(self.name, None)

    # -- Ray, in its thread --------------------------------------------------------------------------------------------

    async def _call(self, work: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments))

    def _connect(self) -> None:
        logging.getLogger("ray").setLevel(logging.ERROR)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        quiet: dict[str, Any] = {"configure_logging": False}
        if self.config.ray_address:
            try:
                ray.init(self.config.ray_address, **quiet)
            except (ConnectionError, RuntimeError, ValueError) as error:
                address, reason = self.config.ray_address, str(error).splitlines()[0]
                hint = "one that wants a token needs RAY_AUTH_MODE=token here too"
                raise ValueError(f"--ray-address {address}: no cluster answers ({hint}): {reason}") from None
        else:
            cpus = max(os.cpu_count() or 1, self.config.most)
            ray.init(
                "local",
                num_cpus=cpus,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE,
                **quiet,
            )

    def _deploy(self, make_engine: str) -> Any:
        config, settings = self.config, self.settings
        logging_config = LoggingConfig(log_level="WARNING", enable_access_log=False)
        serve.start(proxy_location="Disabled", logging_config=logging_config)
        resources, engine = self._resources(), self.engine
        if "num_gpus" not in resources and not config.ray_address:
            engine = replace(engine, memory_fraction=engine.memory_fraction or CPU_MEMORY / config.most)
        scaling: dict[str, Any] = {"num_replicas": config.replicas}
        if config.most > config.replicas:
            target = max(1, engine.max_num_seqs // 2)
            limits = AutoscalingConfig(
                min_replicas=config.replicas,
                max_replicas=config.most,
                target_ongoing_requests=target,
                upscale_delay_s=SCALE_SECONDS,
                look_back_period_s=SCALE_SECONDS,
                metrics_interval_s=SCALE_SECONDS / 4,
            )
            scaling = {"autoscaling_config": limits}
        router = RequestRouterConfig(
            request_router_class="anabranch.replicas.router.PrefixRouter",
            request_router_kwargs={
                "by_prefix": config.routing == "prefix" and self.engine.prefix_cache,
                "max_imbalance": config.max_imbalance,
            },
        )
        deployment = serve.deployment(
            Replica,
            name="replica",
            ray_actor_options=resources,
            max_ongoing_requests=engine.max_num_seqs + settings.max_queue,
            graceful_shutdown_wait_loop_s=0.2,
            graceful_shutdown_timeout_s=settings.shutdown_timeout,
            health_check_period_s=HEALTH_PERIOD,
            request_router_config=router,
            logging_config=logging_config,
            max_constructor_retry_count=1,
            **scaling,
        )
        application = deployment.bind(
            engine, make_engine, settings.start_timeout, settings.step_timeout, settings.log_format
        )
        target = serve.RunTarget(application, name=self.name, route_prefix=None)
        return serve.run_many([target], wait_for_applications_running=False)[0].options(stream=True)

    def _resources(self) -> dict[str, float]:
        """What a replica takes of its node: GPUs where the cluster has any, else a share of the cores."""
        engine, there = self.engine, ray.cluster_resources()
        needed: dict[str, float] = {"num_cpus": 1}
        if there.get("GPU") and os.environ.get("ANABRANCH_PLATFORM") != "cpu":
            # Two replicas with --gpu-memory-utilization 0.45 fit on a GPU.
            needed["num_gpus"] = engine.num_ranks if engine.num_ranks > 1 else (engine.memory_fraction or 1)
            if there["GPU"] < needed["num_gpus"] * self.config.replicas:
                raise ValueError(
                    f"{self.config.replicas} replicas need {needed['num_gpus'] * self.config.replicas:g} GPUs and the "
                    f"cluster has {there['GPU']:g}: lower --replicas, or --gpu-memory-utilization to share a GPU"
                )
        elif not self.config.ray_address:  # as many threads, Ray sees to that
            needed["num_cpus"] = max(1, there["CPU"] // self.config.most)
        return needed

    def _num_ready(self) -> int:
        application = serve.status().applications[self.name]
        if application.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
            lines = [line for one in application.deployments.values() for line in one.message.splitlines() if line]
            reason = lines[-1].strip().removeprefix("RuntimeError: ") if lines else application.message
            raise EngineDead(f"a replica did not start: {reason}")
        return sum(one.replica_states.get("RUNNING", 0) for one in application.deployments.values())

    def _leave(self) -> None:
        """End the application and what calls Ray from other threads: after ray.shutdown(), such a call would end the
        process with exit code 1."""
        if self._handle is not None:
            serve.delete(self.name)
            self._handle.shutdown()
            time.sleep(POLL)  # for the router to receive the last news

    async def _first_stats(self) -> dict[str, Any]:
        while self.num_engines < self.config.replicas:  # the router learns of them a little later
            self._handle.running_replicas_populated()
            await asyncio.sleep(POLL / 10)
        return await self.stats()
