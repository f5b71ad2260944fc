"""`anabranch serve` with a model that is divided among ranks of one machine, which it starts and ends."""

import psutil
import pytest

from tests.server.serving import gone, running


@pytest.mark.slow
def test_two_ranks_serve_as_one() -> None:
    with running(None, "--dtype", "float32") as server:
        expected = server.complete(max_tokens=40)
    with running(None, "--dtype", "float32", "--tensor-parallel-size", "2") as server:
        assert server.complete(max_tokens=40) == expected
        (engine,) = psutil.Process(server.process.pid).children()
        ranks = [child.pid for child in engine.children() if "spawn_main" in " ".join(child.cmdline())]
        assert len(ranks) == 1
        server.until_idle()
        assert server.end() == 0
        server.until(lambda: gone(ranks[0]), "rank 1 is left")
