"""One line of the table: what was judged, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Result:
    section: str
    name: str
    what: str
    """How it was judged: the kernel, the dtype, ..."""
    faults: tuple[str, ...] = ()
    absent: bool = False
    """The platform does not have it and does not say that it has."""

    @property
    def passed(self) -> bool:
        return not self.faults


def attempt(section: str, name: str, what: str, check: Callable[[], list[str]]) -> Result:
    """`check` gives what is wrong; what it raises is wrong too. Somebody else's platform may raise anything."""
    try:
        found = check()
    except Exception as error:
        found = [f"{type(error).__name__}: {error}"]
    return Result(section, name, what, tuple(found))
