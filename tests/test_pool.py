"""tests/pool.py: each test runs once, and no failure is lost."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.pool import FIRST

TESTS = """
import os, pathlib, pytest

FOLDER = pathlib.Path(__file__).parent


@pytest.fixture(scope="module")
def made():
    yield 7


@pytest.mark.parametrize("n", range(12))
def test_once(n, made):
    with open(FOLDER / f"{n}.ran", "x"):
        assert made == 7


def test_skipped():
    pytest.skip("not here")
"""

ENVIRONMENT = os.environ | {"PYTHONPATH": "src", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # some take seconds to import


def pool(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_shared.py").write_text(text)
    command = [sys.executable, "-m", "tests.pool", "3", "--rootdir", str(folder), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)


def test_each_runs_once(tmp_path: Path) -> None:
    done = pool(tmp_path, TESTS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed, 12 passed, 1 skipped" in done.stdout
    assert len(list(tmp_path.glob("*.ran"))) == 12


def test_failures_are_reported(tmp_path: Path) -> None:
    broken = TESTS + "\n\ndef test_wrong():\n    assert 1 == 2, 'arithmetic'\n"
    done = pool(tmp_path, broken + "\n\ndef test_crash():\n    os._exit(3)\n")
    assert done.returncode == 1
    assert "test_wrong" in done.stdout and "arithmetic" in done.stdout
    assert "test_crash\nits process ended before it did" in done.stdout
    assert "a process ended with 3" in done.stdout and "1 failed, 12 passed, 1 skipped, 1 lost" in done.stdout


def test_long_ones_begin_first_and_progress_names_those_that_run(tmp_path: Path) -> None:
    """One process, which would find test_a first."""
    assert all(Path(path).exists() for path in FIRST)
    for path, text in {
        "tests/bench/test_a.py": "import time\n\n\ndef test_a():\n    time.sleep(1.5)\n",
        "tests/engine/test_z.py": "def test_z():\n    assert False\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    often = "import sys; from tests import pool; pool.PROGRESS_SECONDS = 0.2; sys.exit(pool.main())"
    command = [sys.executable, "-c", often, "1", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 1, done.stdout + done.stderr
    assert " s: 2 of 2 tests begun, 1 ended, 1 failed; running: test_a.py::test_a " in done.stdout, done.stdout


def test_no_process_outlives_the_pool(tmp_path: Path) -> None:
    (tmp_path / "test_long.py").write_text(
        "import os, pathlib, pytest, time\n\n\n@pytest.mark.parametrize('n', range(2))\ndef test_long(n):\n"
        "    (pathlib.Path(__file__).parent / f'{os.getpid()}.begun').touch()\n    time.sleep(300)\n"
    )
    command = [sys.executable, "-m", "tests.pool", "2", "--rootdir", str(tmp_path), str(tmp_path)]
    pool = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    while len(begun := list(tmp_path.glob("*.begun"))) < 2:
        assert pool.poll() is None
        time.sleep(0.1)
    pool.terminate()
    assert pool.wait(60) == 143
    for path in begun:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.stem), 0)


def test_a_file_that_cannot_be_read_is_a_failure(tmp_path: Path) -> None:
    done = pool(tmp_path, "import nothing_of_that_name\n")
    assert done.returncode == 1 and "nothing_of_that_name" in done.stdout
