"""A request whose replica ends: what its reader gets. Replicas are lists here; test_replicas kills real ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError

from anabranch.config import EngineConfig
from anabranch.engine.client import EngineDead
from anabranch.replicas.client import ATTEMPTS, ReplicaClient
from anabranch.replicas.config import ReplicaConfig
from anabranch.request import Request, Update
from anabranch.sampling_params import SamplingParams
from anabranch.server.settings import Settings

Answer = list[list[int]]
DIES: list[int] = []  # as an update: the replica ends


class Handle:
    """Each call gets the next of the answers."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.ids: list[str] = []
        self.num_cancelled = 0
        self.generate = self

    def remote(self, request: Request) -> Any:
        self.ids.append(request.id)
        return Response(self, self.answers.pop(0), request.id)


class Response:
    def __init__(self, handle: Handle, answer: Answer, id: str) -> None:
        self.handle, self.answer, self.id = handle, answer, id

    async def __aiter__(self) -> AsyncIterator[Update]:
        for number, tokens in enumerate(self.answer):
            if tokens is DIES:
                raise ActorDiedError()
            last = number == len(self.answer) - 1
            yield Update(id=self.id, token_ids=list(tokens), finish_reason="stop" if last else None)

    def cancel(self) -> None:
        self.handle.num_cancelled += 1


def read(handle: Handle) -> list[Update]:
    async def run() -> list[Update]:
        client = ReplicaClient(ReplicaConfig(replicas=2), Settings(), EngineConfig(model="x"))
        client._handle = handle
        request = Request(id="r", prompt_ids=(1, 2), params=SamplingParams())
        return [update async for update in client.generate(request)]

    return asyncio.run(run())


@pytest.mark.parametrize(
    "again",
    [[[1], [2], [3], [4, 5]], [[1, 2, 3, 4], [5]], [[1, 2], [3, 4], [5]], [[1, 2, 3, 4, 5]]],
)
def test_an_answer_goes_on_elsewhere(again: Answer) -> None:
    handle = Handle([[1], [2, 3], DIES], again)
    updates = read(handle)
    assert [token for update in updates for token in update.token_ids] == [1, 2, 3, 4, 5]
    assert [update.finish_reason for update in updates][-1] == "stop" and {update.id for update in updates} == {"r"}
    assert len(set(handle.ids)) == 2 and handle.num_cancelled == 1


def test_an_answer_that_has_another_beginning_is_an_error() -> None:
    with pytest.raises(EngineDead, match="not the same again"):
        read(Handle([[1], [2, 3], DIES], [[1, 2], [4], [5]]))


def test_replicas_that_all_end() -> None:
    with pytest.raises(EngineDead, match=f"{ATTEMPTS} replicas ended"):
        read(Handle(*[[[1], DIES]] * ATTEMPTS))
