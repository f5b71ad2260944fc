"""Tables of measured choices: how long each way to do an op took, for several sizes; how they are made, kept and read.

A size is a number of tokens, a choice is whatever the op's kernels can be given (tiles); this file knows neither what
is in a choice nor how it is run: the op's tuner hands in a Bench and says how a choice is written as JSON.

Two kinds of tables, read by the same code:

* cached, in ANABRANCH_CACHE or ~/.cache/anabranch: measured on this machine. Good for exactly the code that was timed,
  so a changed kernel or another Triton means another file.
* shipped with the package (kernels/tables): measured once, for everybody with such a device. They promise only that
  choices still mean what they meant (`version`, raised by hand): an edit that leaves times as they were must not
  send every user to the tuner.

A file that is missing, torn, of another shape or of other code is never an error: it is passed over with a line in
the log, and the op's own rule decides.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")
C = TypeVar("C", contravariant=True)
Facts = Mapping[str, int | str]
"""What a table is good for (op, device, shape), or what it was made with."""
Progress = Callable[[int, int], None]
"""Called with (measurements done, in all)."""

FORMAT = 1
SHIPPED = Path(__file__).with_name("tables")
LEVELS = ("off", "fast", "full")
FAST_SECONDS = 14.5
"""A start may take 15 for it; setting up and the last measurement come on top."""
COMPILING = 0.75
"""Share of the budget after which nothing more is compiled, so that what there is can be timed."""
NOISE = 0.02
"""A choice must beat the op's own rule by more than this."""
MOST = 16384
"""The largest size to measure; what is larger is done as this."""
HOPELESS = 1.25
"""A choice so many times slower than the best of its size is not refined."""


class Codec(Protocol[T]):
    """How a choice is written as a JSON object."""

    def encode(self, choice: T) -> dict[str, Any]: ...

    def decode(self, written: dict[str, Any]) -> T:
        """ValueError if it is no choice."""


@dataclass(slots=True)
class Table(Generic[T]):
    """µs of every choice that was timed, for each size."""

    times: dict[int, dict[T, float]]
    level: str = "fast"
    wanted: tuple[int, ...] = ()
    """Sizes that were to be measured; some are missing where time ran out."""
    about: dict[str, Any] = field(default_factory=dict)
    """For people: machine, date, command."""

    @property
    def missing(self) -> list[int]:
        return [size for size in self.wanted if not self.times.get(size)]

    def check(self) -> None:
        assert self.level in LEVELS
        for size, times in self.times.items():
            assert size > 0 and times, f"{size}: empty"
            assert all(us > 0 for us in times.values()), f"{size}: {times}"

    def estimate(self, size: int, adapt: Callable[[T], T | None] = lambda choice: choice) -> dict[T, float]:
        """µs that choices will take at any size; `adapt` says what a choice becomes there, None if it cannot do it.

        Between two measured sizes: what was timed at both, interpolated. Where nothing was, and outside, as at the
        nearest size that has anything.
        """
        at: dict[int, dict[T, float]] = {}
        for known in sorted(self.times):
            for choice, us in self.times[known].items():
                adapted = adapt(choice)
                if adapted is not None:
                    times = at.setdefault(known, {})
                    times[adapted] = min(us, times.get(adapted, us))
        sizes = list(at)
        place = bisect_left(sizes, size)
        if not sizes or size in at:
            return at.get(size, {})
        if 0 < place < len(sizes):
            low, high = sizes[place - 1], sizes[place]
            share = (size - low) / (high - low)
            both = {c: us + share * (at[high][c] - us) for c, us in at[low].items() if c in at[high]}
            return both or at[low if size * size <= low * high else high]
        return at[sizes[min(place, len(sizes) - 1)]]

    def pick(self, size: int, rule: T, adapt: Callable[[T], T | None] = lambda choice: choice) -> T:
        """The fastest choice; the op's own rule where nothing beats it by more than noise."""
        times = self.estimate(size, adapt)
        if not times:
            return rule
        best = min(times, key=times.__getitem__)
        return rule if times.get(rule, float("inf")) <= times[best] * (1 + NOISE) else best


# ---------------------------------------------------------------------------------------------------------------------
# On disk
# ---------------------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    base = os.environ.get("ANABRANCH_CACHE")
    if base:
        return Path(base) / "tuning"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anabranch" / "tuning"


def hash_files(files: Sequence[Path]) -> str:
    """Of names and contents, whatever the order."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def file_name(good_for: Facts, made_with: Facts | None = None) -> str:
    """Readable, and different for everything that a table depends on; a shipped one has no second part."""
    name = "-".join(f"{key}{value}" if isinstance(value, int) else value for key, value in good_for.items())
    if made_with is not None:
        text = json.dumps([FORMAT, dict(good_for), dict(made_with)], sort_keys=True)
        name += "-" + hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{name}.json"


def save(path: Path, table: Table[T], codec: Codec[T], good_for: Facts, made_with: Facts) -> bool:
    """Write a table so that whoever reads meanwhile sees the old file or the new one; False if it cannot be written."""
    table.check()
    head = {
        "format": FORMAT,
        "for": dict(good_for),
        "made_with": dict(made_with),
        "level": table.level,
        "wanted": list(table.wanted),
        "about": table.about,
    }
    rows = [
        json.dumps({"tokens": size, "us": round(us, 3), **codec.encode(choice)})
        for size in sorted(table.times)
        for choice, us in sorted(table.times[size].items(), key=lambda item: item[1])
    ]
    text = json.dumps(head, indent=1, ensure_ascii=False)[:-2] + ',\n "rows": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n"
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", suffix=".tmp", delete=False) as file:
            temporary = file.name
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        log.warning("tuning table not kept, it will be measured again: %s", error)
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return False
    return True


def read(path: Path, codec: Codec[T], good_for: Facts, made_with: Facts) -> Table[T] | None:
    """The table in a file if it is whole and for these facts; else None, with a line in the log if there was a file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        log.warning("tuning table %s is ignored: %s", path, error)
        return None
    try:
        return _parse(json.loads(text), codec, good_for, made_with)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        log.warning("tuning table %s is ignored: %s: %s", path, type(error).__name__, error)
        return None


