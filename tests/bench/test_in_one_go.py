"""Benchmarks that run with nobody watching: what ends badly or not at all does not keep the others from running."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import in_one_go
from benchmarks.in_one_go import Step

WRITES = "{python} -c \"open('{json}', 'a').write('[1]'); print('said')\""
STEPS = [
    Step("first", 60, WRITES),
    Step("fails", 60, '{python} -c "raise SystemExit(3)"'),
    Step("slow", 1, '{python} -c "import time; time.sleep(60)"'),
    Step("last", 60, WRITES),
]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    monkeypatch.setitem(in_one_go.STEPS, "tiny", STEPS)

    def call(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["in_one_go.py", *arguments])
        in_one_go.main()
        return capsys.readouterr().out

    return call


def test_steps_end_one_by_one_and_a_second_run_goes_on(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for _ in range(2):
        said = run(str(tmp_path), "tiny")
        found = json.loads((tmp_path / "steps.json").read_text())["steps"]
        assert {name: step["ended"] for name, step in found.items()} == {
            "first": "0", "fails": "3", "slow": "too long", "last": "0",
        }  # fmt: skip
        assert (tmp_path / "first.json").read_text() == "[1]", "it ran once"
        assert (tmp_path / "last.log").read_text() == "said\n"
    assert "first" not in said and "fails" in said


def test_what_would_not_end_in_time_is_left_out(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    said = run(str(tmp_path), "tiny", "--minutes", "0.5", "--only", "first", "slow")
    assert "first                left out: 60 s" in said and "slow" in said and "last" not in said
    with pytest.raises(SystemExit):
        run(str(tmp_path), "tiny", "--only", "thirst")


def test_the_list_has_commands_that_exist(run) -> None:  # type: ignore[no-untyped-def]
    said = run("--list")
    for group in in_one_go.STEPS.values():
        for step in group:
            assert step.command in said
            words = step.command.split()
            script = next((word for word in words if word.endswith(".py") and "/" in word), None)
            assert script is None or Path(in_one_go.__file__).parents[1].joinpath(script).exists()
