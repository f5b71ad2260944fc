"""File descriptors of a process, as tests count them to find leaks."""

from __future__ import annotations

import contextlib
import os

import psutil


def num_descriptors(process: psutil.Process) -> int:
    """Open descriptors, less the one file that torch's CPU library keeps open.

    On aarch64 that library (oneDNN) opens `perf-PID.map` in the temporary folder when it generates its first kernel,
    which may be in any request. It is opened once: a second descriptor of it counts.
    """
    if not os.path.isdir("/proc/self/fd"):
        return process.num_fds()
    folder = f"/proc/{process.pid}/fd"
    names = []
    for number in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            names.append(os.readlink(f"{folder}/{number}"))
    has_map = any(os.path.basename(name) == f"perf-{process.pid}.map" for name in names)
    return len(names) - has_map
