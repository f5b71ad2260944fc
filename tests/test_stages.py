"""The table of a start: seconds add up, inner stages are not counted twice, what nobody asked for costs nothing."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from anabranch import stages as module
from anabranch.llm import LLM
from anabranch.stages import Stages, process_start, stage
from tools import tiny_model


class Clock:
    """A perf_counter that goes when it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module.time, "perf_counter", clock.perf_counter)
    return clock


def test_an_inner_stage_stops_the_outer_ones_clock(clock: Clock) -> None:
    begun: list[str] = []
    stages = Stages(on_begin=begun.append)
    clock.now += 1
    with stages.shared():
        with stage("weights"):
            clock.now += 2
            module.count(3_000_000_000)
            with stage("import"):
                clock.now += 4
                module.count(7)
            clock.now += 8
        with stage("weights"):
            clock.now += 16
            module.count(10_000_000_000)
    clock.now += 32
    stages.finish()
    stages.check()
    assert begun == ["weights", "import", "weights"]
    assert stages.as_dict() == {
        "seconds": {"import": 4.0, "weights": 26.0, "other": 33.0, "ready": 63.0},
        "other_after": {"start": 1.0, "weights": 32.0},
        "bytes": {"weights": 13_000_000_000, "import": 7},
        "bytes_per_second": {"weights": 500_000_000, "import": 2},
    }
    assert stages.table().splitlines() == [
        "import       4.00 s   0.00 GB, 0.0 GB/s",
        "weights     26.00 s   13.00 GB, 0.5 GB/s",
        "other       33.00 s",
        "ready       63.00 s",
    ]


def test_a_stage_that_fails_ends(clock: Clock) -> None:
    stages = Stages()
    with pytest.raises(ZeroDivisionError), stages("weights"):
        clock.now += 5
        raise ZeroDivisionError
    clock.now += 1
    stages.finish()
    stages.check()
    assert stages.seconds == {"weights": 5.0} and stages.ready == 6.0


def test_nothing_is_kept_where_nobody_listens() -> None:
    with stage("weights"):
        module.count(5)
    stages = Stages()
    with stages.shared():
        pass
    with stage("weights"):
        module.count(5)
    assert not stages.seconds and not stages.num_bytes


def test_a_process_began_before_its_first_line() -> None:
    code = "import time; time.sleep(0.5); from anabranch.stages import *; print(time.perf_counter() - process_start())"
    environment = {**os.environ, "PYTHONPATH": str(Path(module.__file__).parents[1])}
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    whole = time.perf_counter() - began
    if sys.platform == "linux":
        assert 0.48 <= float(done.stdout) <= whole + 0.05
    assert process_start() < time.perf_counter()


def test_an_llm_tells_where_its_start_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model.write(tmp_path / "tiny")
    with LLM(str(tmp_path / "tiny"), max_num_seqs=1, show_progress=True, stages=Stages.of_process()) as llm:
        llm.stages.check()
        found = llm.stats()["startup"]
    seconds = found["seconds"]
    assert {"import", "config", "weights", "other", "ready"} <= set(seconds)
    assert seconds["ready"] >= seconds["weights"] > 0
    assert found["bytes"]["weights"] == sum(parameter.nbytes for parameter in llm.engine.runner.model.parameters())
    assert "\nweights " in capsys.readouterr().err
