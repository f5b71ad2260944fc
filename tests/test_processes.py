"""When a process that sends heartbeats counts as stopped."""

import asyncio
import time

import pytest

from anabranch import processes
from anabranch.processes import Silence, silent


def test_a_silence_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "DOUBT", 0.1)

    async def test() -> None:
        found: list[str] = []
        silence = Silence(asyncio.get_running_loop(), found.append)
        for patience in (0.2, 0.2, 0.2, None):
            silence.broken(patience)
            await asyncio.sleep(0.15)
        await asyncio.sleep(0.3)
        assert not found, "it is not judged by heartbeats any more"
        silence.broken(0.2)
        await asyncio.sleep(0.4)
        assert found == [silent(0, 0.2)]

    asyncio.run(test())


def test_who_listens_may_have_been_stopped_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "DOUBT", 0.3)

    async def test() -> None:
        found: list[str] = []
        silence = Silence(asyncio.get_running_loop(), found.append)
        silence.broken(0.4)
        time.sleep(0.6)
        await asyncio.sleep(0.1)
        silence.broken(0.8)  # which came meanwhile
        await asyncio.sleep(0.3)
        assert not found

    asyncio.run(test())
