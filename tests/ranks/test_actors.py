"""Ranks as actors of a real Ray cluster with two nodes, which are raylets on this machine, on loopback addresses: Ray
takes 127.0.0.1 for the address of the network card."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from anabranch.llm import LLM, SamplingParams
from tests.ranks.test_nodes import free_port

pytest.importorskip("ray")
pytest.importorskip("uvicorn")
pytestmark = pytest.mark.slow

CLUSTER = """
import sys
from ray.cluster_utils import Cluster
head = {"node_ip_address": "127.0.0.2", "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **head})
cluster.add_node(num_cpus=1, node_ip_address="127.0.0.3")
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as cluster:
        assert cluster.stdout is not None and cluster.stdin is not None
        yield cluster.stdout.readline().strip()
        cluster.stdin.close()


def serve(address: str, port: int, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "anabranch.cli.main", "serve", "--dtype", "float32", "--nodes", "2"]
    command += ["--ray-address", address, "--port", str(port), *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def answer(server: subprocess.Popen[str], port: int) -> str:
    body = json.dumps({"prompt": "Once", "max_tokens": 8, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    deadline = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30) as found:
                text: str = json.load(found)["choices"][0]["text"]
                return text
        except OSError as error:
            assert server.poll() is None and time.monotonic() < deadline, error
            time.sleep(0.3)


@pytest.mark.parametrize(
    "options",
    [["--tensor-parallel-size", "2"], ["--data-parallel-size", "2", "--expert-parallel"]],
    ids=["tensor", "data"],
)
def test_two_nodes_of_a_cluster_serve(address: str, options: list[str]) -> None:
    """The answer is that of one process; the ranks end with the server."""
    psutil = pytest.importorskip("psutil")
    with LLM(dtype="float32") as llm:
        (expected,) = llm.generate(["Once"], SamplingParams(temperature=0, max_tokens=8))
    port = free_port()
    server = serve(address, port, *options)
    try:
        assert answer(server, port) == expected.text
        found = ranks(psutil)
        assert len(found) == 1, "one was started by an actor, the other is the server's engine"
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=30)
        assert server.returncode == 0
    finally:
        server.kill()
        server.communicate()
    deadline = time.monotonic() + 10
    while any(map(psutil.pid_exists, found)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_rank_of_an_actor_that_ends_is_named(address: str) -> None:
    psutil = pytest.importorskip("psutil")
    port = free_port()
    server = serve(address, port, "--tensor-parallel-size", "2")
    try:
        answer(server, port)
        began = time.monotonic()
        os.kill(ranks(psutil)[0], signal.SIGKILL)
        _, error = server.communicate(timeout=20)
        assert time.monotonic() - began < 15 and server.returncode == 1
        assert "rank 1 of the model failed: its connection has ended" in error
    finally:
        server.kill()
        server.communicate()


def ranks(psutil: Any) -> list[int]:
    """Processes that actors have started."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        parents = process.parents() if "spawn_main" in " ".join(process.info["cmdline"] or []) else []
        if parents and "RankActor" in " ".join(parents[0].cmdline()):
            found.append(process.pid)
    return found


def test_a_cluster_without_room_is_refused(address: str) -> None:
    """Sooner than a minute, which a cluster may take to start a node."""
    options = ["serve", "--nodes", "2", "--ray-address", address, "--tensor-parallel-size", "4"]
    imports = "import sys; from anabranch.cli.main import main; from anabranch.ranks import actors"
    code = f"{imports}; actors.PLACE_SECONDS = 3; sys.exit(main(sys.argv[1:]))"
    server = subprocess.run([sys.executable, "-c", code, *options], capture_output=True, text=True, timeout=120)
    assert server.returncode == 1 and "have not had 2 free CPUs each within 3 s" in server.stderr
