"""Tables of measured times: read between sizes, saved on disk, measured within a budget by a fake clock."""

import json
import logging
import multiprocessing
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from anabranch.kernels.tuning import search
from anabranch.kernels.tuning import table as tables
from anabranch.kernels.tuning.search import Search
from anabranch.kernels.tuning.table import Table


@dataclass(frozen=True)
class Way:
    """A choice of two products."""

    first: int
    second: int = 0


class WayCodec:
    def encode(self, choice: Way) -> dict[str, Any]:
        return {"first": choice.first, "second": choice.second}

    def decode(self, written: dict[str, Any]) -> Way:
        if set(written) != {"first", "second"} or not all(type(value) is int for value in written.values()):
            raise ValueError(f"no way: {written}")
        return Way(**written)


CODEC = WayCodec()
GOOD_FOR = {"op": "walk", "arch": "sm_90", "E": 4}
MADE_WITH = {"sources": "abc", "triton": "3.6.0"}
A, B, C = Way(1), Way(2), Way(3)
TABLE: Table[Way] = Table({1: {A: 10.0, B: 12.0}, 16: {B: 30.0, C: 20.0}, 64: {C: 50.0, B: 40.0}}, "fast", (1, 16, 64))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "shipped")
    return tmp_path / "cache" / "tuning"


# -- Reading between sizes ---------------------------------------------------------------------------------------------


def test_a_measured_size_is_taken_as_it_is() -> None:
    assert TABLE.estimate(16) == {B: 30.0, C: 20.0}
    assert TABLE.pick(16, A) == C


def test_between_two_sizes_what_was_timed_at_both_is_interpolated() -> None:
    assert TABLE.estimate(40) == {B: pytest.approx(35.0), C: pytest.approx(35.0)}
    assert TABLE.pick(28, A) == C and TABLE.pick(52, A) == B
    assert TABLE.estimate(6) == {B: pytest.approx(12 + 5 / 15 * 18)}, "A was not timed at 16 tokens"


def test_where_two_sizes_have_nothing_in_common_the_nearest_decides() -> None:
    table = Table({4: {A: 1.0}, 64: {B: 2.0}})
    assert table.pick(16, C) == A and table.pick(17, C) == B  # 16 is as many times 4 as 64 is of it


def test_outside_it_is_the_last_size() -> None:
    table = Table({8: {A: 1.0, B: 2.0}, 16: {B: 3.0}})
    assert table.pick(1, C) == A and table.pick(10_000, C) == B


def test_what_cannot_be_done_is_not_picked() -> None:
    def without_c(way: Way) -> Way | None:
        return None if way == C else way

    assert TABLE.pick(16, A, without_c) == B
    assert TABLE.estimate(16, lambda way: None) == {} and TABLE.pick(16, A, lambda way: None) == A
    # Nothing usable at 16 tokens: the neighbours are 1 and 64 then.
    assert TABLE.estimate(16, lambda way: way if way == A else None) == {A: 10.0}
    for times in ({B: 30.0, C: 20.0}, {C: 20.0, B: 30.0}):
        assert Table({16: times}).estimate(16, lambda way: A) == {A: 20.0}, "two that become one: the faster"


def test_the_rule_stays_unless_it_is_beaten_by_more_than_noise() -> None:
    assert Table({1: {A: 10.1, B: 10.0}}).pick(1, A) == A
    assert Table({1: {A: 10.3, B: 10.0}}).pick(1, A) == B
    assert Table({1: {A: 10.1, B: 10.0}}).pick(1, C) == B, "a rule that was not timed has no such right"


# -- On disk -----------------------------------------------------------------------------------------------------------


def test_a_table_comes_back_as_it_was(cache: Path) -> None:
    assert tables.find(CODEC, GOOD_FOR, MADE_WITH, 1) is None
    path = tables.keep(TABLE, CODEC, GOOD_FOR, MADE_WITH)
    assert path is not None and path.parent == cache and list(cache.iterdir()) == [path]
    assert tables.find(CODEC, GOOD_FOR, MADE_WITH, 1) == TABLE


def test_another_shape_device_or_code_has_another_file() -> None:
    names = {
        tables.file_name({**GOOD_FOR, **facts}, {**MADE_WITH, **code})
        for facts, code in (
            ({}, {}),
            ({"E": 5}, {}),
            ({"arch": "sm_80"}, {}),
            ({}, {"sources": "x"}),
            ({}, {"triton": "4"}),
        )
    }
    assert len(names) == 5


def test_measured_here_comes_before_shipped(caplog: pytest.LogCaptureFixture) -> None:
    shipped = Table({1: {C: 1.0}}, "full", (1,))
    assert tables.save(tables.SHIPPED / tables.file_name(GOOD_FOR), shipped, CODEC, GOOD_FOR, {"version": 3})
    assert tables.find(CODEC, GOOD_FOR, MADE_WITH, 3) == shipped
    assert tables.find(CODEC, {**GOOD_FOR, "E": 5}, MADE_WITH, 3) is None
    assert not caplog.records
    assert tables.find(CODEC, GOOD_FOR, MADE_WITH, 4) is None
    assert "made_with is {'version': 3}, wanted {'version': 4}" in caplog.text
    tables.keep(TABLE, CODEC, GOOD_FOR, MADE_WITH)
    assert tables.find(CODEC, GOOD_FOR, MADE_WITH, 3) == TABLE
    assert tables.find(CODEC, GOOD_FOR, {**MADE_WITH, "sources": "edited"}, 3) == shipped


