"""Tests distributed over processes, without a package for it: the process that claims a test first runs it.

    PYTHONPATH=src python3 -m tests.pool 16 -m gpu tests          what follows the number is passed to pytest

On a GPU machine most of the time is compilers' time, and a kernel may take ten times as long as the next: tests are
therefore claimed one at a time, those of FIRST before others, so that no long one is left for the end. Every process
collects all of them; fixtures of a module are made anew for each test.

Every half minute a line says how many tests have begun, ended and failed, and which have been running for long. A pool
that is killed has at least printed these.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

PROGRESS_SECONDS = 30
LONG_SECONDS = 30
MAX_NAMES = 8
"""Most of the running tests that a progress line names."""
FIRST = (
    "tests/models/test_gpu.py",  # whole models and engines, which compile most
    "tests/engine/",
    "tests/compile/",
    "tests/bundled/",
    "tests/kernels/compiling/",
    "tests/ops/test_every_kernel.py",
)
FOLDER = "ANABRANCH_TEST_POOL"
"""The environment variable that names the folder of claims and reports to the pool's processes."""


class Member:
    """The plugin of one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.report = (folder / f"{os.getpid()}.reports").open("a", buffering=1)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: rank(item.nodeid))
        self._write(["", "collected", str(len(items))])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        from _pytest.runner import runtestprotocol

        claim = self.folder / hashlib.sha1(item.nodeid.encode()).hexdigest()
        try:
            claim.touch(exist_ok=False)
        except FileExistsError:
            return True
        claim.write_text(item.nodeid)
        begin = time.monotonic()
        runtestprotocol(item, nextitem=None)  # another process may run the next one: no fixture is kept for it
        self._write([item.nodeid, "ended", f"{time.monotonic() - begin:.1f}"])
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._write([report.nodeid, report.outcome, report.longreprtext])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write([report.nodeid, "failed", report.longreprtext])

    def _write(self, what: list[str]) -> None:
        self.report.write(json.dumps(what) + "\n")


def rank(nodeid: str) -> int:
    """Its place in the order of claims: that of its path in FIRST."""
    return next((place for place, path in enumerate(FIRST) if nodeid.startswith(path)), len(FIRST))


def pytest_configure(config: pytest.Config) -> None:
    if folder := os.environ.get(FOLDER):
        config.pluginmanager.register(Member(Path(folder)))


def main() -> int:
    if len(sys.argv) < 2 or not sys.argv[1].isdigit():
        print(__doc__, file=sys.stderr)
        return 2
    command = [sys.executable, "-m", "pytest", "-p", "tests.pool", "-p", "no:cacheprovider", "-q", *sys.argv[2:]]
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` below ends the others and reports
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join(filter(None, [".", os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", FOLDER: folder}
        logs = [Path(folder, f"{n}.log") for n in range(int(sys.argv[1]))]
        members = [
            subprocess.Popen(command, env=environment, stdout=log.open("w"), stderr=subprocess.STDOUT) for log in logs
        ]
        told: set[str] = set()
        shown = begin
        try:
            while any(member.poll() is None for member in members):
                time.sleep(0.5)
                tell_failures(folder, told)
                if time.monotonic() - shown > PROGRESS_SECONDS:
                    shown = time.monotonic()
                    print(f"{shown - begin:.0f} s: {progress(folder)}", flush=True)
        finally:  # those still running when this process has to end
            for member in members:
                member.terminate()
            for member in members:
                member.wait()
            tell_failures(folder, told)
            good = summarize(folder, [member.returncode for member in members], logs)
            print(f"{time.monotonic() - begin:.0f} s, {len(members)} processes", flush=True)
    return 0 if good else 1


def tell_failures(folder: str, told: set[str]) -> None:
    """Print those that are new."""
    for nodeid, outcome, text in reports(folder):
        if outcome == "failed" and nodeid not in told:
            told.add(nodeid)
            print(f"\n== {nodeid}\n{text}", flush=True)


def progress(folder: str) -> str:
    """Counts; and the names and ages of tests that are running, the oldest first: of those that have been for long, or
    of all once all have begun."""
    rows, now = reports(folder), time.time()
    collected = max((int(text) for _, outcome, text in rows if outcome == "collected"), default=0)
    ended = {nodeid for nodeid, outcome, _ in rows if outcome == "ended"}
    failed = {nodeid for nodeid, outcome, _ in rows if outcome == "failed"}
    begun = {path.read_text(): now - path.stat().st_mtime for path in claims(folder)}
    least = 0 if len(begun) == collected else LONG_SECONDS
    running = sorted(((age, id) for id, age in begun.items() if id not in ended and age >= least), reverse=True)
    names = ", ".join(f"{short(nodeid)} {age:.0f} s" for age, nodeid in running[:MAX_NAMES])
    more = f" and {len(running) - MAX_NAMES} more" if len(running) > MAX_NAMES else ""
    counts = f"{len(begun)} of {collected} tests begun, {len(ended)} ended, {len(failed)} failed"
    return counts + (f"; running: {names}{more}" if running else "")


def short(nodeid: str) -> str:
    """Without the folders of its path."""
    path, _, test = nodeid.partition("::")
    return f"{Path(path).name}::{test}"


def reports(folder: str) -> list[Any]:
    rows: list[Any] = []
    for path in Path(folder).glob("*.reports"):
        for line in path.open():
            with suppress(ValueError):  # half a line, of a process that is writing it or was killed
                rows.append(json.loads(line))
    return rows


def claims(folder: str) -> list[Path]:
    return [path for path in Path(folder).iterdir() if not path.suffix]


def summarize(folder: str, codes: list[int], logs: list[Path]) -> bool:
    """Print counts, and tests whose process ended before them; whether all is well."""
    rows = reports(folder)
    failed = {nodeid for nodeid, outcome, _ in rows if outcome == "failed"}
    outcomes = dict(Counter(outcome for _, outcome, _ in rows if outcome not in ("failed", "ended", "collected")))
    ended = {nodeid: float(text) for nodeid, outcome, text in rows if outcome == "ended"}
    lost = sorted({path.read_text() for path in claims(folder)} - ended.keys())
    for nodeid in lost:
        print(f"\n== {nodeid}\nits process ended before it did")
    strange = [(code, log) for code, log in zip(codes, logs, strict=True) if code not in (0, 1, 5)]
    for code, log in strange:
        print(f"\n== a process ended with {code}\n{log.read_text()[-2000:]}")
    slowest = sorted(ended, key=ended.__getitem__, reverse=True)[:5]
    print("\nslowest: " + ", ".join(f"{nodeid} {ended[nodeid]:.0f} s" for nodeid in slowest))
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted((outcomes | {"failed": len(failed)}).items()))
    print(f"\n{counts}{f', {len(lost)} lost' if lost else ''}")
    return bool(ended) and not failed and not lost and not strange


if __name__ == "__main__":
    sys.exit(main())