def _parse(found: dict[str, Any], codec: Codec[T], good_for: Facts, made_with: Facts) -> Table[T]:
    for name, expected in (("format", FORMAT), ("for", dict(good_for)), ("made_with", dict(made_with))):
        if found[name] != expected:
            raise ValueError(f"{name} is {found[name]!r}, wanted {expected!r}")
    if found["level"] not in LEVELS:
        raise ValueError(f"level {found['level']!r}")
    times: dict[int, dict[T, float]] = {}
    for row in found["rows"]:
        row = dict(row)
        size, us = row.pop("tokens"), row.pop("us")
        if type(size) is not int or size < 1 or not isinstance(us, int | float) or not 0 < us < 1e9:
            raise ValueError(f"a row of {size!r} tokens and {us!r} µs")
        times.setdefault(size, {})[codec.decode(row)] = float(us)
    if not times:
        raise ValueError("no rows")
    wanted = tuple(found["wanted"])
    if not all(type(size) is int for size in wanted):
        raise ValueError(f"wanted sizes {wanted!r}")
    return Table(times, found["level"], wanted, dict(found["about"]))


def find(codec: Codec[T], good_for: Facts, made_with: Facts, version: int) -> Table[T] | None:
    """The table for these facts: measured here, else shipped."""
    cached = read(cache_folder() / file_name(good_for, made_with), codec, good_for, made_with)
    return cached or read(SHIPPED / file_name(good_for), codec, good_for, {"version": version})


def keep(table: Table[T], codec: Codec[T], good_for: Facts, made_with: Facts) -> Path | None:
    """Save a table that was measured here; where, if it could be written."""
    path = cache_folder() / file_name(good_for, made_with)
    return path if save(path, table, codec, good_for, made_with) else None


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


class Bench(Protocol[C]):
    """The device, as far as measuring needs it."""

    def compile(self, wanted: Sequence[tuple[int, C]], seconds: float) -> None:
        """Compile for (size, choice) pairs, for at most so many seconds."""

    def time(self, size: int, choice: C) -> float | None:
        """µs; None if it was not compiled, does not run or gives something wrong. Never raises for those."""


@dataclass(frozen=True, slots=True)
class Search(Generic[T]):
    """A choice and what may be changed in it, one stage after the other: first the one product, then the other.

    With a stage for each product, g + d measurements find what g · d would, as far as the products do not care about
    each other; and every kernel is compiled once.
    """

    base: T
    stages: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    """Fields of the choice to be replaced."""

    def near(self) -> list[T]:
        """The base and every single change of it: all kernels that the search can need."""
        return [self.base, *(replace(self.base, **c) for stage in self.stages for c in stage)]  # type: ignore[type-var]


def measure(
    bench: Bench[T],
    plans: Mapping[int, Sequence[Search[T]]],
    seconds: float = float("inf"),
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[int, dict[T, float]]:
    """Times of choices for each size, in the order of `plans`, until time is up: what was measured by then is kept."""
    begin = clock()
    near = [(size, choice) for size, searches in plans.items() for one in searches for choice in one.near()]
    bench.compile(list(dict.fromkeys(near)), COMPILING * seconds)
    found: dict[int, dict[T, float]] = {}
    total, done = len(set(near)), 0

    def timed(size: int, choice: T) -> bool:
        """Whether the choice has a time now."""
        nonlocal done
        times = found.setdefault(size, {})
        if choice not in times and clock() - begin < seconds:
            us = bench.time(size, choice)
            if us is not None:
                times[choice] = us
            done += 1
            if progress is not None:
                progress(min(done, total), total)
        return choice in times

    for size, searches in plans.items():
        for one in searches:
            if timed(size, one.base):
                _refine(size, one, found[size], timed)
    if progress is not None:
        progress(total, total)
    return {size: times for size, times in found.items() if times}


def _refine(size: int, one: Search[T], times: dict[T, float], timed: Callable[[int, T], bool]) -> None:
    best = one.base
    for stage in one.stages:
        if times[best] > HOPELESS * min(times.values()):
            return
        changed = [replace(best, **change) for change in stage]  # type: ignore[type-var]
        best = min([best, *(c for c in changed if timed(size, c))], key=times.__getitem__)


def buckets(level: str, most: int) -> tuple[int, ...]:
    """Sizes to measure for batches of up to `most` tokens, those that matter most first."""
    sizes = [1, 64, 16, 4096, 256, 8, 1024, MOST] if level == "fast" else [1 << i for i in range(MOST.bit_length())]
    most = min(most, MOST)
    kept = [size for size in sizes if size <= most]
    return tuple(kept if most < 2 * max(kept) else [*kept, most])
