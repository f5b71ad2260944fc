"""Real local clusters of Ray with replicas of the bundled model. Each takes 20 s to start: few tests that do much."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import psutil
import pytest

pytest.importorskip("ray")

from tests.server.serving import NO_TLS, QUICK, Running, gone, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BEGINNINGS = [
    f"Story {number}: once upon a time there was a {animal} who lived in a deep forest, far away from all the others."
    for number, animal in enumerate(("fox", "bear", "cat", "dog", "bird", "rabbit", "mouse", "frog"))
]
ENDINGS = ["One day", "But then", "At night", "Every morning", "Suddenly"]
ENDED = "its replica has ended after"
PROMPTS = [f"{beginning} {ending}" for ending in ENDINGS for beginning in BEGINNINGS] * 5


def replicas(pid: int) -> list[int]:
    """The processes of replicas below this one."""
    found = psutil.Process(pid).children(recursive=True)
    return [one.pid for one in found if not gone(one.pid) and one.cmdline()[:1] and "ServeReplica" in one.cmdline()[0]]


def ask_all(server: Running, prompts: list[str], **options: object) -> list[str]:
    with ThreadPoolExecutor(16) as threads:
        return list(threads.map(lambda prompt: server.complete(prompt, **options), prompts))


def streamed(server: Running, body: dict[str, object]) -> Iterator[str]:
    stream = httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=QUICK, verify=NO_TLS)
    with stream as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield line.removeprefix("data: ")


def by_replica(server: Running, metric: str) -> list[float]:
    found = re.findall(rf'anabranch_{metric}{{.*replica="\d+"}} (.+)', server.get("/metrics").text)
    return list(map(float, found))


def test_two_replicas() -> None:
    with running(None) as single:
        expected = ask_all(single, PROMPTS, max_tokens=16)
        long = single.complete(PROMPTS[0], max_tokens=400)
    with running(None, "--replicas", "2") as server:
        assert len(replicas(server.process.pid)) == 2
        children = psutil.Process(server.process.pid).children(recursive=True)
        check_prefixes(server)
        assert ask_all(server, PROMPTS, max_tokens=16) == expected
        assert len(PROMPTS) == 200 and sum(by_replica(server, "request_success_total")) == 200 + len(BEGINNINGS) * 3
        check_streams(server, long)
        for victim in (0, 1):
            check_kill(server, long, victim)
        assert ask_all(server, PROMPTS[:40], max_tokens=16) == expected[:40]
        server.until_idle()
        assert server.end(signal.SIGINT) == 0, server.log()[-6000:]
        server.until(lambda: all(gone(child.pid) for child in children), "a process is left")


def check_prefixes(server: Running) -> None:
    """A second and a third prompt with the same beginning find it in the cache."""
    for ending in ENDINGS[:3]:
        for beginning in BEGINNINGS:
            body = {"prompt": f"{beginning} {ending}", "max_tokens": 1}
            usage = server.post("/v1/completions", body).json()["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert (cached > 0) == (ending != ENDINGS[0]), (body, usage)
    queries = by_replica(server, "prefix_cache_queries_total")
    assert len(queries) == 2 and min(queries) > 0.3 * sum(queries)


def check_streams(server: Running, long: str) -> None:
    body: dict[str, object] = {"prompt": PROMPTS[0], "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    chunks = list(streamed(server, body | {"stream": True}))
    assert chunks.pop() == "[DONE]" and len(chunks) > 10
    assert "".join(choice["text"] for chunk in chunks for choice in json.loads(chunk)["choices"]) == long
    left = streamed(server, body | {"stream": True, "max_tokens": 900, "n": 4})
    next(left)
    server.until(lambda: server.stats()["running"] > 0)
    left.close()
    server.until_idle()
    aborted = r'anabranch_request_success_total{finished_reason="abort",.*} (.+)'
    assert sum(map(float, re.findall(aborted, server.get("/metrics").text))) == 4


def check_kill(server: Running, long: str, victim: int) -> None:
    """Kill a replica (0), or the engine of one (1), while it answers: its requests are answered elsewhere."""
    pid, num_ended = replicas(server.process.pid)[0], server.log().count(ENDED)
    with ThreadPoolExecutor(12) as threads:
        answers = [threads.submit(server.complete, PROMPTS[0], max_tokens=400) for _ in range(12)]
        server.until(lambda: min(by_replica(server, "num_requests_running")) > 0)
        os.kill(psutil.Process(pid).children()[0].pid if victim else pid, signal.SIGKILL)
        assert [answer.result() for answer in answers] == [long] * 12
    assert server.log().count(ENDED) > num_ended

    def is_back() -> bool:
        now = replicas(server.process.pid)
        return len(now) == 2 and pid not in now and len(by_replica(server, "num_requests_running")) == 2

    server.until(is_back, "the replica does not come back")


@contextmanager
def cluster() -> Iterator[tuple[str, psutil.Process]]:
    """The address of a cluster of a process of its own, and the process."""
    code = "import ray, time; context = ray.init('local', num_cpus=3, include_dashboard=False, "
    code += "object_store_memory=100 << 20); print(context.address_info['gcs_address'], flush=True); time.sleep(1000)"
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), psutil.Process(process.pid)
        finally:
            children = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            psutil.wait_procs(children, QUICK)


SOON = """\
import functools
from anabranch.replicas import client
client.SCALE_SECONDS = 2.0
client.AutoscalingConfig = functools.partial(client.AutoscalingConfig, downscale_delay_s=2.0)
"""


def check_fewer(server: Running, head: psutil.Process) -> None:
    """With less to do, one replica of two is ended, while each has a request: it finishes that first."""
    fewer, num_ended = threading.Event(), server.log().count(ENDED)

    def ask() -> list[str]:
        answers = []
        while not fewer.is_set():
            answers.append(server.complete(PROMPTS[0], max_tokens=400))
        return answers

    with ThreadPoolExecutor(2) as threads:
        asking = [threads.submit(ask) for _ in range(2)]
        try:
            server.until(lambda: len(by_replica(server, "num_requests_running")) == 1, "both replicas are left")
        finally:
            fewer.set()
        answers = [answer for one in asking for answer in one.result()]
    assert len(set(answers)) == 1 and server.log().count(ENDED) == num_ended  # none was sent to another
    server.until(lambda: len(replicas(head.pid)) == 1, "the replica does not end")


def check_none(server: Running, head: psutil.Process) -> None:
    """The only replica is killed: its request waits for the next one, new ones are refused until it is there."""
    expected = server.complete(PROMPTS[0], max_tokens=400)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(server.complete, PROMPTS[0], max_tokens=400)
        server.until(lambda: sum(by_replica(server, "num_requests_running")) == 1)
        os.kill(replicas(head.pid)[0], signal.SIGKILL)
        server.until(lambda: server.get("/health").status_code == 503, "still healthy")
        refused = server.post("/v1/completions", {"prompt": "A river", "max_tokens": 1})
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert "there is no replica at the moment" in refused.json()["error"]["message"]
        assert answer.result() == expected
    server.until(lambda: server.get("/health").status_code == 200, "not healthy again")
    assert server.complete(PROMPTS[0], max_tokens=400) == expected


def test_a_cluster_that_runs_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with cluster() as (address, head):
        flags = ("--replicas", "1", "--max-replicas", "2", "--max-num-seqs", "8", "--ray-address", address)
        with running(None, *flags, "--routing", "load", before=SOON) as server:
            assert len(replicas(head.pid)) == 1
            scaled = threading.Event()

            def ask() -> set[str]:
                answers = set()
                while not scaled.is_set():
                    answers.add(server.complete(PROMPTS[0], max_tokens=32))
                return answers

            with ThreadPoolExecutor(6) as threads:  # more than one replica is for: another is started
                asking = [threads.submit(ask) for _ in range(6)]
                try:
                    server.until(lambda: len(by_replica(server, "num_requests_running")) == 2, "no second replica")
                finally:
                    scaled.set()
                assert len(set.union(*(answers.result() for answers in asking))) == 1
            check_fewer(server, head)
            check_none(server, head)
            assert server.end() == 0
            server.until(lambda: not replicas(head.pid), "a replica is left")
        with running(None, "--replicas", "1", "--ray-address", address) as server:
            server.process.kill()  # it cannot end its replicas: they notice
            end = time.monotonic() + QUICK
            while replicas(head.pid):
                assert time.monotonic() < end, server.log()
                time.sleep(0.5)
