"""Raises the process's limit of open files, and computes how many connections fit under it."""

from __future__ import annotations

import sys

WANTED = 65536  # more is of no use, and a limit of a billion makes some programs slow
LESS = (10240, 4096)  # tried in turn where the system refuses more, as macOS does although its hard limit is unlimited
FILES = 64  # that the process has open in addition to its connections
AT_ONCE = 64  # connections accepted before the first of them is counted
MOST = 8192  # connections by default
FEWEST = 16


def raise_limit() -> int:
    """Raise the limit of open files of this process and its children as far as allowed; return the new limit."""
    if sys.platform == "win32":
        return WANTED
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited:
        return WANTED
    for wanted in (WANTED if hard == unlimited else min(hard, WANTED), *LESS):
        if soft < wanted and (hard == unlimited or wanted <= hard):
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            except (ValueError, OSError):
                continue
            return wanted
    return soft


def max_connections(wanted: int | None, limit: int) -> int:
    """How many connections may be open at once; None: as many as fit, up to MOST. ValueError if they do not fit."""
    fitting = limit - FILES - AT_ONCE
    if fitting < (wanted or FEWEST):
        needed = (wanted or FEWEST) + FILES + AT_ONCE
        raise ValueError(
            f"{wanted or FEWEST} connections need {needed} open files and the limit is {limit}: "
            f"raise it with `ulimit -n {needed}`" + (", or lower --max-connections" if wanted else "")
        )
    return wanted or min(MOST, fitting)
