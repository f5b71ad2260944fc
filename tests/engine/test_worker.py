"""The engine in its own process: what crosses the border, and every way to end. The engine is a fake but once."""

# ruff: noqa: E402  (importorskip comes first: a machine without the server's packages skips this file)

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

msgspec = pytest.importorskip("msgspec")
pytest.importorskip("zmq")
psutil = pytest.importorskip("psutil")

from anabranch import messages
from anabranch.config import EngineConfig
from anabranch.engine import client as client_module
from anabranch.engine import process
from anabranch.engine.client import EngineBusy, EngineClient, EngineDead, merge
from anabranch.request import Request, TokenLogprobs, Update
from anabranch.sampling_params import Grammar, SamplingParams
from tests.descriptors import num_descriptors
from tests.engine import fake_engine

ENGINE = "tests.engine.fake_engine:make_engine"
ROOT = Path(__file__).parents[2]
LONG = 1_000_000  # tokens: more than any test waits for


def run(test: Coroutine[Any, Any, None], seconds: float = 20) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(seconds):
            await test

    asyncio.run(bounded())


async def start(**options: Any) -> EngineClient:
    return await EngineClient.start(fake_engine.config(**options), ENGINE, timeout=10)


def request(id: str, first: int = 0, max_tokens: int = LONG, **params: Any) -> Request:
    return Request(id=id, prompt_ids=(first, 1, 2), params=SamplingParams(max_tokens=max_tokens, **params))


async def collect(client: EngineClient, request: Request) -> list[Update]:
    return [update async for update in client.generate(request)]


async def one(client: EngineClient, request: Request) -> Update:
    """The whole answer as one update."""
    first, *rest = await collect(client, request)
    for update in rest:
        merge(first, update)
    return first


def gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


