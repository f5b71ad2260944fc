"""A rank that ends or hangs ends all within ten seconds, and is named, whatever they are doing; nothing is left."""

# ruff: noqa: E402  (importorskip comes first: a machine without the server's packages skips this file)

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("msgspec")
pytest.importorskip("zmq")
psutil = pytest.importorskip("psutil")
pytest.importorskip("httpx")

from anabranch import processes
from anabranch.config import EngineConfig
from anabranch.engine.client import EngineClient, EngineDead
from anabranch.llm import LLM
from anabranch.parallel.group import Presence, TorchGroup
from anabranch.processes import DOUBT
from anabranch.ranks.runner import RanksRunner
from anabranch.ranks.watch import HANG_SECONDS, START_SECONDS, Beat, Follower, Pulse, Watch, is_compiling
from anabranch.request import Request
from tests.models import tiny
from tests.parallel.ranks import forked  # noqa: F401
from tests.ranks.ending import GREEDY, PROMPTS, SAID, SECONDS, fails_soon
from tests.server.serving import gone, running

pytestmark = pytest.mark.usefixtures("forked")  # those of test_an_engine_of_a_server are processes of their own


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (case,) = (case for case in tiny.CASES if case.name == "qwen3_moe_published")
    return tiny.save(case, tmp_path_factory.mktemp("ranks") / "model")


