"""One replica: an actor of Ray's that has one of our engines, in a process of its own."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ray import serve

from anabranch import logs
from anabranch.config import EngineConfig
from anabranch.engine.client import EngineClient, EngineDead
from anabranch.request import Request, Update

log = logging.getLogger("anabranch.replica")

UPDATE_SECONDS = 0.0005  # between two updates to the server: Ray needs about 1 ms of a core for each
WATCH = 0.25  # seconds between two checks of the engine
LEASE = 60.0  # seconds without a word of the server, after which it counts as gone


class Replica:
    """Ray Serve calls `check_health`, our client the rest. If the engine ends, this process ends: Ray Serve starts
    another replica, and requests that have no answer yet are sent to others."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, engine: EngineConfig, make_engine: str, start_timeout: float, step_timeout: float, log_format: str
    ) -> None:
        logs.set_up(log_format)
        self.step_timeout = step_timeout
        self.called = time.monotonic()
        try:
            self.client = await EngineClient.start(engine, make_engine, timeout=start_timeout)
        except EngineDead as error:
            raise RuntimeError(error.reason) from None
        self.watching = asyncio.create_task(self._watch())

    async def generate(self, request: Request) -> AsyncGenerator[Update, None]:
        """EngineClient.generate. Ray cancels it when the client closes its end, which aborts the request."""
        try:
            async with aclosing(self.client.generate(request)) as updates:
                async for update in updates:
                    yield update
                    if update.finish_reason is None:  # what the engine adds meanwhile is merged into the next update
                        await asyncio.sleep(UPDATE_SECONDS * self.client.num_in_flight)
        except EngineDead as error:
            self._end(error.reason)

    async def stats(self, timeout: float) -> tuple[str, int, dict[str, Any]]:
        """The replica's id and number, which is given to the one that replaces it, and the engine's stats."""
        self.called = time.monotonic()
        context = serve.get_replica_context()
        return context.replica_tag, context.rank.rank, await self.client.stats(timeout)

    def check_health(self) -> None:
        if self.client.hanging_for > self.step_timeout:
            raise RuntimeError(f"the engine has been in one step for more than {self.step_timeout:g} s")

    async def _watch(self) -> None:
        while self.client.alive:
            await asyncio.sleep(WATCH)
            if time.monotonic() - self.called > LEASE:
                log.error("the server has been silent for %g s: ending its replicas", LEASE)
                self.called = time.monotonic()
                await asyncio.to_thread(serve.delete, serve.get_replica_context().app_name, _blocking=False)
        self._end(self.client.dead_reason or "")

    def _end(self, reason: str) -> None:
        log.error("%s: ending this replica", reason)
        logging.shutdown()
        os._exit(1)
