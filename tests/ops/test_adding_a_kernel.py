"""docs/adding_a_kernel.md to the letter: its file and its commands, in a copy of the sources."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding_a_kernel.md").read_text()


@pytest.mark.slow
def test_the_page_works(tmp_path: Path) -> None:
    without = shutil.ignore_patterns("__pycache__", "*.safetensors")
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=without)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    ((name, code),) = re.findall(r"^\*\*(src/.+?)\*\*\n\n```python\n(.*?)^```$", PAGE, re.M | re.S)
    assert not (tmp_path / name).exists()
    (tmp_path / name).write_text(code)
    folder = tmp_path / "bin"
    folder.mkdir()
    for command, module in (("anabranch", "anabranch"), ("pytest", "pytest")):
        (folder / command).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        (folder / command).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(tmp_path / "src"),
        "ANABRANCH_PLATFORM": "cpu",
    }
    said = []
    for commands in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S):
        done = subprocess.run(
            ["/bin/sh", "-ec", commands], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said.append(done.stdout)
    _, doctor, judged = said
    bound, alone = (line.split(maxsplit=1)[1] for line in doctor.splitlines())
    assert bound.endswith("torch if it accepts → reference") and alone == "reference"
    assert re.search(r"\b[1-9]\d* passed", judged) and "failed" not in judged
