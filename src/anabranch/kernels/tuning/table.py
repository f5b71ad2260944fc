"""Tables of measured times: how long each choice took at each size, and the files that keep them.

A size is a number of tokens; a choice is a set of launch parameters (tiles) of the op's kernels. This file does not
know what a choice contains: the op's tuner provides a codec that writes it as JSON.

Two kinds of files are read by the same code:

* cached, in ANABRANCH_CACHE or ~/.cache/anabranch: measured on this machine, valid for exactly the code that was timed.
  A changed kernel or another Triton has another file name.
* shipped with the package (`tables/`): measured once for a device model. They depend on `version` only, which is raised
  by hand when choices change their meaning, so that other edits do not make every user measure again.

A file that is missing, damaged, or for another shape or code is never an error: it is ignored with a line in the log,
and the op's own rule decides.
"""

import contextlib
import hashlib
import json
import logging
import os
import secrets
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")
Facts = Mapping[str, int | str]
"""What a table applies to (op, device, shape), or the code and compiler that it was measured with."""

FORMAT = 1
SHIPPED = Path(__file__).with_name("tables")
LEVELS = ("off", "fast", "full")
NOISE = 0.02
"""A choice replaces the op's own rule if it is faster by more than this share."""


class Codec(Protocol[T]):
    """Converts a choice to a JSON object and back."""

    def encode(self, choice: T) -> dict[str, Any]: ...

    def decode(self, written: dict[str, Any]) -> T:
        """Raises ValueError for anything that is not a choice."""


@dataclass(slots=True)
class Table(Generic[T]):
    """µs of every choice that was timed, by size."""

    times: dict[int, dict[T, float]]
    level: str = "fast"
    wanted: tuple[int, ...] = ()
    """Sizes that were requested; some are missing where time ran out."""
    about: dict[str, Any] = field(default_factory=dict)
    """For the reader of the file: device, seconds, missing sizes."""

    @property
    def missing(self) -> list[int]:
        return [size for size in self.wanted if not self.times.get(size)]

    def check(self) -> None:
        assert self.level in LEVELS
        for size, times in self.times.items():
            assert size > 0 and times, f"{size}: empty"
            assert all(us > 0 for us in times.values()), f"{size}: {times}"

    def estimate(self, size: int, adapt: Callable[[T], T | None] = lambda choice: choice) -> dict[T, float]:
        """Expected µs of choices at any size. `adapt` converts a choice for that size; None: it cannot be used there.

        Between two measured sizes: linear interpolation of the choices timed at both. Where there are none, and beyond
        the first and last size: the times at the nearest size.
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


def cache_folder() -> Path:
    base = os.environ.get("ANABRANCH_CACHE")
    if base:
        return Path(base) / "tuning"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anabranch" / "tuning"


def hash_files(files: Sequence[Path]) -> str:
    """A hash of names and contents, independent of their order."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def replace_file(path: Path, write: Callable[[Path], object]) -> OSError | None:
    """Let `write` fill a file, then give it its name, so that a reader sees the old file or the new one. Returns the
    error if that is not possible."""
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        return error
    return None


def file_name(good_for: Facts, made_with: Facts | None = None) -> str:
    """A readable name, unique for everything that a table depends on; shipped tables have no hash of `made_with`."""
    name = "-".join(f"{key}{value}" if isinstance(value, int) else value for key, value in good_for.items())
    if made_with is not None:
        text = json.dumps([FORMAT, dict(good_for), dict(made_with)], sort_keys=True)
        name += "-" + hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{name}.json"


def save(path: Path, table: Table[T], codec: Codec[T], good_for: Facts, made_with: Facts) -> bool:
    """Write a table; False if it cannot be written."""
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
    error = replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    if error is not None:
        log.warning("tuning table not saved, it will be measured again: %s", error)
    return error is None


def read(path: Path, codec: Codec[T], good_for: Facts, made_with: Facts) -> Table[T] | None:
    """The table in a file if it is complete and for these facts; else None, logged if there was a file."""
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
    """The table for these facts: a cached one, else a shipped one."""
    cached = read(cache_folder() / file_name(good_for, made_with), codec, good_for, made_with)
    return cached or read(SHIPPED / file_name(good_for), codec, good_for, {"version": version})


def keep(table: Table[T], codec: Codec[T], good_for: Facts, made_with: Facts) -> Path | None:
    """Save a table in the cache; its path, or None if it could not be written."""
    path = cache_folder() / file_name(good_for, made_with)
    return path if save(path, table, codec, good_for, made_with) else None