def changed(**fields: Any) -> str:
    table = {
        "format": tables.FORMAT,
        "for": GOOD_FOR,
        "made_with": MADE_WITH,
        "level": "fast",
        "wanted": [1],
        "about": {},
        "rows": [{"tokens": 1, "us": 1.0, "first": 1, "second": 2}],
    }
    return json.dumps({**table, **fields})


BAD = {
    "empty": "",
    "no JSON": "{'tokens': 1}",
    "a list": "[]",
    "null": "null",
    "deep": "[" * 100_000,
    "another format": changed(format=2),
    "another shape": changed(**{"for": {**GOOD_FOR, "E": 8}}),
    "other code": changed(made_with={"sources": "abd", "triton": "3.6.0"}),
    "no rows": changed(rows=[]),
    "rows that are none": changed(rows=[1]),
    "a size that is none": changed(rows=[{"tokens": "1", "us": 1.0, "first": 1, "second": 2}]),
    "a truth for a size": changed(rows=[{"tokens": True, "us": 1.0, "first": 1, "second": 2}]),
    "a negative time": changed(rows=[{"tokens": 1, "us": -1.0, "first": 1, "second": 2}]),
    "no number": changed(rows=[{"tokens": 1, "us": float("nan"), "first": 1, "second": 2}]),
    "an unknown choice": changed(rows=[{"tokens": 1, "us": 1.0, "first": 1}]),
    "a strange level": changed(level="fastest"),
    "a strange wish": changed(wanted=["all"]),
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_a_bad_file_is_passed_over_with_a_line(text: str, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = cache / tables.file_name(GOOD_FOR, MADE_WITH)
    cache.mkdir(parents=True)
    path.write_text(changed())
    assert tables.find(CODEC, GOOD_FOR, MADE_WITH, 1) is not None and not caplog.records
    path.write_text(text)
    assert tables.find(CODEC, GOOD_FOR, MADE_WITH, 1) is None
    assert len(caplog.records) == 1 and str(path) in caplog.text and "is ignored" in caplog.text


def test_no_torn_or_garbled_file_is_an_error(cache: Path) -> None:
    path = tables.keep(TABLE, CODEC, GOOD_FOR, MADE_WITH)
    assert path is not None
    whole = path.read_bytes()
    rng = random.Random(0)
    for cut in range(0, len(whole) - 3, 7):  # behind the last brace nothing is missing
        path.write_bytes(whole[:cut])
        assert tables.find(CODEC, GOOD_FOR, MADE_WITH, 1) is None, cut
    for _ in range(200):
        garbled = bytearray(whole)
        for _ in range(3):
            garbled[rng.randrange(len(garbled))] = rng.randrange(256)
        path.write_bytes(bytes(garbled))
        found = tables.find(CODEC, GOOD_FOR, MADE_WITH, 1)
        assert found is None or isinstance(found, Table)


def test_a_folder_in_its_place_and_a_place_that_cannot_be_written(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (cache / tables.file_name(GOOD_FOR, MADE_WITH)).mkdir(parents=True)
    assert tables.find(CODEC, GOOD_FOR, MADE_WITH, 1) is None
    assert tables.keep(TABLE, CODEC, GOOD_FOR, MADE_WITH) is None
    assert "not saved" in caplog.text and not list(cache.glob(".*")), "nothing is left lying about"


def test_a_cache_folder_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path / "file"))
    assert tables.find(CODEC, GOOD_FOR, MADE_WITH, 1) is None
    assert tables.keep(TABLE, CODEC, GOOD_FOR, MADE_WITH) is None


def write_again_and_again(number: int, times: int) -> None:
    table = Table({size: {Way(number, size): float(number)} for size in range(1, 400)}, "fast", (number,))
    for _ in range(times):
        assert tables.keep(table, CODEC, GOOD_FOR, MADE_WITH) is not None


def test_two_that_write_at_once_leave_one_whole_table(cache: Path) -> None:
    """And whoever reads meanwhile sees one or the other."""
    write_again_and_again(7, 1)
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_again_and_again, args=(number, 40)) for number in (1, 2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        table = tables.find(CODEC, GOOD_FOR, MADE_WITH, 1)
        assert table is not None and len(table.times) == 399
        assert {choice.first for times in table.times.values() for choice in times} == set(table.wanted)
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert len(list(cache.iterdir())) == 1
    last = tables.find(CODEC, GOOD_FOR, MADE_WITH, 1)
    assert last is not None and last.wanted in ((1,), (2,))


def test_looking_a_table_up_takes_no_time() -> None:
    many = Table({1 << i: {Way(i, j): 1.0 + j for j in range(40)} for i in range(15)}, "full", tuple(range(15)))
    tables.keep(many, CODEC, GOOD_FOR, MADE_WITH)
    began = time.process_time()
    assert tables.find(CODEC, GOOD_FOR, MADE_WITH, 1) == many
    assert time.process_time() - began < 0.2


# -- Measuring ---------------------------------------------------------------------------------------------------------


class FakeBench:
    """Takes a second of a fake clock for each measurement; a choice's time is 100 · first + second."""

    def __init__(self, compile_seconds: float = 0.0, cost: float = 1.0) -> None:
        self.now = 1000.0
        self.compile_seconds = compile_seconds
        self.cost = cost
        self.compiled: list[tuple[int, Way]] = []
        self.asked: list[tuple[int, Way]] = []
        self.allowed = 0.0
        self.broken: set[Way] = set()

    def clock(self) -> float:
        return self.now

    def compile(self, wanted: Sequence[tuple[int, Way]], seconds: float) -> None:
        self.compiled, self.allowed = list(wanted), seconds
        self.now += min(seconds, self.compile_seconds)

    def time(self, size: int, choice: Way) -> float | None:
        self.asked.append((size, choice))
        self.now += self.cost
        return None if choice in self.broken else float(100 * choice.first + choice.second)


SEARCH = Search(Way(5, 5), (({"first": 3}, {"first": 4}), ({"second": 1}, {"second": 9})))


def test_a_search_finds_the_best_of_both_products_one_after_the_other() -> None:
    bench = FakeBench()
    times = search.measure(bench, {8: [SEARCH]}, clock=bench.clock)[8]
    assert min(times, key=times.__getitem__) == Way(3, 1), "which is none of the neighbours of the base"
    assert [choice for _, choice in bench.asked] == [Way(5, 5), Way(3, 5), Way(4, 5), Way(3, 1), Way(3, 9)]
    # All kernels that it needs, each once: those of either product with the other's as they were.
    assert bench.compiled == [(8, Way(5, 5)), (8, Way(3, 5)), (8, Way(4, 5)), (8, Way(5, 1)), (8, Way(5, 9))]


def test_what_is_hopeless_is_not_refined() -> None:
    bench = FakeBench()
    search.measure(bench, {8: [Search(Way(1)), SEARCH]}, clock=bench.clock)
    assert [choice for _, choice in bench.asked] == [Way(1), Way(5, 5)]


def test_what_does_not_run_is_left_out() -> None:
    bench = FakeBench()
    bench.broken = {Way(3, 5), Way(2)}
    found = search.measure(bench, {8: [SEARCH, Search(Way(2))], 9: [Search(Way(2))]}, clock=bench.clock)
    assert list(found) == [8], "a size at which nothing runs is missing"
    assert min(found[8], key=found[8].__getitem__) == Way(4, 1)
    assert not set(found[8]) & bench.broken


def test_nothing_is_measured_twice() -> None:
    bench = FakeBench()
    search.measure(bench, {8: [SEARCH, SEARCH, Search(Way(3, 1))]}, clock=bench.clock)
    assert len(bench.asked) == len(set(bench.asked)) == 5


@pytest.mark.parametrize("compiling", [0.0, 4.0, 1e9])
def test_the_budget_is_a_hard_stop_and_what_was_measured_is_kept(compiling: float) -> None:
    bench = FakeBench(compile_seconds=compiling, cost=0.5)
    plans = {size: [SEARCH] for size in (1, 64, 16, 256)}
    found = search.measure(bench, plans, 7.0, clock=bench.clock)
    assert bench.allowed == pytest.approx(search.COMPILING * 7)
    assert bench.now - 1000 <= 7 + bench.cost, "at most one measurement begins before the end and ends behind it"
    left = int((7 - min(compiling, search.COMPILING * 7)) / 0.5)
    assert len(bench.asked) == pytest.approx(min(left, 20), abs=1)
    assert list(found) == list(plans)[: len(found)], "the sizes that come first are complete"
    table = Table(found, "fast", tuple(plans))
    assert table.missing == [size for size in plans if size not in found]
    assert bool(table.missing) == (len(bench.asked) < 16)
    table.check()


def test_progress_only_grows_and_ends_at_the_end() -> None:
    bench = FakeBench()
    said: list[tuple[int, int]] = []
    search.measure(bench, {8: [Search(Way(1)), SEARCH]}, progress=lambda *what: said.append(what), clock=bench.clock)
    assert said == sorted(said) and said[-1] == (6, 6)


def test_sizes_to_measure() -> None:
    assert sorted(search.buckets("fast", 8192)) == [1, 8, 16, 64, 256, 1024, 4096, 8192]
    assert search.buckets("fast", 8192)[0] == 1
    assert sorted(search.buckets("fast", 300)) == [1, 8, 16, 64, 256]
    assert search.buckets("fast", 1) == (1,) and search.buckets("full", 3) == (1, 2)
    for most in (16384, 20_000, 10**9):
        assert max(search.buckets("fast", most)) == max(search.buckets("full", most)) == 16384
    assert len(search.buckets("full", 16384)) == 15


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING, "anabranch.kernels.tuning"):
        yield