async def until(condition: Any, seconds: float) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "too late"
        await asyncio.sleep(0.01)
    return time.monotonic() - began


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No process, thread, socket or folder survives a test."""
    tmp_path_factory.getbasetemp()  # pytest's own folder comes first, or it would lie in ours
    own = psutil.Process()
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        num_fds = num_descriptors(own)
        children = own.children(recursive=True)  # those of other tests: multiprocessing keeps a tracker, for one
        yield
        assert [child for child in own.children(recursive=True) if child not in children] == []
        assert [name for name in os.listdir(folder) if name.startswith("anabranch")] == []
        deadline = time.monotonic() + 2
        while (left := [t.name for t in threading.enumerate() if t.name.startswith("engine-")]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.01)
        assert left == []
        assert num_descriptors(own) <= num_fds


# -- messages ----------------------------------------------------------------------------------------------------------

PARAMS = SamplingParams(
    temperature=0.5,
    top_k=7,
    top_p=0.25,
    min_p=0.125,
    presence_penalty=-1.0,
    frequency_penalty=1.5,
    repetition_penalty=1.25,
    logit_bias={3: -100.0, 5: 0.5},
    seed=-(2**63),
    n=2,
    max_tokens=99,
    min_tokens=3,
    stop=("a", "ß…\n"),
    stop_token_ids=(1, 2),
    ignore_eos=True,
    include_stop_str_in_output=True,
    skip_special_tokens=False,
    detokenize=True,
    bad_words=("x",),
    allowed_token_ids=(4,),
    logprobs=0,
    prompt_logprobs=5,
    grammar=Grammar(choice=("yes", "no")),
    return_routed_experts=True,
)
REQUEST = Request(
    id="é", prompt_ids=(0, 2**31), params=PARAMS, priority=-3, cache_salt="s", arrival=12.5, pooling="mean"
)
LOGPROBS = TokenLogprobs(7, float("-inf"), 3, ((7, -0.1), (8, float("nan"))))
UPDATE = Update(
    id="é",
    token_ids=[1, 2],
    logprobs=[LOGPROBS],
    prompt_logprobs=[None, LOGPROBS],
    num_cached=4,
    finish_reason="stop",
    stop_token=2,
    error="why",
    routed_experts=[[[1, 2]], [[0, 3]]],
    embedding=b"\0\xff",
)
CONFIG = EngineConfig(model="m", memory_fraction=0.5, prefix_cache=False, seed=3)


def test_the_samples_leave_no_field_at_its_default() -> None:
    for sample, same in ((PARAMS, {"detokenize"}), (REQUEST, set()), (UPDATE, set())):
        for field in dataclasses.fields(sample):
            made = field.default_factory is not dataclasses.MISSING
            default = field.default_factory() if made else field.default
            assert field.name in same or getattr(sample, field.name) != default, field.name


@pytest.mark.parametrize(
    "message",
    [
        messages.Start("a:b", CONFIG, 20),
        messages.Add(REQUEST),
        messages.Add(Request(id="", prompt_ids=(), params=SamplingParams(grammar=Grammar(json_schema="{}")))),
        messages.Abort("x"),
        messages.AskStats(1),
        messages.Stop(),
        messages.Stage("loading", 1, 2),
        messages.Ready({"a": [1, {"b": None}]}),
        messages.Updates([UPDATE, Update(id="plain")], 5),
        messages.Stats(1, {"a": float("inf")}, "why"),
        messages.Heartbeat(1, 2, 0.5),
        messages.Ended(None),
    ],
    ids=lambda message: type(message).__name__,
)
def test_round_trip(message: Any) -> None:
    decode = messages.decode_command if isinstance(message, messages.Command) else messages.decode_report
    assert repr(decode(messages.encode(message))) == repr(message)  # repr: nan is not equal to itself


@pytest.mark.parametrize(
    "path, value",
    [
        (("request", "prompt_ids"), [1, "2"]),
        (("request", "prompt_ids"), [True]),
        (("request", "params", "top_p"), 7.0),
        (("request", "params", "max_tokens"), 1.5),
        (("request", "params", "grammar"), {"regex": "a", "lark": "b"}),
        (("request", "params"), None),
    ],
)
def test_decoding_checks_types_and_ranges(path: tuple[str, ...], value: Any) -> None:
    raw = msgspec.msgpack.decode(messages.encode(messages.Add(REQUEST)))
    at = raw
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    frame = msgspec.msgpack.encode(raw)
    with pytest.raises(msgspec.ValidationError):
        messages.decode_command(frame)
    assert messages.request_id(frame) == REQUEST.id  # so that it can be answered


def test_whose_request_only_an_add_tells() -> None:
    assert messages.request_id(messages.encode(messages.Abort("x"))) is None
    assert messages.request_id(b"\xc1") is None


def test_merge_is_concatenation() -> None:
    first = Update(id="a", token_ids=[1], logprobs=[LOGPROBS], prompt_logprobs=[None], num_cached=3)
    last = Update(id="a", token_ids=[2, 3], logprobs=[LOGPROBS] * 2, finish_reason="stop", stop_token=3)
    last.routed_experts = [[[1]]]
    merge(first, last)
    assert (first.token_ids, len(first.logprobs), first.num_cached) == ([1, 2, 3], 3, 3)
    assert (first.prompt_logprobs, first.finish_reason, first.stop_token) == ([None], "stop", 3)
    assert first.routed_experts == [[[1]]] and first.error is None


# -- serving -----------------------------------------------------------------------------------------------------------


def test_many_streams_at_once() -> None:
    async def test() -> None:
        stages: list[tuple[str, int, int]] = []
        client = await EngineClient.start(
            fake_engine.config(),
            ENGINE,
            timeout=10,
            on_stage=lambda stage: stages.append((stage.name, stage.done, stage.total)),
        )
        async with client:
            assert client.ready_stats["max_model_len"] == 99
            assert stages[0] == ("importing", 0, 0) and stages[-1] == ("loading", 2, 2)
            asked = [request(f"r{i}", 1000 * i, 1 + i % 37, logprobs=i % 2 or None) for i in range(200)]
            answers = await asyncio.gather(*(one(client, r) for r in asked))
            for i, answer in enumerate(answers):
                assert answer.token_ids == list(range(1000 * i, 1000 * i + 1 + i % 37))
                assert len(answer.logprobs) == (len(answer.token_ids) if i % 2 else 0)
                assert (answer.id, answer.finish_reason, answer.num_cached) == (f"r{i}", "length", 2)
            assert (await client.stats())["running"] == client.num_in_flight == 0
        assert not client.alive and client.dead_reason == "the engine is closed"

    run(test())


def test_updates_come_one_step_at_a_time() -> None:
    async def test() -> None:
        async with await start(step_seconds=0.05) as client:
            updates = await collect(client, request("a", max_tokens=5))
            assert [update.token_ids for update in updates] == [[0], [1], [2], [3], [4]]

    run(test())


def test_a_slow_consumer_delays_nobody_and_holds_one_update() -> None:
    async def test() -> None:
        async with await start() as client:
            slow = client.generate(request("slow", 0, 150))
            tokens = (await anext(slow)).token_ids
            fast = await one(client, request("fast", 0, 300))
            assert len(fast.token_ids) == 300  # and `slow` ended long before
            rest = [update async for update in slow]
            assert len(rest) == 1 and rest[0].finish_reason == "length"
            assert tokens + rest[0].token_ids == list(range(150))

    run(test())


def test_the_engine_waits_for_a_client_that_does_not_read() -> None:
    async def test() -> None:
        async with await start(step_seconds=0) as client:
            stream = client.generate(request("a"))
            await anext(stream)
            time.sleep(2)  # the whole loop, not this task: time for some 20,000 steps
            steps = (await client.stats())["steps"]
            assert steps < 6000  # 1000 messages at each end, and what the system's socket holds
            while (await anext(stream)).token_ids[-1] < steps:
                pass  # it goes on
            await stream.aclose()

    run(test())


@pytest.mark.parametrize("how", ["close", "cancel", "drop"])
def test_leaving_a_stream_aborts_within_one_step(how: str) -> None:
    async def test() -> None:
        async with await start(step_seconds=0.1) as client:
            seen = 0

            async def consume() -> None:
                nonlocal seen
                async for update in client.generate(request("a")):
                    seen += len(update.token_ids)
                    if seen == 3 and how == "drop":
                        break

            if how == "close":
                stream = client.generate(request("a"))
                while seen < 3:
                    seen += len((await anext(stream)).token_ids)
                await stream.aclose()
            elif how == "cancel":
                task = asyncio.create_task(consume())
                await until(lambda: seen == 3, 5)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                await consume()
                await asyncio.sleep(0.02)  # the loop closes what is collected in a turn of its own
            stats = await client.stats()
            ((id, _, tokens),) = stats["aborts"]
            assert (id, stats["running"], client.num_in_flight) == ("a", 0, 0)
            assert tokens <= 4  # the step that ran when the abort was sent

    run(test())


def test_a_stream_that_is_never_read_is_never_sent() -> None:
    async def test() -> None:
        async with await start() as client:
            client.generate(request("a"))
            assert (await client.stats())["steps"] == 0

    run(test())


def test_abort_by_id_ends_the_stream() -> None:
    async def test() -> None:
        async with await start(step_seconds=0.01) as client:
            tasks = [asyncio.create_task(one(client, request(id))) for id in "ab"]
            await asyncio.sleep(0.1)
            await client.abort("a")
            await client.abort("unknown")
            assert (await tasks[0]).finish_reason == "abort"
            assert not tasks[1].done()
            stats = await client.stats()
            assert [abort[0] for abort in stats["aborts"]] == ["a"] and stats["running"] == 1
            await client.abort("b")
            await tasks[1]

    run(test())


def test_an_id_used_again_gets_nothing_of_its_predecessor() -> None:
    async def test() -> None:
        async with await start(step_seconds=0.001) as client:
            old = client.generate(request("a", 0))
            await anext(old)
            with pytest.raises(ValueError, match="in use"):
                await anext(client.generate(request("a")))
            time.sleep(0.2)  # the loop sleeps: updates of the old request lie unread
            await old.aclose()
            new = await one(client, request("a", 5_000_000, 3))
            assert new.token_ids == [5_000_000, 5_000_001, 5_000_002]

    run(test())


def test_cpu_per_update() -> None:
    async def test() -> None:
        async with await start(step_seconds=0.005) as client:
            costs = []
            for attempt in range(3):  # the best of three: other work on the machine makes CPU seconds longer too
                began = time.process_time()
                answers = await asyncio.gather(*(collect(client, request(f"{attempt}-{i}", 0, 100)) for i in range(64)))
                seconds = time.process_time() - began
                num_updates = sum(len(answer) for answer in answers)
                # Else nothing was measured; the updates of a slow client are joined.
                assert num_updates > 64 * 5
                costs.append(seconds / num_updates)
            assert min(costs) < 60e-6  # about 6 µs on an idle machine

    run(test())


# -- bad requests ------------------------------------------------------------------------------------------------------


def test_a_bad_request_concerns_itself_only() -> None:
    async def test() -> None:
        async with await start() as client:
            good = asyncio.create_task(one(client, request("good", 0, 200)))
            refused = await one(client, request("refused", fake_engine.REFUSE))
            assert (refused.finish_reason, refused.error) == ("error", "this prompt is refused")
            bug = await one(client, request("bug", fake_engine.BUG))
            assert bug.error == messages.INTERNAL + "KeyError: 'no such thing'"
            strange = Request(id="strange", prompt_ids=("1",), params=SamplingParams())  # type: ignore[arg-type]
            answer = await one(client, strange)
            assert answer.finish_reason == "error" and "prompt_ids" in str(answer.error)
            for id, tokens in (("huge", (2**70,)), ("\ud800", (1,)), ("odd", (object(),))):
                with pytest.raises(ValueError, match="cannot be sent"):
                    await one(client, Request(id=id, prompt_ids=tokens, params=SamplingParams()))  # type: ignore[arg-type]
            assert (await good).token_ids == list(range(200))
            assert client.alive and client.num_in_flight == 0

    run(test())


def test_malformed_messages_are_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        async with await start() as client:
            frames = [b"", b"\xc1", b"hello", msgspec.msgpack.encode({"type": "abort", "id": 3}), b"\x91" * 100_000]
            frames.append(messages.encode(messages.Start("a:b", CONFIG, 20)))
            frames.append(messages.encode(messages.Ended("not yours to say")))
            for frame in frames:
                client._outbox.send(frame)
                client._num_sent += 1
            assert (await one(client, request("a", 0, 3))).token_ids == [0, 1, 2]
        logged = "\n".join(client._process.last_lines)
        assert logged.count("is dropped") == len(frames)

    run(test())


def test_stats_that_cannot_be_sent_harm_nothing() -> None:
    async def test() -> None:
        async with await start(unsendable_stats=True) as client:
            await one(client, request("a", 0, 1))
            with pytest.raises(RuntimeError, match="stats: TypeError"):
                await client.stats()
            assert (await one(client, request("b", 0, 2))).token_ids == [0, 1]

    run(test())


def test_an_engine_without_work_is_told_so() -> None:
    async def test() -> None:
        async with await start() as client:
            await one(client, request("a", 0, 3))  # a fake engine that is called idle while it works fails
            while (await client.stats())["idle"] < 2:
                await asyncio.sleep(0.25)

    run(test())


# -- ends --------------------------------------------------------------------------------------------------------------


async def in_flight(client: EngineClient, count: int = 10) -> list[asyncio.Task[Update]]:
    tasks = [asyncio.create_task(one(client, request(f"r{i}"))) for i in range(count)]
    await asyncio.sleep(0.1)
    assert client.num_in_flight == count
    return tasks


def test_worker_killed() -> None:
    async def test() -> None:
        client = await start(child=True)
        (child,) = psutil.Process(client.pid).children()
        tasks = await in_flight(client)
        os.kill(client.pid, signal.SIGKILL)
        began = time.monotonic()
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, EngineDead) and error.exit_code == -signal.SIGKILL
            assert "SIGKILL" in str(error)
        assert time.monotonic() - began < 1
        assert not client.alive and client.dead_reason == await client.wait()
        assert client.dead_reason.startswith("the engine's process was killed by SIGKILL")
        for refused in (one(client, request("new")), client.stats()):
            with pytest.raises(EngineDead):
                await refused
        await until(lambda: gone(child.pid), 1)
        await client.close()

    run(test())


def test_death_tells_exit_code_and_last_lines() -> None:
    async def test() -> None:
        client = await start()
        with pytest.raises(EngineDead, match="dying words") as caught:
            await one(client, request("a", fake_engine.DIE))
        assert caught.value.exit_code == 7 and "exit code 7" in str(caught.value)
        await client.close()

    run(test())


@pytest.mark.parametrize(
    "first, error",
    [(fake_engine.CRASH, "RuntimeError: the step failed"), (fake_engine.UNSENDABLE, "TypeError: Encoding objects")],
)
def test_a_failing_step_answers_all_and_ends(first: int, error: str) -> None:
    async def test() -> None:
        client = await start(step_seconds=0.02)
        tasks = await in_flight(client)
        bad = request("bad", first, 1)  # its update would be its last
        # In this order: the other way round the engine may fail before it hears of the second.
        tasks += [asyncio.create_task(one(client, r)) for r in (request("refused", fake_engine.REFUSE), bad)]
        *answers, refused, failed = await asyncio.gather(*tasks)
        answers.append(failed)
        for answer in answers:
            assert answer.finish_reason == "error" and str(answer.error).startswith(messages.INTERNAL + error)
        assert refused.error == "this prompt is refused"
        assert (await client.wait()).startswith(f"the engine failed: {error}")
        with pytest.raises(EngineDead, match="Traceback") as caught:
            await one(client, request("new"))
        assert caught.value.exit_code == 1
        await client.close()

    run(test())


def test_a_hanging_engine_shows() -> None:
    async def test() -> None:
        client = await start()
        assert client.hanging_for == 0
        tasks = [asyncio.create_task(one(client, r)) for r in (request("a", fake_engine.HANG), request("b"))]
        await until(lambda: client.hanging_for > 1.2, 3)
        assert client.alive and client.last_heartbeat is not None
        assert time.monotonic() - client.last_heartbeat < 1  # it lives
        with pytest.raises(TimeoutError):
            await client.stats(timeout=0.1)
        client_module.STOP_SECONDS, before = 0.3, client_module.STOP_SECONDS
        try:
            began = time.monotonic()
            await client.close(drain=True, timeout=0.2)
            assert time.monotonic() - began < 2
        finally:
            client_module.STOP_SECONDS = before
        assert [(await task).finish_reason for task in tasks] == ["abort", "abort"]

    run(test())


def test_a_stopped_process_shows() -> None:
    async def test() -> None:
        client = await start()
        os.kill(client.pid, signal.SIGSTOP)
        await until(lambda: client.hanging_for > 1.5, 4)
        assert client.alive
        os.kill(client.pid, signal.SIGCONT)
        await until(lambda: client.hanging_for == 0, 2)
        await client.close()

    run(test())


def test_a_busy_engine_does_not_seem_to_hang() -> None:
    async def test() -> None:
        async with await start(step_seconds=0.05) as client:
            task = asyncio.create_task(one(client, request("a", 0, 25)))
            worst = 0.0
            while not task.done():
                worst = max(worst, client.hanging_for)
                await asyncio.sleep(0.01)
            assert worst < 0.4  # far below the time between heart-beats and a step

    run(test())


def test_what_waits_for_a_hanging_engine_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_UNREAD", 20)
    monkeypatch.setattr(client_module, "STOP_SECONDS", 0.2)

    async def test() -> None:
        client = await start()
        tasks = [asyncio.create_task(one(client, request("hang", fake_engine.HANG)))]
        await until(lambda: client.hanging_for > 0, 3)
        for i in range(15):  # each leaves an Add and an Abort behind
            tasks.append(asyncio.create_task(one(client, request(f"r{i}"))))
            await asyncio.sleep(0)
            tasks[-1].cancel()
        busy = [isinstance(e, EngineBusy) for e in await asyncio.gather(*tasks[1:], return_exceptions=True)]
        assert any(busy) and not all(busy)
        with pytest.raises(EngineBusy):
            await client.stats()
        assert client._num_sent - client._num_read <= 21
        await client.close()
        assert (await tasks[0]).finish_reason == "abort"

    run(test())


def test_sigterm_and_sigint() -> None:
    async def test() -> None:
        client = await start()
        tasks = await in_flight(client)
        os.kill(client.pid, signal.SIGINT)
        await asyncio.sleep(0.2)
        assert client.alive and not any(task.done() for task in tasks)
        os.kill(client.pid, signal.SIGTERM)
        for answer in await asyncio.gather(*tasks):
            assert answer.finish_reason == "abort" and answer.token_ids == list(range(len(answer.token_ids)))
        await client.wait()
        assert client._error().exit_code == 0
        assert "closed with 0 running" in client._process.last_lines
        await client.close()

    run(test())


def test_close_drains() -> None:
    async def test() -> None:
        client = await start(step_seconds=0.01)
        task = asyncio.create_task(one(client, request("a", 0, 50)))
        await asyncio.sleep(0.05)
        closing = asyncio.create_task(client.close(drain=True, timeout=10))
        await asyncio.sleep(0.05)
        assert client.alive and (await client.stats())["running"] == 1  # metrics go on
        with pytest.raises(EngineDead, match="closing"):
            await one(client, request("new"))
        answer = await task
        assert (answer.finish_reason, len(answer.token_ids)) == ("length", 50)
        await closing
        assert gone(client.pid)
        await client.close()  # again: nothing

    run(test())


@pytest.mark.parametrize("drain", [True, False])
def test_close_aborts_what_is_left(drain: bool) -> None:
    async def test() -> None:
        client = await start()
        tasks = await in_flight(client)
        began = time.monotonic()
        await client.close(drain=drain, timeout=0.5)
        assert (time.monotonic() - began >= 0.5) == drain
        assert {(await task).finish_reason for task in tasks} == {"abort"}
        assert "closed with 0 running" in client._process.last_lines

    run(test())


# -- beginnings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, engine, reason, code",
    [
        ({"fail": "no such\nmodel"}, ENGINE, "the engine failed: no such model", 1),
        ({"die": 9}, ENGINE, "the engine's process ended with exit code 9", 9),
        ({}, "tests.engine.nowhere:make", "the engine failed: ModuleNotFoundError", 1),
        ({}, "tests.engine.fake_engine:nothing", "the engine failed: AttributeError", 1),
    ],
)
def test_failing_start(options: dict[str, Any], engine: str, reason: str, code: int) -> None:
    async def test() -> None:
        began = time.monotonic()
        with pytest.raises(EngineDead) as caught:
            await EngineClient.start(fake_engine.config(**options), engine, timeout=15)
        assert caught.value.reason.startswith(reason) and caught.value.exit_code == code
        assert "\n" not in caught.value.reason
        assert time.monotonic() - began < 10
        if "fail" in options:
            assert "Traceback" not in str(caught.value)  # the user's mistake, not ours

    run(test())


def test_start_takes_too_long_or_is_cancelled() -> None:
    async def test() -> None:
        with pytest.raises(EngineDead, match="not ready within 1 s; it was (starting|importing|loading)"):
            await EngineClient.start(fake_engine.config(load_seconds=60), ENGINE, timeout=1)
        task = asyncio.create_task(start(load_seconds=60))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(test())


@pytest.mark.parametrize("swallows", [False, True])
def test_sigterm_while_loading(swallows: bool) -> None:
    async def test() -> None:
        loading = asyncio.Event()
        task = asyncio.create_task(
            EngineClient.start(
                fake_engine.config(load_seconds=60, swallows_exit=swallows),
                ENGINE,
                timeout=60,  # busy machines import slowly
                on_stage=lambda stage: loading.set() if stage.done == 2 else None,
            )
        )
        await loading.wait()
        (worker,) = (child for child in psutil.Process().children() if "anabranch.engine.worker" in child.cmdline())
        worker.terminate()
        with pytest.raises(EngineDead, match="SIGTERM while starting") as caught:
            await task
        assert caught.value.exit_code == 143

    run(test(), 90)


def test_sockets_are_private_and_fit_a_long_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = process.socket_folder()
    assert str(folder).startswith(tempfile.gettempdir()) and folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    with tempfile.TemporaryDirectory() as short:
        long = Path(short, "x" * 100)
        long.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(long))

        async def test() -> None:
            async with await start() as client:
                assert (await one(client, request("a", 0, 2))).token_ids == [0, 1]
                assert not client._process.folder.exists()  # all is connected: the names are gone already

        run(test())
        assert list(long.iterdir()) == []
        monkeypatch.undo()


PARENT = """
import asyncio, subprocess, sys
from anabranch.engine.client import EngineClient
from tests.engine.test_worker import ENGINE, fake_engine, request

