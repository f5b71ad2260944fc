"""The tests that a platform must pass: `anabranch conformance --platform NAME`.

Every op × kernel × sample, a tiny model of each family, and the contract of streams, copies and captured graphs; all
compared with references on the CPU. Needs no files and no package but torch, so that any platform can run it.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from anabranch.platforms import Platform

SECTIONS = ("contract", "ops", "models")
"""A file each, with a function check_NAME."""


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table: what was tested, and what is wrong with it."""

    section: str
    name: str
    what: str
    """How it was tested: the kernel, the dtype, ..."""
    faults: tuple[str, ...] = ()
    absent: bool = False
    """The platform does not have it and does not claim to."""

    @property
    def passed(self) -> bool:
        return not self.faults


def attempt(section: str, name: str, what: str, check: Callable[[], Iterable[str]]) -> Result:
    """`check` gives what is wrong. What it raises is wrong too: a third party's platform may raise anything."""
    try:
        faults = tuple(check())
    except Exception as error:
        faults = (f"{type(error).__name__}: {error}",)
    return Result(section, name, what, faults)


def conformance(platform: Platform, sections: Sequence[str] = SECTIONS) -> Iterator[Result]:
    for section in sections:
        module = importlib.import_module(f"anabranch.conformance.{section}")
        yield from getattr(module, f"check_{section}")(platform)
