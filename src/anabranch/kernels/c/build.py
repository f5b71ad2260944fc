"""Compiles `kernels.c` with the machine's C compiler, once, into the cache folder; without one there are no kernels."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from anabranch.kernels.tuning.table import cache_folder, replace_file

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-O3", "-march=native", "-shared", "-fPIC", "-pthread", "-lm")
SECONDS = 120
"""Of a compilation, which takes two on an idle core."""


def load() -> ctypes.CDLL | str:
    """The compiled kernels, or why there are none."""
    if sys.platform != "linux":
        return "C kernels are built on Linux alone"
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "there is no C compiler; install gcc (or clang)"
    source = SOURCE.read_bytes()
    # What -march=native means may differ between machines that share a home.
    machine = f"{compiler} {FLAGS} {platform.machine()} {_processor()}"
    key = hashlib.sha256(source + machine.encode()).hexdigest()[:16]
    library = cache_folder().with_name("c") / f"kernels-{key}.so"
    if not library.exists():
        failed: list[str] = []

        def write(temporary: Path) -> None:
            command = [*compiler.split(), str(SOURCE), *FLAGS, "-o", str(temporary)]
            try:
                subprocess.run(command, check=True, capture_output=True, timeout=SECONDS, text=True)
            except subprocess.SubprocessError as error:
                failed.append(f"{' '.join(command)}: {getattr(error, 'stderr', None) or error}")
                raise OSError(str(error)) from error

        error = replace_file(library, write)
        if error is not None:
            return failed[0] if failed else str(error)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        return str(error)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    kinds = ("flags", "Features", "CPU part", "model name")
    return " ".join(sorted({line for line in lines if line.split("\t")[0].strip() in kinds}))
