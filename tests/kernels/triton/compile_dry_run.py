"""Compiles for an H200, without one, what a start would: `python -m tests.kernels.triton.compile_dry_run [N]`.

Covers every kernel that the dry run of three models launches, Gluon's included, in at most N specialisations each
(default: all). Prints the Triton version, a line for each failure, and the counts; exit code 1 if one failed. With
another Triton first on PYTHONPATH it proves that one.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import triton
from triton.runtime.driver import driver

from anabranch.kernels import precompile_problem
from anabranch.kernels.compiling.precompile import Job, precompile
from anabranch.kernels.compiling.versions import gluon_problem
from tests.engine.test_dry_run import dry_run_jobs
from tests.kernels.triton.ahead_of_time import NoDevice

MODELS = ("qwen3-30b-a3b", "qwen1.5-moe-a2.7b", "gemma4-26b-a4b")


def chosen(most: int) -> list[Job]:
    """At most this number of specialisations of each kernel, spread over all that there are."""
    by_kernel: dict[str, dict[str, Job]] = defaultdict(dict)
    for model in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            known, missing, _ = dry_run_jobs(model, Path(folder), 0)
        assert not missing
        for job in known:
            by_kernel[job.kernel.__name__][job.hash()] = job
    found = []
    for jobs in by_kernel.values():
        count = min(most, len(jobs)) if most else len(jobs)
        found += [list(jobs.values())[place * len(jobs) // count] for place in range(count)]
    return found


def main() -> int:
    driver.set_active(NoDevice())
    jobs = chosen(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    failed = precompile(jobs)
    for name in failed:
        print(f"failed: {name}")
    kernels = {job.kernel.__name__ for job in jobs}
    gluon = {job.kernel.__name__ for job in jobs if job.kernel.is_gluon()}
    print(f"triton {triton.__version__}: {gluon_problem() or 'Gluon'}; {precompile_problem() or 'ahead of time'}")
    print(f"{len(kernels)} kernels, {len(gluon)} of them in Gluon, {len(jobs)} specialisations, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