@pytest.fixture
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process and no temporary file of ours, after a while."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    deadline = time.monotonic() + 5
    while left := [*followers_of(os.getpid()), *tmp_path.glob("anabranch-*")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def followers_of(pid: int) -> list[int]:
    """Processes of ranks among those that a process has started, in the order of ranks."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE and is_rank(process):
                found.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return sorted(found)


def is_rank(process: Any) -> bool:
    """A process of its own, or the fork of one that is there for that."""
    command = process.cmdline()
    return any("spawn_main" in word for word in command) or (
        any("forkserver" in word for word in command) and process.parent().cmdline() == command
    )


BOTH = [signal.SIGKILL, signal.SIGSTOP]
SAID_SECONDS = 2.0
"""For the driver to tell everybody that it is warm, and will not be silent for 60 s."""


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(
    "sent, generating",
    [
        pytest.param(signal.SIGSTOP, True, marks=pytest.mark.slow),
        (signal.SIGKILL, True),
        pytest.param(signal.SIGKILL, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, False, marks=pytest.mark.slow),
    ],
)
def test_a_follower_of_two(folder: Path, sent: signal.Signals, generating: bool) -> None:
    with LLM(str(folder), dtype="float32", tensor_parallel_size=2) as llm:
        assert followers_of(os.getpid()) == [follower.process.pid for follower in llm.engine.runner.followers]  # type: ignore[attr-defined]
        fails_soon(llm, sent, 1, generating)


class DeviceSum:
    """A OneShot whose sums, of which each waits twice, do not notice that a rank is gone: as kernels on a device. The
    first sends a signal to the rank."""

    def __init__(self, group: dist.ProcessGroup, pid: int, sent: signal.Signals) -> None:
        self.group, self.pid, self.sent = group, pid, sent
        self.released, self.num_released = threading.Semaphore(0), 0

    def takes(self, x: torch.Tensor) -> bool:
        return True

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.pid:
            os.kill(self.pid, self.sent)
            self.pid = 0
        try:
            dist.all_reduce(x, group=self.group)
        except RuntimeError:
            assert all(self.released.acquire(timeout=2 * SECONDS) for _ in range(2)), "the device waits for ever"
            self.num_released += 1
        return x

    def release(self) -> bool:
        self.released.release()
        return self.num_released > 1


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize("sent", BOTH)
def test_sums_on_a_device_are_released(folder: Path, sent: signal.Signals) -> None:
    with LLM(str(folder), dtype="float32", tensor_parallel_size=2) as llm:
        runner = llm.engine.runner
        assert isinstance(runner, RanksRunner) and isinstance(runner.model.group, TorchGroup)
        assert runner.followers[0].process is not None and runner.followers[0].process.pid is not None
        one_shot = DeviceSum(runner.model.group.group, runner.followers[0].process.pid, sent)
        runner.model.group.one_shot = one_shot
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=SAID[sent].format(1)):
            llm.generate(PROMPTS, GREEDY)
        assert time.monotonic() - began < SECONDS and one_shot.num_released > 1
    assert not runner.watch.is_alive()


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize("sent", BOTH)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_each_follower_of_four(folder: Path, rank: int, sent: signal.Signals) -> None:
    with LLM(str(folder), dtype="float32", tensor_parallel_size=4) as llm:
        fails_soon(llm, sent, rank, generating=True)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize("sent", BOTH)
@pytest.mark.parametrize("num_ranks, rank", [(2, 0), (4, 0), (2, 1)])
@pytest.mark.parametrize("generating", [False, True])
def test_an_engine_of_a_server(folder: Path, num_ranks: int, rank: int, sent: signal.Signals, generating: bool) -> None:
    ends(folder, {"tensor_parallel_size": num_ranks}, rank, sent, generating)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(
    "sizes, rank, sent, generating",
    [
        pytest.param((2, 1), 0, signal.SIGKILL, True, id="first of two"),
        pytest.param((2, 1), 0, signal.SIGKILL, False, id="first of two, idle"),
        pytest.param((2, 2), 0, signal.SIGKILL, True, id="first of two engines of two"),
        pytest.param((2, 1), 1, signal.SIGKILL, True, id="second of two"),
        pytest.param((2, 1), 0, signal.SIGSTOP, True, id="first of two, stopped"),
    ],
)
def test_ranks_of_a_server_with_requests_of_their_own(
    folder: Path, sizes: tuple[int, int], rank: int, sent: signal.Signals, generating: bool
) -> None:
    names = ("data_parallel_size", "tensor_parallel_size")
    ends(folder, dict(zip(names, sizes, strict=True)) | {"expert_parallel": True}, rank, sent, generating)


def ends(folder: Path, options: dict[str, Any], rank: int, sent: signal.Signals, generating: bool) -> None:
    """Of a server's engine, one rank is ended or stopped: then all end, and requests are told which it was."""

    async def test() -> None:
        config = EngineConfig(model=str(folder), dtype="float32", **options)
        num_ranks = config.num_ranks
        client = await EngineClient.start(config, timeout=60)
        pids = followers_of(client.pid)
        assert len(pids) == num_ranks - 1

        async def generate(who: str) -> str:
            """What it is told at the end."""
            try:
                for number in range(10_000):
                    request = Request(id=f"{who}-{number}", prompt_ids=tuple(PROMPTS[1]), params=GREEDY)
                    async for update in client.generate(request):
                        if update.error:
                            return update.error
            except EngineDead as error:
                return error.reason
            return ""

        answers = [asyncio.create_task(generate(who)) for who in ("one", "other")] if generating else []
        await asyncio.sleep(0.5 if rank else SAID_SECONDS)
        began = time.monotonic()
        os.kill([client.pid, *pids][rank], sent)
        reason = await asyncio.wait_for(client.wait(), SECONDS)
        assert time.monotonic() - began < SECONDS
        named = rank or sent == signal.SIGSTOP
        said = SAID[sent].format(rank) if named else "the engine's process was killed by SIGKILL"
        assert said in reason
        for told in await asyncio.gather(*answers):
            assert said in told
        while any(map(psutil.pid_exists, pids)):
            assert time.monotonic() - began < SECONDS
            await asyncio.sleep(0.05)
        await client.close()

    asyncio.run(test())


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_left")
def test_an_engine_that_is_stopped_as_a_whole_goes_on(folder: Path, tmp_path: Path) -> None:
    """As by Ctrl-Z, for longer than any rank may be silent."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, str(script), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None and driver.stdin is not None
        first = driver.stdout.readline()
        every = [driver.pid, *followers_of(driver.pid)]
        for pid in every:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(HANG_SECONDS + 2)
        for pid in every:
            os.kill(pid, signal.SIGCONT)
        time.sleep(2)
        assert driver.stdin.write("\n") and driver.stdin.flush() is None
        assert len(every) == 2 and driver.stdout.readline() == first != ""
        driver.stdin.close()


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_left")
def test_a_driver_that_is_stopped_is_left_to_its_owner(folder: Path, tmp_path: Path) -> None:
    """Its followers end; when it goes on, it says why."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command, pipe = [sys.executable, str(script), str(folder)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as driver:
        assert driver.stdout is not None and driver.stdin is not None and driver.stderr is not None
        assert driver.stdout.readline()
        (rank,) = followers_of(driver.pid)
        time.sleep(SAID_SECONDS)
        began = time.monotonic()
        os.kill(driver.pid, signal.SIGSTOP)
        said = SAID[signal.SIGSTOP].format(0)
        assert driver.stderr.readline() == f"{said}: all ranks are ended\n"
        while psutil.Process(rank).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() - began < SECONDS
            time.sleep(0.05)
        assert psutil.Process(driver.pid).status() == psutil.STATUS_STOPPED
        os.kill(driver.pid, signal.SIGCONT)
        time.sleep(1)
        _, error = driver.communicate("\n", timeout=20)
        assert driver.returncode == 1 and f"RuntimeError: {said} before a step" in error.splitlines()[-1]


PROGRAM = """
import sys
from anabranch.llm import LLM, SamplingParams
if __name__ == "__main__":
    with LLM(sys.argv[1], dtype="float32", tensor_parallel_size=2) as llm:
        while True:
            print(llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=5))[0].token_ids, flush=True)
            if not sys.stdin.readline():
                break
"""


SERVE_TWO = ("--dtype", "float32", "--tensor-parallel-size", "2")


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_left")
def test_a_server_whose_driver_is_stopped_ends() -> None:
    with running(None, *SERVE_TWO) as server, ThreadPoolExecutor(1) as pool:
        family = [server.engine.pid, *followers_of(server.engine.pid)]
        assert len(family) == 2
        time.sleep(SAID_SECONDS)
        body = {"prompt": "A river", "max_tokens": 1500, "ignore_eos": True}
        answer = pool.submit(server.post, "/v1/completions", body)
        server.until(lambda: server.stats()["running"] == 1)
        began = time.monotonic()
        os.kill(family[0], signal.SIGSTOP)
        error = answer.result().json()["error"]
        assert time.monotonic() - began < SECONDS
        said = SAID[signal.SIGSTOP].format(0)
        assert error["code"] == "server_dead" and said in error["message"], error
        assert server.process.wait(SECONDS) == 1
        assert f"the engine failed: {said}; ending with exit code 1" in server.log()
        assert all(map(gone, family))


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize("whole", [True, False])
def test_a_server_that_is_stopped_itself_goes_on(whole: bool) -> None:
    """With all its processes or without them, for longer than any may be silent."""
    with running(None, *SERVE_TWO) as server:
        expected, engine = server.complete(), server.engine.pid
        pids = [server.process.pid, *([engine, *followers_of(engine)] if whole else [])]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(HANG_SECONDS + 2)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        time.sleep(DOUBT + 1)
        assert server.complete() == expected and server.engine.pid == engine


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_left")
def test_a_driver_that_computes_for_long_goes_on(folder: Path) -> None:
    async def test() -> None:
        config = EngineConfig(model=str(folder), dtype="float32", tensor_parallel_size=2)
        async with await EngineClient.start(config, "tests.ranks.ending:make_busy_engine", timeout=60) as client:
            began = time.monotonic()
            async for update in client.generate(Request(id="a", prompt_ids=(1, 2, 3), params=GREEDY)):
                last = update
            assert last.finish_reason == "length" and client.alive
            assert time.monotonic() - began > HANG_SECONDS + 2

    asyncio.run(test())


class Nap:
    """Takes long to unpickle."""

    def __reduce__(self) -> tuple[object, tuple[float]]:
        return time.sleep, (600.0,)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(
    "order, said",
    [
        ("no such order", "rank 2 of the model failed: AttributeError: .*no such order"),
        (Nap(), "rank 2 of the model hangs: 7 s behind rank 0"),
    ],
)
def test_a_rank_that_cannot_carry_out_an_order(folder: Path, order: object, said: str) -> None:
    with LLM(str(folder), dtype="float32", tensor_parallel_size=4) as llm:
        runner = llm.engine.runner
        assert isinstance(runner, RanksRunner)
        follower = runner.followers[1]
        follower.num_told += 1
        began = time.monotonic()
        follower.pipe.send_bytes(pickle.dumps((order, ())))
        runner._carried_out()
        while not runner.failure:
            assert time.monotonic() - began < SECONDS
            time.sleep(0.05)
        with pytest.raises(RuntimeError, match=said):
            llm.generate(PROMPTS, GREEDY)


class Trojan:
    """Is a tuple when it is unpickled, after a statement."""

    def __init__(self, statement: str) -> None:
        self.statement = statement

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, (f"exec({self.statement!r}, {{}}) or ()",)


IN_A_STEP = """
from anabranch.parallel.group import TorchGroup
all_reduce, calls = TorchGroup.all_reduce, []
def hang(self, x):
    calls.append(x)
    while len(calls) == 4:
        {}
    return all_reduce(self, x)
TorchGroup.all_reduce = hang
"""


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(
    "num_ranks, statement",
    [
        pytest.param(2, IN_A_STEP.format("import time; time.sleep(600)"), id="asleep in a step"),
        pytest.param(4, IN_A_STEP.format("pass"), id="in a loop, in a step"),
        pytest.param(4, "import time; time.sleep(600)", id="before a step"),
    ],
)
def test_a_rank_that_does_not_enter_a_collective(folder: Path, num_ranks: int, statement: str) -> None:
    """Its heart beats, and the others wait for it inside the collective."""
    with LLM(str(folder), dtype="float32", tensor_parallel_size=num_ranks) as llm:
        runner = llm.engine.runner
        assert isinstance(runner, RanksRunner)
        rank = num_ranks - 1
        follower = runner.followers[rank - 1]
        follower.num_told += 1
        follower.pipe.send_bytes(pickle.dumps(("expert_ranks", Trojan(statement))))
        began = time.monotonic()
        said = f"rank {rank} of the model hangs: others have waited for it for 7 s during a step"
        with pytest.raises(RuntimeError, match=said):
            llm.generate(PROMPTS, GREEDY)
        assert time.monotonic() - began < SECONDS


@pytest.mark.parametrize(
    "driver, others, rank",
    [
        (Beat(inside=True, seconds=8), [Beat(busy=True, seconds=8.5)], 1),
        (Beat(inside=True, seconds=8), [Beat(busy=True, inside=True, seconds=8), Beat(busy=True, seconds=9)], 2),
        (Beat(seconds=9), [Beat(busy=True, inside=True, seconds=8), Beat(busy=True, seconds=9)], 2),
        (Beat(inside=True, seconds=6), [Beat(busy=True, seconds=60)], 0),
        (Beat(inside=True, seconds=60), [Beat(seconds=60)], 0),
        (Beat(seconds=60), [Beat(busy=True, inside=True, seconds=60)], 0),
        (Beat(inside=True, seconds=60, longest=3), [Beat(busy=True, seconds=29)], 0),
        (Beat(inside=True, seconds=60, longest=3), [Beat(busy=True, seconds=31)], 1),
        (Beat(inside=True, seconds=50), [Beat(busy=True, seconds=50, compiling=True)], 0),
        (Beat(inside=True, seconds=70), [Beat(busy=True, seconds=70, compiling=True)], 1),
        (Beat(inside=True, seconds=50), [Beat(busy=True, seconds=50, first=True)], 0),
        (Beat(inside=True, seconds=70), [Beat(busy=True, seconds=70, first=True)], 1),
    ],
    ids=[
        "driver waits",
        "two wait for the third",
        "only a follower waits",
        "has just begun",
        "nothing to do",
        "waits for the driver",
        "long prompt",
        "longer than that",
        "compiles",
        "compiles for ever",
        "first step of its size",
        "first for ever",
    ],
)
def test_who_hangs(driver: Beat, others: list[Beat], rank: int) -> None:
    ends = multiprocessing.Pipe()
    followers = [Follower(number, None, *ends, beat=beat) for number, beat in enumerate(others, 1)]
    watch = Watch(followers)
    assert watch._hanging(time.monotonic(), driver) == "", "ranks are not warm"
    watch.warm = True
    found = watch._hanging(time.monotonic(), driver)
    assert found.startswith(f"rank {rank} of the model hangs: others have waited") if rank else not found
    watch.close()


def test_when_a_driver_is_silent() -> None:
    driver, follower = multiprocessing.Pipe()
    pulse = Pulse(follower)
    assert not pulse._is_driver_silent(1000.0), "ranks are still coming"
    driver.send(60.0)
    driver.send(7.0)
    assert not pulse._is_driver_silent(1001.0)
    assert not pulse._is_driver_silent(1008.0) and pulse._is_driver_silent(1008.1)
    driver.send(60.0)
    assert not pulse._is_driver_silent(1009.0) and not pulse._is_driver_silent(1060.0), "it compiles"
    driver.close()
    assert not pulse._is_driver_silent(1100.0), "it has ended"


def test_for_how_long_a_driver_may_be_silent() -> None:
    driver, follower = multiprocessing.Pipe()
    watch = Watch([])

    def said(own: Beat) -> float:
        watch._beat(own, [driver])
        found = float(follower.recv())
        assert processes.patience == found
        return found

    compiler: dict[str, Any] = {"__name__": "triton.compiler.compiler", "said": said}
    exec("def compile(own):\n    return said(own)", compiler)
    assert said(Beat()) == START_SECONDS
    watch.warm = True
    assert said(Beat(seconds=100)) == HANG_SECONDS
    assert compiler["compile"](Beat(seconds=2)) == START_SECONDS
    assert compiler["compile"](Beat(inside=True, seconds=2)) == HANG_SECONDS
    follower.close()
    watch._beat(Beat(), [driver])
    watch.close()
    assert processes.patience is None


def test_a_step_is_the_first_of_its_size_once() -> None:
    def compute(seconds: float) -> bool:
        ends = time.process_time() + seconds, time.monotonic() + seconds  # other threads compute too
        while time.process_time() < ends[0] or time.monotonic() < ends[1]:
            pass
        return presence.is_first(seconds)

    presence = Presence()
    assert not compute(0.02), "an order without rows"
    presence.begin(100)
    assert compute(0.02)
    assert not presence.is_first(60), "its CPU is idle"
    with presence:
        pass
    assert not compute(0.02), "it was in a collective"
    presence.begin(120)
    assert not compute(0.02) and presence.longest >= 0.02, "such a step has taken that long"
    presence.begin(3)
    assert compute(0.02)


def test_a_thread_that_compiles_is_known() -> None:
    go_on = threading.Event()
    source = "def compile(work):\n    work()"
    compiler: dict[str, Any] = {"__name__": "triton.compiler.compiler"}
    exec(source, compiler)
    for work, expected in ((lambda: compiler["compile"](go_on.wait), True), (go_on.wait, False)):
        go_on.clear()
        thread = threading.Thread(target=work)
        thread.start()
        assert thread.ident is not None
        time.sleep(0.05)
        assert is_compiling(thread.ident) == expected
        go_on.set()
        thread.join()