async def main():
    client = await EngineClient.start(fake_engine.config(no_parent_signal={quiet}), ENGINE, timeout=10)
    stdin = client._process.popen.stdin.fileno()
    sibling = subprocess.Popen(["sleep", "20"], stdout=subprocess.DEVNULL, pass_fds=[stdin] if {shared} else [])
    await anext(client.generate(request("a", 0)))
    stream = asyncio.create_task(anext(client.generate(request("b", {first}, 2))))
    await asyncio.sleep(0.1)
    print(client.pid, sibling.pid, client._process.folder, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_step_that_waits_for_a_rank_that_has_ended() -> None:
    async def test() -> None:
        client = await start()
        with pytest.raises(
            EngineDead, match="the engine failed: RuntimeError: rank 1 of the model was ended by SIGKILL"
        ):
            await one(client, request("a", fake_engine.LOST))
        assert "rank 1 of the model was ended by SIGKILL" in await client.wait() and gone(client.pid)

    run(test(), 10)


@pytest.mark.parametrize(
    "quiet, shared, first",
    [(False, False, 0), (False, False, fake_engine.HANG_HARD), (True, False, 0), (True, True, fake_engine.HANG)],
    ids=["serving", "no-python-runs", "no-kernel-signal", "stdin-is-shared"],
)
def test_parent_killed(quiet: bool, shared: bool, first: int) -> None:
    """The kernel's signal, the pipe and the parent's pid: each is the only one that works in some case."""
    if first == fake_engine.HANG_HARD and sys.platform != "linux":
        pytest.skip("only Linux ends a process that runs no Python")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-c", PARENT.format(quiet=quiet, shared=shared, first=first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as parent:
        try:
            assert parent.stdout is not None
            pid, sibling, folder = parent.stdout.readline().split()
            assert not gone(int(pid))
        finally:
            parent.kill()
            parent.wait(10)
    try:
        asyncio.run(until(lambda: gone(int(pid)), 2))
    finally:
        os.kill(int(sibling), signal.SIGKILL)
    assert not Path(folder).exists()


@pytest.mark.parametrize("end", ["stdin", "wrong parent"])
def test_worker_ends_without_its_parent(end: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        parent = os.getpid() if end == "stdin" else 1
        command = [sys.executable, "-m", "anabranch.engine.worker", folder, str(parent)]
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        with subprocess.Popen(command, stdin=subprocess.PIPE, env=env) as worker:
            assert worker.stdin is not None
            if end == "stdin":
                with pytest.raises(subprocess.TimeoutExpired):
                    worker.wait(1)
                worker.stdin.close()
            assert worker.wait(5) == 1
            assert (os.listdir(folder) == []) == (end != "stdin")  # an orphan does not even begin


# -- the real engine ---------------------------------------------------------------------------------------------------


def test_the_real_engine_says_the_same_in_its_own_process(tmp_path: Path) -> None:
    from anabranch.engine.engine import make_engine
    from tests.models import tiny

    case = tiny.CASES[0]
    config = EngineConfig(model=str(tiny.save(case, tmp_path / "model")), dtype="float32", num_pages=64)
    prompt = tiny.prompt(case)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    asked = [Request(id=f"r{i}", prompt_ids=tuple(prompt[i:] + prompt[:i]), params=greedy) for i in range(4)]

    engine = make_engine(config)
    expected: dict[str, Update] = {}
    for request in asked:
        engine.add(request)
    while engine.has_work:
        for update in engine.step():
            merge(expected.setdefault(update.id, Update(id=update.id)), update)
    engine.close()

    async def test() -> None:
        async with await EngineClient.start(config, timeout=60) as client:
            assert client.ready_stats["max_model_len"] == engine.config.max_model_len
            assert {"import", "config", "weights", "ready"} <= set(client.ready_stats["startup"]["seconds"])
            bad = Request(id="bad", prompt_ids=(-1,), params=greedy)
            *answers, refused = await asyncio.gather(*(one(client, request) for request in [*asked, bad]))
            assert refused.finish_reason == "error" and "-1" in str(refused.error)
            for request, answer in zip(asked, answers, strict=True):
                assert len(answer.token_ids) == 12 and answer.finish_reason == "length"
                assert answer.token_ids == expected[request.id].token_ids
                for a, b in zip(answer.logprobs, expected[request.id].logprobs, strict=True):
                    assert a.token_id == b.token_id and a.logprob == pytest.approx(b.logprob, abs=1e-4)
                assert answer.prompt_logprobs is not None and len(answer.prompt_logprobs) == len(prompt)
            stats = await client.stats()
            assert (stats["running"], stats["waiting"]) == (0, 0)

    run(test(), seconds=90)
